"""From a call to its answer: its prompts run side by side, and what comes of them is sent on."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

from server.http.errors import of_status
from server.http.pieces import Counts, Piece, Spelling, Track, finish_of, told, usage_of
from server.http.reply import Reply, encoded
from server.http.schema import Call
from server.requests import Request
from server.service import GenerateService
from server.status import StatusError
from zen.v1 import generate_pb2 as pb
from zen_jax.checkpoint.manifest import Variant
from zen_jax.tokenizer import Tokenizer

# Prompts of one call that are asked at a time; the others wait here, not in the server's queue.
_AT_ONCE = 16
_VERSION = version("zen-jax")


class Shape(Protocol):
    """How answers look; the modules `chat` and `completions` are of this kind."""

    ID: str
    WHOLE: str
    CHUNK: str

    def call_of(self, given: dict[str, Any], timeout: str | None) -> Call: ...
    def chunks(self, piece: Piece, logprobs: bool) -> list[dict[str, Any]]: ...
    def choice(self, piece: Piece, logprobs: bool) -> dict[str, Any]: ...


class Answer:
    """The answers to one call, put together from what its prompts' requests bring."""

    def __init__(
        self,
        call: Call,
        shape: Shape,
        tokenizers: Callable[[Variant | None], Tokenizer],
        headers: Mapping[str, str],
    ) -> None:
        """Takes the call and its headers, how it is to look, and where tokenizers are found."""
        self._call, self._headers = call, headers
        self._shape = shape
        self._tokenizers = tokenizers
        self._logprobs = call.requests[0].sampling.HasField("logprobs")
        self._requests: dict[int, tuple[Request, Spelling]] = {}
        self._tracks: dict[int, Track] = {}
        self._counts = [Counts() for _ in call.requests]
        self._about: dict[str, Any] = {
            "id": shape.ID + uuid.uuid4().hex,
            "object": shape.CHUNK if call.stream else shape.WHOLE,
            "created": int(time.time()),
            "model": call.model,
            "system_fingerprint": None,
        }

    async def run(self, service: GenerateService, since: float, reply: Reply) -> None:
        """Runs the call and sends what comes of it.

        Args:
            service: what runs it.
            since: when it came, in seconds of the loop's clock.
            reply: where it is sent.

        Raises:
            HttpError: what the client is told.
            ClientGone: nobody reads it.
        """
        pieces: dict[int, list[Piece]] = {}

        async def take(prompt: int, message: pb.GenerateResponse) -> None:
            piece = self._piece(prompt, message)
            if self._call.stream:
                await self._send(piece, reply)
            else:
                pieces.setdefault(piece.index, []).append(piece)

        samples = self._call.requests[0].sampling.n
        turns = asyncio.Semaphore(min(_AT_ONCE, service.at_once(samples)))
        loop = asyncio.get_running_loop()

        async def ask(prompt: int, request: pb.GenerateRequest) -> None:
            async with turns:
                limit = self._call.timeout_s
                try:
                    await service.run(
                        request,
                        None if limit is None else limit - (loop.time() - since),
                        partial(take, prompt),
                        prepared=partial(self._prepared, prompt),
                        max_tokens=self._call.max_tokens,
                        headers=self._headers,
                        prompt=prompt,
                    )
                except StatusError as error:
                    raise of_status(error, partial(self._call.param_of, prompt)) from None

        await _all([partial(ask, i, request) for i, request in enumerate(self._call.requests)])
        if self._call.stream:
            await self._end(reply)
        else:
            await self._whole(pieces, reply)

    def _prepared(self, prompt: int, request: Request) -> None:
        spelling = Spelling(self._tokenizers(request.variant))
        self._requests[prompt] = request, spelling
        self._about["system_fingerprint"] = fingerprint(request.variant)

    def _piece(self, prompt: int, message: pb.GenerateResponse) -> Piece:
        request, spelling = self._requests[prompt]
        index = prompt * self._call.samples + message.index
        first = index not in self._tracks
        track = self._tracks.setdefault(index, Track(spelling))
        text, entries = message.text, []
        if first and self._call.echo:
            asked = self._call.requests[prompt]
            echo = asked.prompt or spelling.tokenizer.decode(request.token_ids)
            text = echo + text
            entries = track.prompt(message.prompt_logprobs, echo)
        entries += track.answer(told(message))
        finish = finish_of(message)
        if finish is not None:
            self._counts[prompt].add(message.completion.usage)
        return Piece(index, first, text, entries, finish)

    async def _send(self, piece: Piece, reply: Reply) -> None:
        for choice in self._shape.chunks(piece, self._logprobs):
            await reply.event(encoded(self._chunk([choice], None)))

    async def _end(self, reply: Reply) -> None:
        if self._call.include_usage:
            await reply.event(encoded(self._chunk([], usage_of(self._counts))))
        await reply.end()

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        counted = {"usage": usage} if self._call.include_usage else {}
        return self._about | {"choices": choices} | counted

    async def _whole(self, pieces: dict[int, list[Piece]], reply: Reply) -> None:
        """Long answers with log-probabilities are megabytes: they are made one by one."""
        choices: list[bytes] = []
        for index in sorted(pieces):
            whole = self._shape.choice(_joined(pieces.pop(index)), self._logprobs)
            choices.append((b"," if choices else b"") + encoded(whole))
            await asyncio.sleep(0)  # lets others have the loop between two of them
        head = encoded(self._about).removesuffix(b"}") + b',"choices":['
        usage = b'],"usage":' + encoded(usage_of(self._counts)) + b"}"
        await reply.json(head, *choices, usage)


def fingerprint(variant: Variant | None) -> str:
    """What answered: this program's version and the variant's weights."""
    digest = "base" if variant is None else variant.digest[:12]
    return f"zen-{_VERSION}-{digest}"


def _joined(pieces: Sequence[Piece]) -> Piece:
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        entries=[entry for piece in pieces for entry in piece.entries],
    )


async def _all(tasks: Sequence[Callable[[], Any]]) -> None:
    """Runs all; the first that fails ends the others, and its error is raised."""
    if len(tasks) == 1:
        await tasks[0]()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
