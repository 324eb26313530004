"""`zen bench peers`: our engine beside other programs, as a table and as JSON."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.checkpoint.store import Store
from zen_jax.peers.bench import Plan, bench_peers, peers_in


def run(store: Path, peers: Path, plan: Plan, out: Path | None) -> None:
    """Measures and prints a table; writes the figures to a file as well.

    Raises:
      ValueError: there is no store, or it is damaged, or our own engine failed.
      OSError: a file cannot be written.
    """
    if not store.is_dir():
        raise ValueError(f"there is no store {store}; `make models` makes SmolLM2's, or give one")
    figures = console.measured(
        out, lambda report: bench_peers(store, peers_in(peers, Store(store)), plan, report)
    )
    _print(figures)


def _print(figures: dict[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("phase", "context", "system", "tokens/s", "over llama.cpp"):
        table.add_column(title, justify="left" if title == "system" else "right")
    for case in figures["cases"]:
        ratio = case["over_llama_cpp"]
        table.add_row(
            case["phase"],
            str(case["context"]),
            case["system"],
            f"{case['tokens_per_s']:.1f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    console.stdout().print(table)
    for row in figures["greedy"]:
        console.say(
            f"After {row['context']} tokens {row['system']} chooses {row['equal']} of {row['of']} "
            "tokens as our base does, before the first other one."
        )
    for row in figures["skipped"]:
        console.say(f"Skipped: {row['system']}: {row['why']}")
    versions = ", ".join(f"{name} {text}" for name, text in figures["versions"].items())
    console.say(
        f"{figures['device']}, {figures['threads']} threads each, median of {figures['rounds']}; "
        f"{versions}"
    )
