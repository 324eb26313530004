"""What a cold variant costs: the way from the disk into a slot, beside a plain read of its files.

The raw read takes the same files with as many threads. Before each cold turn the files are dropped
from the system's cache. Then the server's own worker is asked for the variant by several at once,
and decodes others while it is loaded.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from server.app import (
    ServeOptions,
    build_engine,
    make_worker,
    settle_memory,
    tokenizers_of,
)
from server.requests import Failure, Request, TokenEvent
from server.worker import Worker
from zen_jax.benchmark_decode import shape_config
from zen_jax.checkpoint.load import bank_schema
from zen_jax.checkpoint.manifest import Variant
from zen_jax.checkpoint.raw import READERS
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_variant
from zen_jax.delta.bank import write_slot
from zen_jax.made_up import made_up_variant
from zen_jax.sampling import SamplingParams
from zen_jax.staging import Staging
from zen_jax.training.residual import round_tensors, write_folder

# What is worked on, how many steps are done, how many there are.
type Progress = Callable[[str, int, int], None]

_PIECE = 2**20
# What the projection assumes: the specification's variant, its cards, and what each reads a second.
_BYTES, _CARDS, _CARD_BYTES_S, _WANTED_MS = 8.75e9, 8, 5.5e9, 200.0
_CHANGE = 1e-3
# Answers of others last for seconds: reading the prompt of the next one holds up all as a load may.
_LENGTH = 1024
# What an unload or a first token leaves to be done is over after it; nothing tells of its end.
_SETTLE_S = 0.1
# More than any load takes, by far.
_GIVE_UP_S = 300.0


@dataclass(frozen=True)
class ColdPlan:
    """How much is measured.

    Attributes:
        repeats: turns of each kind; the median counts.
        waiting: requests that ask for the cold variant at once.
        window_s: of decoding without loads, and while one is under way; each five times.
        rows: of others, that decode meanwhile.
        model: whose shapes the variant has that loads are timed with; None takes the store's.
    """

    repeats: int = 9
    waiting: int = 8
    window_s: float = 1.5
    rows: int = 2
    model: str | None = "1b"

    def __post_init__(self) -> None:
        for name in ("repeats", "waiting", "window_s", "rows"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")


def bench_coldstart(store: Store, plan: ColdPlan, progress: Progress) -> dict[str, Any]:
    """Measures a store's first variant, or a made-up one where it has none.

    Args:
        store: whose base decodes meanwhile.
        plan: how much.
        progress: told what is done.

    Returns:
        The figures of `zen bench coldstart --json`; milliseconds where a name has ms in it.

    Raises:
        ValueError: the store is damaged.
    """
    figures: dict[str, Any] = {}
    if plan.model is not None:
        with tempfile.TemporaryDirectory(prefix="zen-bench-", dir=store.path.parent) as folder:
            progress("writing a variant", 0, 1)
            made = made_up_variant(Path(folder), shape_config(plan.model))
            figures = _Loads(*made).measure(plan.repeats, progress)
    with _with_variant(store, progress) as (opened, variant):
        options = ServeOptions(rows=plan.rows + plan.waiting, slots=2, max_length=_LENGTH, pinned=0)
        engine = build_engine(opened, options, progress)
        loads = _Loads(opened, variant)
        figures = figures or loads.measure(plan.repeats, progress)
        worker = make_worker(opened, engine, options, tokenizers_of(opened))
        worker.start()
        settle_memory()  # as `zen serve` does
        try:
            serving = _Serving(worker, variant, loads, plan)
            figures |= serving.crowd()
            figures |= serving.neighbours(progress)
        finally:
            worker.stop()
    return figures | project(figures)


@contextmanager
def _with_variant(store: Store, progress: Progress) -> Iterator[tuple[Store, Variant]]:
    """The store and its first variant, or a store of links to its base with a variant of noise."""
    names = store.names()
    if names:
        yield store, store.variant(names[0])
        return
    with tempfile.TemporaryDirectory(prefix="zen-bench-", dir=store.path.parent) as folder:
        copy, tuned = Path(folder) / "store", Path(folder) / "tuned"
        for source in (store.path / "base").rglob("*"):
            target = copy / source.relative_to(store.path)
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, target)
        draw = np.random.default_rng(0)
        tensors = {
            name: np.float32(tensor) + _CHANGE * draw.standard_normal(tensor.shape, np.float32)
            for name, tensor in store.base_tensors()
        }
        write_folder(tuned, round_tensors(tensors), store.tokenizer_folder(None))
        convert_variant(tuned, copy, "noise", force=True, progress=progress)
        yield Store(copy), Store(copy).variant("noise")


class _Loads:
    """Loads of one variant and raw reads of its files, timed."""

    def __init__(self, store: Store, variant: Variant) -> None:
        schema = bank_schema(store, slots=1)
        self.staging, self.variant = Staging(store, schema), variant
        self.bank = schema.empty()
        self.write: Any = jax.jit(write_slot, donate_argnums=0)
        files = store.manifest(variant).files
        ordered = sorted(files, key=lambda file: -files[file].size)
        self.paths = [variant.path / file for file in ordered]
        self.sizes = [files[file].size for file in ordered]

    def forget(self) -> None:
        """Have the system drop what it holds of the files."""
        for path in self.paths:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

    def raw(self) -> float:
        """Milliseconds of reading all files by pread, nothing else."""
        rooms = [np.empty(size, np.uint8) for size in self.sizes]

        def read(which: Sequence[int]) -> None:
            for i in which:
                handle = os.open(self.paths[i], os.O_RDONLY)
                try:
                    view = memoryview(rooms[i])
                    for at in range(0, self.sizes[i], _PIECE):
                        os.preadv(handle, [view[at : at + _PIECE]], at)
                finally:
                    os.close(handle)

        begun = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            shares = [range(reader, len(rooms), READERS) for reader in range(READERS)]
            list(pool.map(read, shares))
        return (time.perf_counter() - begun) * 1e3

    def load(self) -> float:
        """Milliseconds of all stages, until the slot is written."""
        begun = time.perf_counter()
        fitted = self.staging.verify(self.staging.read(self.variant))
        self.bank = self.write(self.bank, 0, jax.block_until_ready(jax.device_put(fitted)))
        jax.block_until_ready(self.bank)
        return (time.perf_counter() - begun) * 1e3

    def measure(self, repeats: int, progress: Progress) -> dict[str, Any]:
        """Raw reads and loads in turn, cold and then from the system's cache."""
        self.load()
        taken: dict[str, list[float]] = {}
        for i in range(repeats):
            for cold in (True, False):
                for name, what in (("raw", self.raw), ("load", self.load)):
                    if cold:
                        self.forget()
                    taken.setdefault(f"{name} {cold}", []).append(what())
            progress("loads", i + 1, repeats)
        middle = {name: statistics.median(times) for name, times in taken.items()}
        return {
            "bytes": sum(self.sizes),
            "raw_read_ms": middle["raw True"],
            "load_ms": middle["load True"],
            "load_over_raw": middle["load True"] / middle["raw True"],
            "cached_raw_ms": middle["raw False"],
            "cached_load_ms": middle["load False"],
        }


