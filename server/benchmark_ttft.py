"""The time to the first token of variants beside the base's, and how soon a cancelled row is free.

All of it goes over gRPC to a server of this process, as a client sees it. First tokens are asked
for one request at a time, the base and a variant in turn, which of them first by chance; no two
prompts begin alike, so that nothing of an earlier one can be of use.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from server.app import Progress, ZenServer, running
from server.client import Stream, ZenClient
from server.serve_options import ServeOptions
from server.snapshot import WorkerSnapshot
from zen_jax.benchmark import device_and_versions
from zen_jax.checkpoint.manifest import BASE
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_variant
from zen_jax.training.residual import round_tensors, write_folder

# Added to each weight of the base to make a variant where a store has none.
_CHANGE = 1e-4
# What the row of all variants together is called.
ALL = "all variants"
_WARM = 4
# Of the streams that are cancelled: prompts of so many tokens, and room for so many more.
_SHORT, _ANSWER = 8, 256
_POLL_S = 2e-4
# Longer than a row needs to be free, by far.
_GIVE_UP_S = 10.0


@dataclass(frozen=True)
class TtftPlan:
    """What to measure.

    Attributes:
        prompt_tokens: of each prompt.
        requests: timed for the base, and as many for all variants together.
        cancels: streams that are cancelled while all other rows decode.
        products, rows: as in `ServeOptions`.

    Raises:
        ValueError: a number below 1.
    """

    prompt_tokens: int = 512
    requests: int = 300
    cancels: int = 100
    products: str = "float32"
    rows: int = 16

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "requests", "cancels", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")


def bench_ttft(
    path: Path, names: Sequence[str], plan: TtftPlan, progress: Progress | None = None
) -> dict[str, Any]:
    """Measures on this machine.

    Args:
        path: a store; one without variants gets one that is its base and a little noise, elsewhere.
        names: of variants that take turns; all of the store's when empty.
        progress: told what is done, how much of it, and how much there is.

    Returns:
        {"models": [{"model", "requests", "p50_ms", "p99_ms", "p50_over_base", "p99_over_base"}],
        "cancel": {"streams", "rows", "p50_ms", "p99_ms", "step_ms"}, "compiles", "plan", "device",
        "versions"}. The base comes first, then "all variants", then each.

    Raises:
        ValueError: there is no store or no such variant, or the prompts do not fit the model.
    """
    with _with_variants(Store(path), progress) as store:
        unknown = sorted(set(names) - set(store.names()))
        if unknown:
            known = ", ".join(store.names())
            raise ValueError(f"there is no variant {unknown[0]}; the store has {known}")
        models, config = list(names) or store.names(), store.base().config
        length = min(plan.prompt_tokens + _ANSWER, config.max_position)
        if length <= plan.prompt_tokens:
            raise ValueError(
                f"prompts of {plan.prompt_tokens} tokens do not fit; the model has "
                f"{config.max_position} positions"
            )
        options = ServeOptions(
            port=0,
            rows=plan.rows,
            slots=len(models),
            max_length=length,
            products=plan.products,
        )
        with running(store, options, progress) as server, ZenClient(server.address) as client:
            bench = _Bench(server, client, plan, config.vocab_size)
            times = bench.first_tokens(models, progress)
            return {
                "models": by_model(times),
                "cancel": bench.cancels(models, progress),
                "compiles": bench.compiles(),
                "plan": asdict(plan),
            } | device_and_versions()


@contextmanager
def _with_variants(store: Store, progress: Progress | None) -> Iterator[Store]:
    """The store itself, or a copy of its base with one variant."""
    if store.names():
        yield store
        return
    with tempfile.TemporaryDirectory(prefix="zen-bench-") as folder:
        copy, tuned = Path(folder) / "store", Path(folder) / "tuned"
        shutil.copytree(store.path, copy)
        rng = np.random.default_rng(0)
        tensors = {
            name: np.float32(tensor) + _CHANGE * rng.standard_normal(tensor.shape, np.float32)
            for name, tensor in store.base_tensors()
        }
        write_folder(tuned, round_tensors(tensors), store.tokenizer_folder(None))
        convert_variant(tuned, copy, "noise", force=True, progress=progress)
        yield Store(copy)


class _Bench:
    """A server, and prompts that it never saw."""

    def __init__(
        self, server: ZenServer, client: ZenClient, plan: TtftPlan, vocab_size: int
    ) -> None:
        self._server, self._client, self._plan = server, client, plan
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(1)
        self._compiled = self._snapshot().compiles

    def compiles(self) -> int:
        """Programs that were compiled since."""
        return self._snapshot().compiles - self._compiled

    def first_tokens(
        self, models: Sequence[str], progress: Progress | None
    ) -> dict[str, list[float]]:
        """Milliseconds to the first token, by model, the base's first."""
        times: dict[str, list[float]] = {name: [] for name in (BASE, *models)}
        for name in (BASE, *models):
            for _ in range(_WARM):
                self._first_token(name)
        count = self._plan.requests
        for i in range(count):
            pair = [BASE, models[i % len(models)]]
            self._rng.shuffle(pair)
            for name in pair:
                times[name].append(self._first_token(name))
            if progress is not None:
                progress("first tokens", i + 1, count)
        return times

    def cancels(self, models: Sequence[str], progress: Progress | None) -> dict[str, Any]:
        """How long a row is taken after its stream was cancelled, while others decode."""
        names = [BASE, *models]
        taken: list[float] = []
        steps: list[float] = []
        for done in range(0, self._plan.cancels, self._plan.rows):
            streams = [self._started(names[row % len(names)]) for row in range(self._plan.rows)]
            steps.append(self._snapshot().step_s * 1e3)
            while streams:
                # Of a small model some may have come to their end by themselves: they do not count.
                running = self._snapshot().rows_in_use == len(streams)
                freed = self._freed_ms(streams.pop(), len(streams))
                taken += [freed] if running else []
            if progress is not None:
                progress("cancelled streams", done + self._plan.rows, self._plan.cancels)
        if not taken:
            raise ValueError(
                "all streams ended before they could be cancelled; take a larger model"
            )
        step_ms = float(np.median(steps))
        return {
            "streams": len(taken),
            "rows": self._plan.rows,
            "step_ms": step_ms,
        } | _middle_and_end(taken)

    def _prompt(self, tokens: int) -> list[int]:
        return self._rng.integers(0, self._vocab_size, tokens).tolist()

    def _first_token(self, model: str) -> float:
        """Milliseconds from asking until a token is there."""
        prompt = self._prompt(self._plan.prompt_tokens)
        start = time.perf_counter()
        stream = self._client.stream(model, token_ids=prompt, max_tokens=1, ignore_eos=True)
        for _ in stream:
            break
        first = time.perf_counter() - start
        for _ in stream:  # to its end, so that the next one is alone
            pass
        return first * 1e3

    def _started(self, model: str) -> Stream:
        """A stream of many tokens whose first has come."""
        assert self._server.engine is not None
        prompt = self._prompt(min(_SHORT, self._plan.prompt_tokens))
        room = self._server.engine.sizes.max_length - len(prompt)
        stream = self._client.stream(model, token_ids=prompt, max_tokens=room, ignore_eos=True)
        next(iter(stream))
        return stream

    def _freed_ms(self, stream: Stream, others: int) -> float:
        """Milliseconds from a stream's cancellation until only the others have rows."""
        start = time.perf_counter()
        stream.cancel()
        while self._snapshot().rows_in_use > others:
            if time.perf_counter() - start > _GIVE_UP_S:
                raise RuntimeError(f"a cancelled row was not free after {_GIVE_UP_S:g} s")
            time.sleep(_POLL_S)  # leaves the processor to the server, which shares the interpreter
        return (time.perf_counter() - start) * 1e3

    def _snapshot(self) -> WorkerSnapshot:
        worker = self._server.worker
        assert worker is not None
        return worker.snapshot()


def by_model(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Medians and 99th percentiles of milliseconds by model, and over the base's.

    Args:
        times: of the base and of each variant.

    Returns:
        As `bench_ttft` gives under "models".
    """
    everyone = [ms for name, taken in times.items() if name != BASE for ms in taken]
    base = _middle_and_end(times[BASE])
    rows = []
    for name, taken in {BASE: times[BASE], ALL: everyone, **times}.items():
        own = _middle_and_end(taken)
        over = {f"{at}_over_base": own[f"{at}_ms"] / base[f"{at}_ms"] for at in ("p50", "p99")}
        rows.append({"model": name, "requests": len(taken)} | own | over)
    return rows


def _middle_and_end(taken: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(taken, (50, 99))
    return {"p50_ms": float(p50), "p99_ms": float(p99)}
