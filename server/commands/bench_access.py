"""`zen bench access`: what TLS, tokens, traces and metrics cost, as a table and as JSON."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from server.benchmark_access import AccessPlan, bench_access


def run(store: Path, plan: AccessPlan, out: Path | None) -> None:
    """Measures and prints a table; writes the figures to a file as well.

    Raises:
      ValueError: there is no store, or requests do not fit the model.
      OSError: the file cannot be written.
    """
    figures = console.measured(out, lambda report: bench_access(store, plan, report))
    _print(figures, plan)


def _print(figures: dict[str, Any], plan: AccessPlan) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("server")
    for title in ("P50 TTFT ms", "P99 TTFT ms", "P50 TPOT ms", "P99 TPOT ms"):
        table.add_column(title, justify="right")
    for name, row in figures["servers"].items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.stdout().print(table)
    same = figures["over_same"]
    console.say(
        f"{figures['device']}; {plan.requests} requests to each of two servers of a kind, "
        f"{plan.prompt_tokens} tokens in and {plan.answer_tokens} out, one at a time; "
        f"{figures['spans']} spans were collected.\n"
        f"guarded over plain, by medians: {_ends(figures['over_plain'], 3)}\n"
        f"guarded over plain, milliseconds more in a round: {_ends(figures['added_ms'], 2)}\n"
        f"two plain servers: {_ends(same['plain'], 3)}\n"
        f"two guarded servers: {_ends(same['guarded'], 3)}"
    )


def _ends(found: dict[str, float], digits: int) -> str:
    """Both figures with their 95 % intervals."""
    return ", ".join(
        f"{name.upper()} {found[name]:.{digits}f} "
        f"({found[f'{name}_low']:.{digits}f} to {found[f'{name}_high']:.{digits}f})"
        for name in ("ttft", "tpot")
    )
