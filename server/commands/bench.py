"""`zen bench`: ratios measured side by side, as a table and as JSON."""

import re
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.benchmark import bench_linear
from zen_jax.benchmark_decode import bench_decode

_SHAPE = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")


def linear(
    rows: list[int],
    shapes: list[str],
    variants: list[int],
    activations: list[str],
    repeats: int,
    out: Path | None,
) -> None:
    """Measures the fused product and prints a table; writes the figures to a file as well.

    Raises:
      ValueError: a shape is not written OxI, or a size is out of range.
      OSError: the file cannot be written.
    """
    sizes = [_shape(text) for text in shapes]
    figures = console.measured(
        out,
        lambda report: bench_linear(sizes, rows, variants, repeats, report, activations),
    )
    _print(figures)


def decode(
    batches: list[int],
    variants: list[int],
    model: str,
    context: int,
    products: str,
    repeats: int,
    out: Path | None,
) -> None:
    """Measures decode steps and prints a table; writes the figures to a file as well.

    Raises:
      ValueError: a size is out of range, or the model unknown.
      OSError: the file cannot be written.
    """
    figures = console.measured(
        out,
        lambda report: bench_decode(batches, variants, model, context, repeats, products, report),
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    titles = ("rows", "variants", "base ms", "variant ms", "variant / base", "mixed ms", "naive ms")
    for title in (*titles, "over naive", "bound", "of bound", "tokens/s", "host", "compiles"):
        table.add_column(title, justify="right")
    for case in figures["cases"]:
        table.add_row(
            str(case["batch"]),
            str(case["variants"]),
            f"{case['base_ms']:.2f}",
            f"{case['variant_ms']:.2f}",
            f"{case['variant_over_base']:.2f}",
            f"{case['mixed_ms']:.2f}",
            f"{case['naive_ms']:.2f}",
            f"{case['speedup']:.2f}",
            f"{case['bound']:.2f}",
            f"{case['fraction_of_bound']:.0%}",
            f"{case['tokens_per_s']:.0f}",
            f"{case['host_share']:.0%}",
            str(case["compiles"]),
        )
    console.stdout().print(table)
    console.say(
        f"{figures['device']}; {model}, {context} tokens of context, {products} products. "
        "Naive is one step a variant; host is the share of a step before it is launched."
    )


def _shape(text: str) -> tuple[int, int]:
    found = _SHAPE.fullmatch(text)
    if not found:
        raise ValueError(f"--shape is {text!r}; expected outputs x inputs, as in 4096x4096")
    return int(found[1]), int(found[2])


def _print(figures: dict[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    titles = ("shape", "rows", "variants", "x", "by", "base ms", "by", "fused ms", "fused / base")
    for title in (
        *titles,
        "/ unrounded",
        "over unpacking",
        "over naive",
        "bound",
        "of bound",
        "GB/s",
    ):
        table.add_column(title, justify="right")
    for case in figures["cases"]:
        unpack = case["speedup_over_unpack"]
        table.add_row(
            f"{case['d_out']}x{case['d_in']}",
            str(case["rows"]),
            str(case["variants"]),
            case["activations"],
            case["impl"],
            f"{case['base_ms']:.3f}",
            case["base_impl"],
            f"{case['fused_ms']:.3f}",
            f"{case['fused_over_base']:.2f}",
            f"{case['fused_over_unrounded']:.2f}",
            "" if unpack is None else f"{unpack:.1f}",
            f"{case['speedup_over_naive']:.2f}",
            f"{case['bound']:.2f}",
            f"{case['fraction_of_bound']:.0%}",
            f"{case['gb_per_s']:.1f}",
        )
    console.stdout().print(table)
    speed = figures["cases"][0]["read_gb_per_s"]
    console.say(
        f"{figures['device']}; memory is read at {speed:.1f} GB/s at best. "
        "The bound is of fused / base with one variant, of the gain over naive with more. XLA's "
        "bfloat16 product rounds float32 rows; / unrounded is over the fastest that does not."
    )
