"""What pages of keys and values are good for: prompts that begin alike, and requests at once.

First tokens are asked for over gRPC, as a client sees them. How many requests run at once is found
with the scheduler that serves, on a device that does nothing: memory alone decides.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import zen_jax
from server.app import Progress, ZenServer, running
from server.client import ZenClient
from server.demo import convert_family, read_family
from server.events import Arrived, Decode, Emit, Event, Prefill, Sampled
from server.jobs import SchedulerConfig
from server.requests import Request
from server.scheduler import initial, plan
from server.serve_options import ServeOptions
from zen_jax.benchmark import device_and_versions
from zen_jax.benchmark_kv import decode_kinds, divergences
from zen_jax.checkpoint.load import read_base
from zen_jax.checkpoint.store import Store
from zen_jax.chunking import chunk_shapes
from zen_jax.delta.bank import BankSchema
from zen_jax.residency import CacheConfig
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer

KINDS = (
    ("float32", None), ("float32", 16), ("float32", 32), ("float32", 64),
    ("bfloat16", None), ("bfloat16", 32),
    ("int8", None), ("int8", 32),
    ("float8_e4m3fn", None), ("float8_e4m3fn", 32),
)  # fmt: skip
FEWER = ("bfloat16", "int8", "float8_e4m3fn")
_TAIL = 16
_MEMBERS = 3


@dataclass(frozen=True)
class KvPlan:
    """What to measure.

    Attributes:
        prefix: tokens that prompts have in common.
        pairs: of prompts, the first of which reads the prefix.
        rows, context: of a decode step.
        repeats: of decode steps.
        fixed_rows, max_length: whose bytes are the budget for requests at once.
        paged_rows: that the paged server has.
        requests: of the mixed load.
        sheets: texts of 512 tokens for the quality of fewer bits.
    """

    prefix: int = 512
    pairs: int = 5
    rows: int = 16
    context: int = 512
    repeats: int = 15
    fixed_rows: int = 16
    max_length: int = 1024
    paged_rows: int = 96
    requests: int = 300
    sheets: int = 6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")


def bench_kv(path: Path, family: Path | None, whole: KvPlan, progress: Progress) -> dict[str, Any]:
    """Measures everything on this machine.

    Args:
        path: a store, whose base is measured.
        family: the demo family's folder, for the quality of fewer bits there too; None leaves it.
        whole: what to measure.
        progress: told what is done, how much of it, and how much there is.

    Returns:
        {"prefix", "decode", "at_once", "quality", "plan", "device", "versions"}.

    Raises:
        ValueError: there is no store or no family, or the model is too short.
    """
    store = Store(path)
    schema = BankSchema.covering(store.base().config, 1)
    found: dict[str, Any] = {"at_once": at_once(whole)}
    params = read_base(store, schema.held)
    kinds = decode_kinds(params, schema, KINDS, whole.rows, whole.context, whole.repeats, progress)
    found["decode"] = [asdict(kind) for kind in kinds]
    found["prefix"] = prefixes(store, whole, progress)
    progress("quality: base", 0, 1)
    tokens = Tokenizer.from_folder(store.tokenizer_folder(None)).encode(_english())
    sheets = [tokens[i * 512 : (i + 1) * 512] for i in range(whole.sheets)]
    found["quality"] = {"base": _quality(schema.held.config, params, sheets)}
    if family is not None:
        found["quality"] |= _of_family(family, whole, progress)
    return found | {"plan": asdict(whole)} | device_and_versions()


def _english() -> str:
    """English text that every Python has: its own manual."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def _quality(config: Any, params: Any, sheets: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [asdict(one) for one in divergences(config, params, sheets, FEWER)]


def _of_family(family: Path, whole: KvPlan, progress: Progress) -> dict[str, Any]:
    """The same for some fine-tunes of the demo family, on the inputs that they are scored with."""
    members = [member for member in read_family(family) if member.probes][:_MEMBERS]
    found = {}
    with TemporaryDirectory(prefix="zen-bench-") as work:
        place = Path(work)
        store = convert_family(family, members, place / "store", place / "full", progress)
        for member in members:
            progress(f"quality: {member.name}", 0, 1)
            one = zen_jax.load(store.path)[member.name]
            texts = [probe.prompt + probe.answer for probe in member.probes]
            sheets = [one.tokenizer.encode(text) for text in texts]
            found[member.name] = _quality(one.config, one.materialise(), sheets)
    return found


# Prompts that begin alike.


