"""`zen bench serve`: a server under load, as tables, as JSON and as a picture."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from server.benchmark_serve import ServePlan, bench_serve


def run(store: Path, plan: ServePlan, address: str | None, out: Path | None) -> None:
    """Measures and prints tables; writes the figures to a file as well.

    Raises:
      ValueError: as `bench_serve`.
      OSError: the file cannot be written.
    """
    figures = console.measured(out, lambda report: bench_serve(store, plan, address, report))
    _print(figures, plan)


def _print(figures: dict[str, Any], plan: ServePlan) -> None:
    for load in figures["loads"]:
        console.say(_heading(load, figures["capacity"]))
        _print_variants(load["variants"])
    _print_loads(figures["loads"])
    console.say(
        f"{figures['device']}; prompts of {plan.prompt_tokens} tokens, answers of "
        f"{plan.answer_tokens} on average, {plan.rows} rows, {plan.waiting} more may wait. "
        f"Goodput: answers a second whose first token came within {plan.slo_ttft_ms:g} ms and "
        f"the others within {plan.slo_tpot_ms:g} ms each."
    )


def _heading(load: dict[str, Any], capacity: float | None) -> str:
    share = "" if capacity is None else f", {load['rate'] / capacity:.2g} of the capacity"
    return f"{load['rate']:.2f} requests/s{share}"


def _print_variants(rows: list[dict[str, Any]]) -> None:
    titles = ("P50 TTFT ms", "P99 TTFT ms", "P50 / base", "P99 / base", "P50 TPOT ms")
    names = ("p50_ttft_ms", "p99_ttft_ms", "p50_over_base", "p99_over_base", "p50_tpot_ms")
    table = _table("variant", "requests", *titles, "P99 ITL ms", "tokens/s")
    for row in rows:
        figures = [_number(row[name]) for name in (*names, "p99_itl_ms", "tokens_per_s")]
        table.add_row(row["variant"], str(row["requests"]), *figures)
    console.stdout().print(table)


def _print_loads(loads: list[dict[str, Any]]) -> None:
    titles = ("requests", "goodput/s", "completed/s", "refused", "refusal P95 ms", "P99 TTFT ms")
    table = _table("requests/s", *titles, "errors", "client CPU")
    for load in loads:
        table.add_row(
            _number(load["rate"]),
            str(load["requests"]),
            _number(load["goodput"]),
            _number(load["completed"]),
            str(load["refused"]),
            _number(load["refused_p95_ms"]),
            _number(load["p99_ttft_ms"]),
            ", ".join(f"{n} {code}" for code, n in load["errors"].items()) or "none",
            f"{100 * load['client_cpu_share']:.0f} %",
        )
    console.stdout().print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
