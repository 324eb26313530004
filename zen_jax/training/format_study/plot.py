"""docs/format.png: quality against bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the choice of a backend)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import PercentFormatter  # noqa: E402

from zen_jax.training.format_study.formats import FORMATS  # noqa: E402
from zen_jax.training.format_study.report import mean  # noqa: E402

Study = Mapping[str, Any]

# Formats that belong together, in the order of their bytes: (label, names, colour, marker).
_SERIES = (
    ("levels one after the other: 1, 2, 3", ("row", "row-2", "row-3"), "#0072b2", "o"),
    ("the same, row and column: 1, 2", ("row-column-bf16", "row-column-2"), "#56b4e9", "s"),
    (
        "levels fitted together: 1, 2, 3",
        ("row", "row-2-together", "row-3-together"),
        "#332288",
        "o",
    ),
    ("signs, scale a matrix", ("matrix",), "#000000", "P"),
    ("signs, embedding shared, whole", ("row-embed-shared", "row-embed-whole"), "#cc79a7", "D"),
    ("ternary, 1.6 bits", ("ternary",), "#009e73", "^"),
    ("delta rounded to 2 bits", ("two-bit",), "#e69f00", "v"),
    ("SVD at the bytes of 1, 2, 3 levels", ("svd-1", "svd-2", "svd-3"), "#d55e00", "x"),
    ("SVD, embedding shared, whole", ("svd-embed-shared", "svd-embed-whole"), "#f0a58a", "d"),
)


def draw(studies: Mapping[str, Study], path: Path) -> None:
    """Draws KL to the fine-tune against bytes, one panel for each kind of held-out tokens.

    Args:
      studies: as `report.load` gives them.
      path: of the PNG.
    """
    panels = _panels(studies)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 5.2), squeeze=False, layout="constrained"
    )
    for at, (title, variants) in zip(axes[0], panels, strict=True):
        _panel(at, title, variants)
    axes[0][0].set_ylabel("KL to the fine-tune, nats a token (lower is better)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)


def _panels(studies: Mapping[str, Study]) -> list[tuple[str, list[Study]]]:
    """(title, variants that are averaged) of each panel."""
    panels: list[tuple[str, list[Study]]] = []
    family = list(studies.get("family", {"variants": {}})["variants"].values())
    for title, answers in (("texts", False), ("skills", True)):
        members = [v for v in family if v["answers"] == answers]
        if members:
            panels.append((f"demo family, {len(members)} {title}", members))
    for name, study in studies.items():
        if name != "family":
            whole = [v for v in study["variants"].values() if set(FORMATS) <= set(v["formats"])]
            panels += [(f"{study['base'].split()[0]}, {v['title']}", [v]) for v in whole]
    return panels


def _panel(at: Axes, title: str, variants: Sequence[Study]) -> None:
    copy = sum(v["bf16_bytes"] for v in variants) / len(variants)
    for label, names, colour, marker in _SERIES:
        shown = [n for n in names if all(n in v["formats"] for v in variants)]
        x = [mean(variants, n, "bytes") / copy for n in shown]
        y = [mean(variants, n, "kl") for n in shown]
        at.plot(x, y, color=colour, marker=marker, label=label, linewidth=1.2, markersize=6)
    base = mean(variants, "base", "kl")
    at.axhline(base, color="#999999", linewidth=0.8, linestyle="--")
    at.annotate(
        "base alone",
        (0.98, base),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
        color="#666666",
    )
    at.set(xscale="log", yscale="log", title=title, xlabel="bytes, share of a bfloat16 copy")
    at.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    at.xaxis.set_minor_formatter(PercentFormatter(1, decimals=0))
    at.tick_params(axis="x", which="both", labelsize=8)
    at.grid(True, which="both", color="#eeeeee", linewidth=0.6)
    at.spines[["top", "right"]].set_visible(False)
