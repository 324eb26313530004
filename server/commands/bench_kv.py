"""`zen bench kv`: what pages and fewer bits give, as tables, JSON, a plot and a page."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from server.benchmark_kv import KvPlan, bench_kv


def run(
    store: Path, family: Path | None, plan: KvPlan, out: Path | None, page: Path | None
) -> None:
    """Measures and prints tables; writes figures and a plot beside them, and a page's tables.

    Raises:
      ValueError: there is no store or no family, or the page has no place for a table.
      OSError: a file cannot be written.
    """
    text = None if page is None else page.read_text(encoding="utf-8")
    figures = console.measured(out, lambda report: bench_kv(store, family, plan, report))
    for name, (head, rows) in tables(figures).items():
        table = Table(*head, box=SIMPLE_HEAD, pad_edge=False, title=name, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.stdout().print(table)
    console.say(figures["device"])
    if out is not None:
        draw(figures, out.with_suffix(".png"))
    if page is not None and text is not None:
        page.write_text(fill(text, figures), encoding="utf-8")


type Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def tables(figures: dict[str, Any]) -> dict[str, Rows]:
    """Every table: its head, and its rows."""
    plan, prefix, load = figures["plan"], figures["prefix"], figures["at_once"]
    quality = [
        (
            name,
            one["kv_dtype"],
            str(one["tokens"]),
            f"{one['kl']:.2g}",
            f"{one['kl_99']:.2g}",
            f"{one['same']:.2%}",
        )
        for name, kinds in figures["quality"].items()
        for one in kinds
    ]
    return {
        "prefix": (
            ("prompt", "read", "TTFT ms", "of the first"),
            [
                ("first", f"{prefix['prompt_tokens']}", f"{prefix['first_ms']:.0f}", "1"),
                (
                    "begins alike",
                    f"{prefix['prompt_tokens'] - prefix['cached_tokens']}",
                    f"{prefix['second_ms']:.0f}",
                    f"{prefix['second_over_first']:.2f}",
                ),
            ],
        ),
        "decode": (
            ("kept as", "page", "bytes a token", "step ms", "over fixed rows", "over float32"),
            [
                (
                    one["kv_dtype"],
                    str(one["page_size"] or "fixed rows"),
                    f"{one['bytes_per_token']:,.0f}",
                    f"{one['step_ms']:.1f}",
                    f"{one['over_fixed']:.2f}",
                    f"{one['over_float32']:.2f}",
                )
                for one in figures["decode"]
            ],
        ),
        "at-once": (
            ("rows", "requests at once", "of fixed rows", "at most", "rows lost"),
            [
                (f"{plan['fixed_rows']}, fixed", f"{load['fixed']:.1f}", "1", "", ""),
                (
                    f"{plan['paged_rows']}, in pages",
                    f"{load['paged']:.1f}",
                    f"{load['paged_over_fixed']:.1f}",
                    f"{load['most']}",
                    f"{load['rows_lost']}",
                ),
            ],
        ),
        "quality": (
            ("model", "kept as", "tokens", "KL, nats", "99 % below", "same likeliest token"),
            quality,
        ),
    }


def fill(page: str, figures: dict[str, Any]) -> str:
    """The page with each table between its marks <!-- NAME --> and <!-- end --> written again.

    Raises:
      ValueError: a table has no place, or a mark has no end.
    """
    for name, (head, rows) in tables(figures).items():
        made = _markdown(head, rows)
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        if len(place.findall(page)) != 1:
            raise ValueError(f"expected one place <!-- {name} --> ... <!-- end --> on the page")
        page = place.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", page)
    return page


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def draw(figures: dict[str, Any], path: Path) -> None:
    """A plot of steps' times and of quality against bytes.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    kinds = figures["decode"]
    names = [f"{one['kv_dtype']}, {one['page_size'] or 'fixed rows'}" for one in kinds]
    colours = ["tab:grey" if one["page_size"] is None else "tab:blue" for one in kinds]
    left.barh(names, [one["step_ms"] for one in kinds], color=colours)
    left.invert_yaxis()
    left.set_xlabel("ms of a decode step, by dtype and page size")
    for name, models in figures["quality"].items():
        heights = [max(one["kl"], 1e-9) for one in models]
        right.plot([one["kv_dtype"] for one in models], heights, "o", label=name)
    right.set_yscale("log")
    right.set_ylabel("KL from float32, nats")
    right.legend(fontsize=8)
    plot.savefig(path, dpi=110)
    pyplot.close(plot)
