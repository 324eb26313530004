"""merge.png: what a merge kept of each matrix."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OTHER = "embedding, head"


def kind_of(name: str) -> str:
    """What matrices of all layers are grouped by: "q_proj" and so on."""
    return next((kind for kind in _KINDS if f".{kind}." in name), _OTHER)


def _layer(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def matrices(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The tensors of a report that are matrices."""
    return {n: t for n, t in report["tensors"].items() if len(t["shape"]) == 2}


def mean_of(tensor: Mapping[str, Any], figure: str) -> float | None:
    """A figure's mean over the checkpoints that have it, None if none has."""
    found = [m[figure] for m in tensor["models"] if m.get(figure) is not None]
    return sum(found) / len(found) if found else None


def _rank_share(tensor: Mapping[str, Any]) -> float | None:
    rank = mean_of(tensor, "rank")
    return None if rank is None else rank / min(tensor["shape"])


def _factor(tensor: Mapping[str, Any]) -> float | None:
    """OPCM's last lambda; else MonoSoup's factor of the tail."""
    last = [m["lambda"] for m in tensor["models"] if "lambda" in m]
    return last[-1] if last else mean_of(tensor, "low")


_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("||delta|| / ||base||", lambda tensor: mean_of(tensor, "delta_over_base")),
    ("rank kept, of all", _rank_share),
    ("energy kept", lambda tensor: mean_of(tensor, "energy")),
    ("lambda, or the tail's factor", _factor),
)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draws each figure of every matrix by layer, one line a kind.

    Args:
      report: the contents of merge.json.
      path: of the PNG.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = matrices(report)
    panels = [(t, f) for t, f in _PANELS if any(f(m) is not None for m in found.values())]
    size = (4.2 * max(1, len(panels)), 3.8)
    figure, axes = pyplot.subplots(1, max(1, len(panels)), figsize=size, squeeze=False)
    for at, (title, figure_of) in zip(axes[0], panels, strict=False):
        for kind in (*_KINDS, _OTHER):
            points = sorted(
                (_layer(name), value)
                for name, tensor in found.items()
                if kind_of(name) == kind and (value := figure_of(tensor)) is not None
            )
            if points:
                at.plot(*zip(*points, strict=True), marker=".", linewidth=0.8, label=kind)
        at.set(title=title, xlabel="layer (-1: embedding, head)")
        at.grid(True, color="#eeeeee", linewidth=0.6)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{report['method']}: {', '.join(report['models'])} on {report['base']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