def prefixes(store: Store, whole: KvPlan, progress: Progress) -> dict[str, Any]:
    """Seconds to the first token of prompts that begin with a new prefix, and of the next ones."""
    config = store.base().config
    length = whole.prefix + _TAIL + 8
    if length > config.max_position:
        raise ValueError(
            f"a prefix of {whole.prefix} tokens does not fit; the model has {config.max_position}"
        )
    options = ServeOptions(port=0, rows=4, slots=1, max_length=length, products="bfloat16")
    rng = np.random.default_rng(2)
    first: list[float] = []
    second: list[float] = []
    cached: list[int] = []
    with running(store, options, progress) as server, ZenClient(server.address) as client:
        ask = _Asker(server, client)
        for done in range(-1, whole.pairs):
            prefix = rng.integers(0, config.vocab_size, whole.prefix).tolist()
            tails = rng.integers(0, config.vocab_size, (2, _TAIL)).tolist()
            times, counts = zip(*(ask(prefix + tail) for tail in tails), strict=True)
            if done >= 0:  # the first pair warms up
                first.append(times[0])
                second.append(times[1])
                cached.append(counts[1])
            progress("prompts that begin alike", done + 1, whole.pairs)
    ms = [statistics.median(times) * 1e3 for times in (first, second)]
    return {
        "first_ms": ms[0],
        "second_ms": ms[1],
        "second_over_first": ms[1] / ms[0],
        "cached_tokens": min(cached),
        "prompt_tokens": whole.prefix + _TAIL,
    }


class _Asker:
    """Asks for one token."""

    def __init__(self, server: ZenServer, client: ZenClient) -> None:
        self._client = client

    def __call__(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until the first token, and the tokens that were there."""
        start = time.perf_counter()
        stream = self._client.stream("base", token_ids=prompt, max_tokens=2, ignore_eos=True)
        for _ in stream:
            break
        taken = time.perf_counter() - start
        for _ in stream:
            pass
        return taken, stream.generation.completion.usage.cached_tokens


# Requests at once.


@dataclass
class _Run:
    """A load on one kind of rows: how many requests ran at once while others waited."""

    running: list[int] = field(default_factory=list)
    lost: int = 0


def at_once(whole: KvPlan) -> dict[str, Any]:
    """Requests at once within the bytes of fixed rows, on a load of mixed lengths.

    Prompts have 16 to 768 tokens and answers 16 to 256, both uniform in the logarithm, independent
    of each other, no two prompts alike; all wait from the start.
    """
    pages = whole.fixed_rows * whole.max_length
    fixed = _load(whole, whole.fixed_rows, whole.max_length, whole.fixed_rows)
    paged = _load(whole, whole.paged_rows, 32, pages // 32)
    means = [statistics.fmean(run.running) for run in (fixed, paged)]
    return {
        "fixed": means[0],
        "paged": means[1],
        "paged_over_fixed": means[1] / means[0],
        "most": max(paged.running),
        "rows_lost": paged.lost,
    }


def _load(whole: KvPlan, rows: int, page_size: int, pages: int) -> _Run:
    rng = np.random.default_rng(3)

    def length(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    shapes = chunk_shapes(512, rows, whole.max_length)
    config = SchedulerConfig(rows, shapes, 8, pages=pages, page_size=page_size)
    state, events, run = initial(config, CacheConfig(slots=1)), [], _Run()
    for i in range(whole.requests):
        prompt = (i, *[0] * (length(16, 768) - 1))
        answer = min(length(16, 256), whole.max_length - len(prompt))
        request = Request(f"r{i}", None, prompt, SamplingParams(max_tokens=answer), i)
        events.append(Arrived(request, frozenset(), answer, 0.0))
    now, left = 0.0, whole.requests
    while left:
        now += 1.0
        state, actions = plan(state, events, now)
        events = []
        for action in actions:
            match action:
                case Prefill(parts):
                    events += [_sampled(p.ticket, p.turn, 1) for p in parts if p.last]
                case Decode(members, steps):
                    events += [_sampled(ticket, turn, steps) for _, ticket, turn in members]
                case Emit(finish=finish):
                    left -= finish is not None
                case _:
                    pass
        if state.ready:
            run.running.append(state.running)
    run.lost = state.lost
    # What runs while the first rows fill does not count.
    run.running = run.running[len(run.running) // 10 :]
    return run


def _sampled(ticket: int, turn: int, count: int) -> Event:
    return Sampled(ticket, turn, (1,) * count)
