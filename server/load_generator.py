"""Open-loop load over gRPC: requests come by chance, whether or not the server keeps up.

Arrivals are a Poisson process and models are drawn by Zipf's law, so what a slow server makes wait
is waited for: times count from when a request was due, and not from when the generator got to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc
from zen_jax.checkpoint.manifest import BASE

# What a server says to somebody whom it has no room for.
_REFUSED = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")


@dataclass(frozen=True)
class Traffic:
    """What is asked for.

    Attributes:
        models: the base and the variants by how much they are asked for, the most first.
        zipf: the exponent of Zipf's law over the variants.
        base_share: of all requests, for the base.
        vocab_size: prompts are random token ids below it, so that no two begin alike.
        prompt_tokens: of each prompt.
        answer_tokens: of answers on average; they are half to one and a half times as long.
        seed: of all that is drawn.
    """

    models: Sequence[str]
    zipf: float
    base_share: float
    vocab_size: int
    prompt_tokens: int
    answer_tokens: int
    seed: int = 0

    def shares(self) -> dict[str, float]:
        """How much of the traffic each model has, adding up to 1."""
        variants = [name for name in self.models if name != BASE]
        if not variants:
            return {BASE: 1.0}
        weights = np.arange(1, len(variants) + 1) ** -self.zipf
        weights *= (1 - self.base_share) / weights.sum()
        return {BASE: self.base_share} | dict(zip(variants, weights.tolist(), strict=True))

    def requests(self, rng: np.random.Generator) -> Iterator[pb.GenerateRequest]:
        """Yields requests for ever."""
        shares = self.shares()
        names, weights = list(shares), np.array(list(shares.values()))
        least, most = max(1, self.answer_tokens // 2), max(2, self.answer_tokens * 3 // 2)
        while True:
            tokens = int(rng.integers(least, most + 1))
            yield pb.GenerateRequest(
                model=names[rng.choice(len(names), p=weights)],
                token_ids=pb.TokenIds(
                    ids=rng.integers(0, self.vocab_size, self.prompt_tokens).tolist()
                ),
                sampling=pb.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            )


@dataclass(slots=True)
class Outcome:
    """What became of a request; times are seconds of the generator's clock.

    Attributes:
        model: that was asked.
        due: when it was to be sent.
        sent: when it was.
        pieces: when tokens came, and how many each time.
        ended: when the call was over.
        code: the status it ended with.
        retry_after: whether a refusal said when to come back.
    """

    model: str
    due: float
    sent: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    code: str = "OK"
    retry_after: bool = False

    @property
    def refused(self) -> bool:
        """The server had no room for it."""
        return self.code in _REFUSED and not self.pieces

    @property
    def tokens(self) -> int:
        """That came."""
        return sum(count for _, count in self.pieces)

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token."""
        return self.pieces[0][0] - self.due

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None of a single token."""
        first, last = self.pieces[0], self.pieces[-1]
        later = self.tokens - first[1]
        return (last[0] - first[0]) / later if later else None


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Attributes:
        outcomes: of every request, in the order in which they were due.
        seconds: in which requests were sent.
        client_cpu: the generator's processor seconds over the seconds that the run took.
    """

    outcomes: list[Outcome]
    seconds: float
    client_cpu: float


class Generator:
    """Sends requests to one server. It belongs to the event loop that it is made in."""

    def __init__(self, address: str, traffic: Traffic) -> None:
        """Prepares for a server's host:port."""
        options = (("grpc.max_receive_message_length", -1),)
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub: Any = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self._rng = np.random.default_rng(traffic.seed)
        self._requests = traffic.requests(self._rng)

    async def close(self) -> None:
        """Drops the connection."""
        await self._channel.close()

    async def open_loop(
        self, rate: float, seconds: float, told: Callable[[int], None] = lambda sent: None
    ) -> Run:
        """Sends `rate` requests a second on average for so long, and waits for the answers.

        Args:
            told: how many were sent, after each.
        """
        clock, cpu = time.perf_counter, time.process_time
        start, cpu_start = clock(), cpu()
        tasks: list[asyncio.Task[Outcome]] = []
        due = start + self._rng.exponential(1 / rate)
        while due < start + seconds:
            request = next(self._requests)
            await asyncio.sleep(max(0.0, due - clock()))  # until its time, by the plan
            tasks.append(asyncio.create_task(self._ask(request, due)))
            told(len(tasks))
            due += self._rng.exponential(1 / rate)
        await asyncio.sleep(max(0.0, start + seconds - clock()))  # to the end of the run
        outcomes = list(await asyncio.gather(*tasks))
        return Run(outcomes, seconds, (cpu() - cpu_start) / (clock() - start))

    async def closed_loop(self, streams: int, seconds: float) -> Run:
        """Keeps so many requests under way for so long: as much as the server can do."""
        clock, cpu = time.perf_counter, time.process_time
        start, cpu_start = clock(), cpu()
        outcomes: list[Outcome] = []

        async def one() -> None:
            while clock() < start + seconds:
                outcomes.append(await self._ask(next(self._requests), clock()))

        await asyncio.gather(*(one() for _ in range(streams)))
        return Run(outcomes, seconds, (cpu() - cpu_start) / (clock() - start))

    async def ask(self, model: str) -> Outcome:
        """Sends one request to a model, and waits for its answer."""
        request = next(self._requests)
        request.model = model
        return await self._ask(request, time.perf_counter())

    async def _ask(self, request: pb.GenerateRequest, due: float) -> Outcome:
        clock = time.perf_counter
        outcome = Outcome(request.model, due, clock())
        call = self._stub.Generate(request)
        try:
            async for message in call:
                if message.token_ids:
                    outcome.pieces.append((clock(), len(message.token_ids)))
        except grpc.aio.AioRpcError as error:
            outcome.code = error.code().name
            status: Any = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
            outcome.retry_after = status is not None and any(
                detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details
            )
        outcome.ended = clock()
        return outcome
