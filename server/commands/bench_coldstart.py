"""`zen bench coldstart`: what a variant costs that is not in memory, as a table and as JSON."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from server.benchmark_coldstart import ColdPlan, bench_coldstart
from zen_jax.checkpoint.store import Store

# What the JSON has, and no more.
FIGURES = (
    "bytes",
    "raw_read_ms",
    "load_ms",
    "load_over_raw",
    "cached_raw_ms",
    "cached_load_ms",
    "requests_waiting",
    "loads_started",
    "others_itl_ms_before",
    "others_itl_ms_during",
    "projected_ms_8.75GB",
    "projected_from",
)


def run(store: Path, plan: ColdPlan, out: Path | None) -> None:
    """Measures and prints a table; writes the figures to a file as well.

    Raises:
      ValueError: there is no store, or it is damaged.
      OSError: a file cannot be written.
    """
    if not store.is_dir():
        raise ValueError(f"there is no store {store}; `make models` makes SmolLM2's, or give one")
    figures = console.measured(out, lambda report: _figures(store, plan, report))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        if not isinstance(value, str):
            table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.2f}")
    console.stdout().print(table)
    slower = figures["others_itl_ms_during"] / figures["others_itl_ms_before"]
    console.say(f"Others' time between tokens while it is loaded, over before: {slower:.2f}.")
    console.say(f"Projected: {figures['projected_from']}.")


def _figures(store: Path, plan: ColdPlan, report: console.Report) -> dict[str, Any]:
    found = bench_coldstart(Store(store), plan, report)
    return {name: found[name] for name in FIGURES}