class _Serving:
    """The server's worker, whose cold variant is asked for."""

    def __init__(self, worker: Worker, variant: Variant, loads: _Loads, plan: ColdPlan) -> None:
        self.worker, self.variant, self.loads, self.plan = worker, variant, loads, plan
        self.count = 0
        self.seen: list[tuple[float, int]] = []
        self.failures: list[Failure] = []

    def crowd(self) -> dict[str, Any]:
        """Several requests for a cold variant at once: how many loads they start."""
        self.loads.forget()
        before = self.worker.snapshot().loads
        left, over = self.plan.waiting, threading.Event()

        def heard(event: TokenEvent | Failure) -> None:
            nonlocal left
            if isinstance(event, Failure):
                self.failures.append(event)
            left -= isinstance(event, Failure) or event.finish is not None
            if not left:
                over.set()

        for _ in range(self.plan.waiting):
            self.ask(self.variant, 1, heard)
        if not over.wait(_GIVE_UP_S):
            raise ValueError(f"{left} requests were not answered within {_GIVE_UP_S:g} s")
        self.check()
        loads = self.worker.snapshot().loads - before
        return {"requests_waiting": self.plan.waiting, "loads_started": loads}

    def neighbours(self, progress: Progress) -> dict[str, Any]:
        """Time between tokens of others, without a load and while one is under way."""
        for _ in range(self.plan.rows):
            self.stream()
        before: list[float] = []
        during: list[float] = []
        for i in range(5):
            before.append(self.quiet())
            during.append(self.loading())
            progress("others meanwhile", i + 1, 5)
        self.check()
        return {
            "others_itl_ms_before": statistics.median(before),
            "others_itl_ms_during": statistics.median(during),
        }

    def check(self) -> None:
        if self.failures:
            raise ValueError(f"a request failed: {self.failures[0].message}")

    def ask(self, variant: Variant | None, tokens: int, heard: Any) -> None:
        self.count += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = Request(f"r{self.count}", variant, (1, 2, 3, 4), sampling, seed=0)
        self.worker.submit(request, heard)

    def stream(self) -> None:
        """One of the others: an answer as long as the context, and then another."""

        def heard(event: TokenEvent | Failure) -> None:
            if isinstance(event, Failure):
                if event.kind != "unavailable":
                    self.failures.append(event)
                return
            self.seen.append((time.perf_counter(), len(event.token_ids)))
            if event.finish is not None:
                self.stream()

        self.ask(None, _LENGTH - 8, heard)

    def quiet(self) -> float:
        """Milliseconds between two tokens of a row, without a load."""
        time.sleep(_SETTLE_S)
        # The time that is measured: others decode in it.
        return self.between(lambda: time.sleep(self.plan.window_s))

    def loading(self) -> float:
        """The same from when a load begins until it is in its slot, over loads that take as long
        together."""
        spent, tokens = 0.0, 0
        while spent < self.plan.window_s:
            self.worker.unload(self.variant).result(30.0)
            self.loads.forget()
            time.sleep(_SETTLE_S)
            begun = time.perf_counter()
            self.worker.load(self.variant).result(30.0)
            ended = time.perf_counter()
            spent, tokens = spent + ended - begun, tokens + self.tokens(begun, ended)
        return spent * 1e3 * self.plan.rows / max(tokens, 1)

    def between(self, what: Callable[[], None]) -> float:
        """Milliseconds between two tokens of a row while something is done."""
        begun = time.perf_counter()
        what()
        ended = time.perf_counter()
        tokens = self.tokens(begun, ended)
        return (ended - begun) * 1e3 * self.plan.rows / max(tokens, 1)

    def tokens(self, begun: float, ended: float) -> int:
        """How many all rows got in this time."""
        return sum(count for at, count in list(self.seen) if begun <= at <= ended)


def project(figures: dict[str, Any]) -> dict[str, Any]:
    """What a variant of 8.75 GB would take on eight cards that each read their shard.

    The reading is assumed; what a load costs beyond it is measured here, from the system's cache,
    and taken per byte.
    """
    share = _BYTES / _CARDS
    reading = share / _CARD_BYTES_S * 1e3
    beyond = max(figures["cached_load_ms"] - figures["cached_raw_ms"], 0.0)
    work = beyond / figures["bytes"] * share
    told = (
        f"assumed: {_CARDS} cards side by side, {_CARD_BYTES_S / 1e9:g} GB/s each, which read "
        f"{share / 1e9:.2f} GB in {reading:.0f} ms, and as many processors a card as this machine "
        f"has; measured here: {beyond:.1f} ms beyond a cached read of {figures['bytes']} bytes, "
        f"taken per byte, {work:.0f} ms more; the specification says {_WANTED_MS:.0f} ms"
    )
    return {"projected_ms_8.75GB": reading + work, "projected_from": told}
