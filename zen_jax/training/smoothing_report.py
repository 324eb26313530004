"""docs/smoothing.md's tables and docs/smoothing.png."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"none": "#999999", "mean": "#0072b2", "truncated-soup": "#d55e00", "monosoup": "#009e73"}

type Curve = Sequence[tuple[int, float]]


def roughness(curve: Curve) -> float:
    """Mean absolute second difference of a curve's losses; 0 for a straight line, nats."""
    losses = np.asarray([loss for _, loss in curve])
    return float(np.abs(np.diff(losses, 2)).mean()) if len(losses) > 2 else 0.0


def rises(curve: Curve) -> int:
    """How often the loss is higher than one merge before."""
    losses = np.asarray([loss for _, loss in curve])
    return int((np.diff(losses) > 0).sum())


def groups(studies: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Runs that differ by their seed only, by title."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for runs in studies.values():
        for name, told in runs.items():
            found.setdefault(re.sub(r"-\d+$", "", name), []).append(told)
    return found


def table(studies: Mapping[str, Any]) -> str:
    """A table of all methods and groups of runs, in Markdown."""
    lines = [
        "| runs | merged by | last loss | best loss | roughness | rises |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for title, runs in groups(studies).items():
        for method in runs[0]["curves"]:
            curves = [told["curves"][method] for told in runs]
            last = [curve[-1][1] for curve in curves]
            best = [min(loss for _, loss in curve) for curve in curves]
            rough = [roughness(curve) for curve in curves]
            up = [rises(curve) for curve in curves]
            label = f"{title}, {len(runs)}" if method == "none" else ""
            name = "nothing (raw)" if method == "none" else method
            bends = _spread(rough, 5) if min(map(len, curves)) > 2 else ""
            cells = (_spread(last, 4), _spread(best, 4), bends, f"{np.mean(up):.1f}")
            lines.append(f"| {label} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def facts(studies: Mapping[str, Any]) -> str:
    """What each group of runs was, in Markdown."""
    heads = ("steps", "tokens a step", "merged every", "rank", "held-out tokens", "loss at 0")
    lines = [f"| runs | {' | '.join(heads)} | CPU s |", "|---" + "|---:" * (len(heads) + 1) + "|"]
    for title, runs in groups(studies).items():
        one = runs[0]
        names = ("tokens_per_step", "every", "rank", "held_out_tokens")
        reached = min(told.get("reached", told["steps"]) for told in runs)
        steps = f"{reached} of {one['steps']}" if reached < one["steps"] else f"{reached}"
        cells = [steps, *(f"{one[name]:,}" for name in names)]
        start = f"{one['start']:.4f}" if "start" in one else ""
        cpu = f"{sum(told.get('cpu_seconds', 0) for told in runs):,}" if start else ""
        lines.append(f"| {title} | {' | '.join(cells)} | {start} | {cpu} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def write(docs: Path, studies: Mapping[str, Any]) -> None:
    """Writes the plot, and the tables between the page's marks.

    Raises:
      ValueError: the page has no place for a table.
    """
    page = docs / "smoothing.md"
    text = page.read_text(encoding="utf-8")
    for name, made in (("runs", facts(studies)), ("losses", table(studies))):
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        if len(place.findall(text)) != 1:
            raise ValueError(f"{page} needs one place <!-- {name} --> ... <!-- end -->")
        text = place.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    draw(studies, docs / "smoothing.png")
    page.write_text(text, encoding="utf-8")


def draw(studies: Mapping[str, Any], path: Path) -> None:
    """Held-out loss against steps: one panel a group of runs, one line a method and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(studies)
    figure, axes = pyplot.subplots(
        1, max(1, len(found)), figsize=(4.6 * max(1, len(found)), 4), squeeze=False
    )
    for at, (title, runs) in zip(axes[0], found.items(), strict=False):
        for method in runs[0]["curves"]:
            for i, told in enumerate(runs):
                label = method if i == 0 else None
                steps, losses = zip(*told["curves"][method], strict=True)
                at.plot(steps, losses, color=COLOURS[method], label=label, linewidth=1, marker=".")
        at.set(title=title, xlabel="step")
        at.grid(True, color="#eeeeee", linewidth=0.6)
    axes[0][0].set_ylabel("held-out loss, nats a token")
    if found:
        axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
