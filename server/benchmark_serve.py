"""A server under load: what it can do, what it does with half, all and twice of that, and how much
a variant's users wait beside the base's.

Capacity is what the server completes while as many requests are under way as it has rows, and as
many wait; then requests come at rates of their own. Goodput counts the answers a second that keep
the stated bounds on the time to the first token and on the time a token.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from server.app import Progress
from server.load_generator import Generator, Outcome, Run, Traffic
from zen_jax.benchmark import device_and_versions
from zen_jax.checkpoint.manifest import BASE
from zen_jax.checkpoint.store import Store

ALL = "all variants"
LOADS = (0.5, 1.0, 2.0)
# Of each model before anything counts, so that every variant is in memory.
_WARM = 2
_READY = re.compile(r"ready on (\S+?):(\d+)")
# For a server to start: weights are read and programs compiled.
_START_S = 900.0
_STOP_S = 60.0


@dataclass(frozen=True)
class ServePlan:
    """What to measure.

    Attributes:
        rate: requests a second; None finds the capacity first, and takes half, all and twice of it.
        seconds: of each run.
        warm_s: of traffic at a run's rate before it, which does not count.
        variants: how many of the store's take part; None takes all.
        zipf: the exponent of Zipf's law over them.
        base_share: of the requests that are for the base, which the others are compared with.
        prompt_tokens, answer_tokens: as in `Traffic`.
        slo_ttft_ms: an answer counts whose first token came within it of when it was due.
        slo_tpot_ms: and whose later tokens took no longer than it each.
        rows: that the server has.
        inbox: requests that may wait; None takes half as many as rows.
        products: as in `ServeOptions`.

    Raises:
        ValueError: a number out of range.
    """

    rate: float | None = None
    seconds: float = 60.0
    warm_s: float = 0.0
    variants: int | None = None
    zipf: float = 1.0
    base_share: float = 0.5
    prompt_tokens: int = 512
    answer_tokens: int = 32
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 200.0
    rows: int = 16
    inbox: int | None = None
    products: str = "float32"

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", "slo_ttft_ms", "slo_tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; expected a number above 0")
        for name in ("variants", "prompt_tokens", "answer_tokens", "rows", "inbox"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if not 0 <= self.warm_s < float("inf"):
            raise ValueError(f"warm_s is {self.warm_s}; expected seconds")
        if not self.zipf >= 0 or not 0 <= self.base_share <= 1:
            raise ValueError(
                f"zipf is {self.zipf} and base_share {self.base_share}; expected at least 0, and a "
                "share of 1"
            )

    @property
    def waiting(self) -> int:
        """Requests that may wait."""
        return max(1, self.rows // 2) if self.inbox is None else self.inbox


def bench_serve(
    path: Path, plan: ServePlan, address: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Measures a server that it starts, or one that runs.

    Args:
        path: the store that is served.
        address: of a server of this store; None starts one in a process of its own.
        progress: told what is done, how much of it, and how much there is.

    Returns:
        {"variants", "rate", "capacity", "goodput", "refused", "errors", ..} for the rate asked for,
        or for the capacity; "loads" holds the same for each rate. A variant is {"variant",
        "requests", "p50_ttft_ms", "p99_ttft_ms", "p50_over_base", "p99_over_base", "p50_tpot_ms",
        "p50_itl_ms", "p99_itl_ms", "tokens_per_s"}; the base comes first, then all variants
        together. Rates, capacity and goodput are requests a second; "rss_before" and "rss_after"
        are the bytes that the server has in memory.

    Raises:
        ValueError: the store has too few variants, the prompts do not fit, or the server does not
            start.
    """
    store = Store(path)
    config, names = store.base().config, store.names()
    count = len(names) if plan.variants is None else plan.variants
    if count > len(names):
        raise ValueError(f"variants is {count}; the store has {len(names)}")
    longest = plan.prompt_tokens + max(2, plan.answer_tokens * 3 // 2)
    if longest > config.max_position:
        raise ValueError(
            f"prompts of {plan.prompt_tokens} and answers of {plan.answer_tokens} tokens do not "
            f"fit; the model has {config.max_position} positions"
        )
    traffic = Traffic(
        [BASE, *names[:count]],
        plan.zipf,
        plan.base_share,
        config.vocab_size,
        plan.prompt_tokens,
        plan.answer_tokens,
    )
    figures = asyncio.run(_measure(path, plan, traffic, address, longest, progress))
    return figures | {"plan": asdict(plan)} | device_and_versions()


async def _measure(
    path: Path,
    plan: ServePlan,
    traffic: Traffic,
    address: str | None,
    longest: int,
    progress: Progress | None,
) -> dict[str, Any]:
    async with _served(path, plan, address, longest, len(traffic.models)) as (where, process):
        generator = Generator(where, traffic)
        try:
            for name in [*traffic.models] * _WARM:
                await generator.ask(name)
            capacity = None
            if plan.rate is None:
                if progress is not None:
                    progress("capacity", 0, 1)
                full = await generator.closed_loop(plan.rows + plan.waiting, plan.seconds)
                capacity = _completed(full.outcomes) / _span_s(full.outcomes)
            rates = [plan.rate] if capacity is None else [capacity * load for load in LOADS]
            loads = []
            for rate in rates:
                assert rate is not None
                if plan.warm_s > 0:
                    await generator.open_loop(rate, plan.warm_s)
                before = resident_bytes(process)
                load = await _at(generator, rate, plan, progress)
                growth = {"rss_before": before, "rss_after": resident_bytes(process)}
                loads.append(load | growth)
        finally:
            await generator.close()
    main = loads[0] if capacity is None else loads[LOADS.index(1.0)]
    return main | {"capacity": capacity, "loads": loads}


async def _at(
    generator: Generator, rate: float, plan: ServePlan, progress: Progress | None
) -> dict[str, Any]:
    expected = max(1, round(rate * plan.seconds))

    def told(sent: int) -> None:
        if progress is not None:
            progress(f"{rate:.2f} requests/s", min(sent, expected), expected)

    return summary(await generator.open_loop(rate, plan.seconds, told), rate, plan)


@asynccontextmanager
async def _served(
    path: Path, plan: ServePlan, address: str | None, longest: int, models: int
) -> AsyncIterator[tuple[str, int | None]]:
    """The address of a server, and its process if it is one that was started for this."""
    if address is not None:
        yield address, None
        return
    command = [sys.executable, "-m", "server.cli", "serve", str(path), "--port", "0"]
    command += ["--rows", str(plan.rows), "--inbox", str(plan.waiting)]
    command += ["--slots", str(max(1, models - 1)), "--max-length", str(longest)]
    command += ["--products", plan.products]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            while True:
                line = (await process.stdout.readline()).decode()
                if not line:
                    asked = " ".join(["zen", *command[3:]])
                    raise ValueError(f"the server did not start; `{asked}` shows why")
                if match := _READY.search(line):
                    break
        yield f"{match[1]}:{match[2]}", process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def resident_bytes(process: int | None) -> int | None:
    """What a process has in memory; None where that cannot be asked."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return 1024 * int(sizes[0]) if sizes else None


def summary(run: Run, rate: float, plan: ServePlan) -> dict[str, Any]:
    """The figures of one run.

    Args:
        run: what came of its requests.
        rate: that was asked for, requests a second.
        plan: whose bounds an answer has to keep to count as good.

    Returns:
        As `bench_serve` for one rate.
    """
    outcomes = run.outcomes
    good = [o for o in outcomes if _good(o, plan)]
    refused = [o for o in outcomes if o.refused]
    failed = [o for o in outcomes if o.code != "OK" and not o.refused]
    answered = [o for o in outcomes if o.code == "OK" and o.pieces]
    span = max(_span_s(outcomes), run.seconds)
    return {
        "variants": by_variant(answered, span),
        "rate": rate,
        "requests": len(outcomes),
        "goodput": len(good) / span,
        "good_share": len(good) / max(1, len(outcomes)),
        "completed": len(answered) / span,
        "refused": len(refused),
        "refused_p95_ms": _percentile([1e3 * (o.ended - o.sent) for o in refused], 95),
        "refused_without_time": sum(not o.retry_after for o in refused),
        "errors": _counts(failed),
        "p99_ttft_ms": _percentile([1e3 * o.ttft_s for o in answered], 99),
        "client_cpu_share": run.client_cpu,
        "client_late_p99_ms": _percentile([1e3 * (o.sent - o.due) for o in outcomes], 99),
        "seconds": span,
    }


def by_variant(answered: Sequence[Outcome], seconds: float) -> list[dict[str, Any]]:
    """Times and tokens by model, as `bench_serve` gives under "variants"."""
    groups: dict[str, list[Outcome]] = {BASE: [], ALL: []}
    for outcome in answered:
        groups.setdefault(outcome.model, []).append(outcome)
        if outcome.model != BASE:
            groups[ALL].append(outcome)
    rows = [_row(name, group, seconds) for name, group in groups.items() if group]
    base = next((row for row in rows if row["variant"] == BASE), None)
    for row in rows:
        for at in ("p50", "p99"):
            over = None if base is None else row[f"{at}_ttft_ms"] / base[f"{at}_ttft_ms"]
            row[f"{at}_over_base"] = over
    return rows


def _row(name: str, group: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    ttft = [1e3 * o.ttft_s for o in group]
    tpot = [1e3 * o.tpot_s for o in group if o.tpot_s is not None]
    gaps = [
        1e3 * (later[0] - earlier[0])
        for o in group
        for earlier, later in zip(o.pieces, o.pieces[1:], strict=False)
    ]
    return {
        "variant": name,
        "requests": len(group),
        "p50_ttft_ms": _percentile(ttft, 50),
        "p99_ttft_ms": _percentile(ttft, 99),
        "p50_tpot_ms": _percentile(tpot, 50),
        "p50_itl_ms": _percentile(gaps, 50),
        "p99_itl_ms": _percentile(gaps, 99),
        "tokens_per_s": sum(o.tokens for o in group) / seconds,
    }


def _good(outcome: Outcome, plan: ServePlan) -> bool:
    if outcome.code != "OK" or not outcome.pieces:
        return False
    tpot = outcome.tpot_s
    in_time = 1e3 * outcome.ttft_s <= plan.slo_ttft_ms
    return in_time and (tpot is None or 1e3 * tpot <= plan.slo_tpot_ms)


def _completed(outcomes: Sequence[Outcome]) -> int:
    return sum(o.code == "OK" for o in outcomes)


def _span_s(outcomes: Sequence[Outcome]) -> float:
    """From the first request to the last end, in seconds."""
    if not outcomes:
        return 0.0
    return max(o.ended for o in outcomes) - min(o.due for o in outcomes)


def _counts(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    codes = [o.code for o in outcomes]
    return {code: codes.count(code) for code in sorted(set(codes))}


def _percentile(values: Sequence[float], at: float) -> float | None:
    return float(np.percentile(values, at)) if values else None
