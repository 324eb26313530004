"""`zen bench ttft`: the time to the first token, by model, as a table and as JSON."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from server.benchmark_ttft import TtftPlan, bench_ttft


def run(store: Path, models: list[str], plan: TtftPlan, out: Path | None) -> None:
    """Measures and prints a table; writes the figures to a file as well.

    Raises:
      ValueError: there is no store or no such variant, or the prompts do not fit the model.
      OSError: the file cannot be written.
    """
    figures = console.measured(out, lambda report: bench_ttft(store, models, plan, report))
    _print(figures, plan)


def _print(figures: dict[str, Any], plan: TtftPlan) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("model", "requests", "P50 TTFT ms", "P99 TTFT ms", "P50 / base", "P99 / base"):
        table.add_column(title, justify="left" if title == "model" else "right")
    rows = figures["models"]
    for row in rows[:2] if len(rows) == 3 else rows:  # all variants, where there is one
        table.add_row(
            row["model"],
            str(row["requests"]),
            f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}",
            f"{row['p50_over_base']:.2f}",
            f"{row['p99_over_base']:.2f}",
        )
    console.stdout().print(table)
    cancel = figures["cancel"]
    console.say(
        f"{figures['device']}; prompts of {plan.prompt_tokens} tokens one at a time, "
        f"{plan.products} products, {figures['compiles']} programs compiled meanwhile. "
        f"A row is free {cancel['p50_ms']:.1f} ms after its stream is cancelled "
        f"(P99 {cancel['p99_ms']:.1f}), where a step of {cancel['rows']} rows takes "
        f"{cancel['step_ms']:.1f} ms."
    )
