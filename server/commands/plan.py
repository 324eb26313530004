"""`zen plan`: bytes, collectives and predicted times of a family on some cards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.plan import compiled
from zen_jax.plan.models import read_model
from zen_jax.plan.pool import pool_plan
from zen_jax.plan.report import Request, make_plan, most_variants, with_compiled

_HELD = {
    "weights": "base",
    "bank": "bank of variants",
    "kv": "keys and values",
    "state": "rows' settings",
    "temp": "temporaries",
}
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red")


def run(request: Request, out: Path | None, layers: Sequence[int] = ()) -> bool:
    """Prints a plan, and writes its figures and a picture; returns whether it fits.

    Args:
      request: what is planned.
      out: where the figures go, and a picture beside them.
      layers: depths in which the programs are compiled; none compiles nothing.

    Raises:
      ValueError: something cannot be planned for, the compiler is not installed or failed, or the
        picture needs matplotlib.
      OSError: a file cannot be written.
    """
    if out is not None:
        if out.suffix == ".png":
            raise ValueError(f"--json is {out}, the name of its picture; expected another ending")
        out.open("a").close()  # tried before minutes are spent
    figures = make_plan(request)
    if layers:
        figures = with_compiled(figures, request, _compile(request, layers))
    _print(request, figures)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
        draw(figures, out.with_suffix(".png"))
    return figures["per_device"]["headroom"] >= 0


def run_pool(model: str, sizes: tuple[int, int, int, int, str, str], out: Path | None) -> bool:
    """Prints what a device with a pool of adapters holds; returns whether it fits.

    Args:
      model: as `zen_jax.plan.models.read_model` takes it.
      sizes: members, rank, memory, context, dtypes of base and of keys and values; see `pool_plan`.
      out: where the figures go.

    Raises:
      ValueError: something cannot be planned for.
      OSError: the file cannot be written.
    """
    figures = {"model": model, **pool_plan(read_model(model), *sizes)}
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table(model, "bytes", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    pool = f"{figures['members']} adapters of {figures['member']:,}"
    rows = {"base": "base", "kv": "keys and values", "pool": pool}
    for name, what in rows.items():
        table.add_row(what, f"{figures[name]:,}")
    table.add_row(f"left of {figures['memory']:,}", f"{figures['left']:,}")
    console.stdout().print(table)
    fits = figures["left"] >= 0
    said = "It fits" if fits else "It does not fit"
    console.say(f"{said}; {figures['most_members']} adapters at most.")
    for line in figures["assumptions"]:
        console.say(f"- {line}")
    return fits


def _compile(request: Request, layers: Sequence[int]) -> list[dict[str, Any]]:
    if not request.chip.ordered or request.base_dtype != "bfloat16" or not request.variants:
        raise ValueError("--compile is for variants of a bfloat16 base on H100 or H200")
    lay = request.layout
    which = [(name, depth) for name in compiled.programs(lay) for depth in layers]
    with console.progress_bar("compile") as report:
        return compiled.compile_in_process(lay, which, report)


def _print(request: Request, figures: dict[str, Any]) -> None:
    held, show = figures["per_device"], console.stdout().print
    console.say(
        f"{figures['model']} ({figures['parameters']:,} parameters), {figures['variants']} "
        f"variants, {figures['rows']} rows of {figures['context']} tokens on {figures['chips']}"
    )
    table = Table("on each card", "bytes", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    for name, what in _HELD.items():
        table.add_row(what, f"{held[name]:,}")
    table.add_row("at most", f"{held['peak']:,}")
    table.add_row(f"left of {held['memory']:,}", f"{held['headroom']:,}")
    show(table)
    _print_times(figures)
    sent = figures["collectives"]
    console.say(
        f"A decode step has {sent['all_reduce']} sums over the cards, of arrays of "
        f"{sent['all_reduce_bytes']:,} bytes together, and brings logits of "
        f"{sent['all_gather_bytes']:,} bytes together {sent['all_gather']} times; each card sends "
        f"{sent['sent_bytes']:,} bytes for it."
    )
    console.say(
        f"Base and variants take {figures['total_bytes']:,} bytes on all cards; "
        f"{figures['variants']} full copies take {figures['full_copies_bytes']:,}, on "
        f"{figures['full_copies_chips']} cards where each has {request.count}."
    )
    if held["headroom"] < 0:
        most = most_variants(request)
        instead = "not even the base fits" if most < 0 else f"{most} variants would fit"
        console.say(
            f"It does not fit: {-held['headroom']:,} bytes short on each card; {instead} with "
            f"{figures['rows']} rows of {figures['context']} tokens."
        )
    else:
        console.say(
            f"It fits. Without a bound on rows there is room for {held['kv_tokens']:,} tokens."
        )
    if "compiled" in figures:
        _print_compiled(figures)
    for line in figures["assumptions"]:
        console.say(f"- {line}")


def _print_compiled(figures: dict[str, Any]) -> None:
    head = ("compiled", "arguments", "temporaries", "fused kernels", "sums", "gathers", "copies")
    table = Table(*head, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, one in figures["compiled"]["programs"].items():
        sizes = (f"{one[part]:,}" for part in ("argument_bytes", "temp_bytes", "kernels"))
        sent = (str(one["collectives"].get(k, [0])[0]) for k in ("all-reduce", "all-gather"))
        table.add_row(name, *sizes, *sent, str(len(one["copies"])))
    console.stdout().print(table)
    for one in figures["compiled"]["programs"].values():
        for line in one["copies"]:
            console.say(f"copied: {line}")


def _print_times(figures: dict[str, Any]) -> None:
    head = ("predicted", "ms", "over base", "products", "attention", "sums", "small kernels")
    table = Table(*head, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    first = f"first token of {figures['prompt']}"
    for kind, what in (("ttft", first), ("tpot", "next token")):
        times, parts = figures[f"{kind}_ms"], figures[f"{kind}_parts"]
        for name, ms in times.items():
            spent = (f"{parts[name][f'{part}_ms']:.2f}" for part in _PARTS)
            over = f"{ms / times['base']:.3f}"
            table.add_row(f"{what}, {name.replace('_', ' ')}", f"{ms:.2f}", over, *spent)
    console.stdout().print(table)


_PARTS = ("products", "attention", "reduces", "small")


def draw(figures: dict[str, Any], path: Path) -> None:
    """A picture of what each card holds.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    held = figures["per_device"]
    count = int(figures["chips"].split("x")[0])
    plot, axes = pyplot.subplots(figsize=(8, 1.2 + 0.32 * count), layout="constrained")
    cards = [f"card {i}" for i in range(count)]
    left = 0.0
    for (name, what), colour in zip(_HELD.items(), _COLOURS, strict=True):
        size = held[name] / 1e9
        axes.barh(cards, size, left=left, color=colour, label=f"{what}, {size:.2f}")
        left += size
    limit = held["memory"] / 1e9
    axes.axvline(limit, color="black", label=f"the card's memory, {limit:.2f}")
    axes.axvline(
        limit - held["reserve"] / 1e9, color="grey", linestyle="--", label="without reserve"
    )
    axes.invert_yaxis()
    axes.set_xlabel("GB (1e9 bytes) on each card")
    axes.set_title(
        f"{figures['model']}, {figures['variants']} variants, {figures['rows']} rows of "
        f"{figures['context']} tokens on {figures['chips']}",
        fontsize=10,
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    plot.savefig(path, dpi=110)
    pyplot.close(plot)
