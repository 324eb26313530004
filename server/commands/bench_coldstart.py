"""`zen bench coldstart`: what a variant costs that is not in memory, as a table and as JSON."""

import json
from pathlib import Path

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
    if out is not None:
        out.touch()  # before a minute is spent
    with console.progress_bar("bench") as report:
        figures = bench_coldstart(Store(store), plan, report)
    figures = {name: figures[name] for name in FIGURES}
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
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
