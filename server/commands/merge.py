"""`zen merge`: fine-tunes of one base into one model."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server import console
from zen_jax.merge.checkpoints import Outcome, Target, merge_checkpoints
from zen_jax.merge.folding import Method
from zen_jax.merge.pairing import Policies
from zen_jax.merge.plot import draw, kind_of, matrices, mean_of
from zen_jax.merge.sources import open_member
from zen_jax.merge.tensors import Job


@dataclasses.dataclass(frozen=True)
class Options:
    """What all ways of merging may be told.

    Attributes:
      base: see `zen_jax.merge.sources.open_member`.
      models: likewise.
      target: where the result goes.
      policies: for what does not match.
      dtype: of the result; None for the base's.
      devices: to cut matrices over; None for all accelerators, or the CPU.
      time_svd: also time full SVDs.
    """

    base: str
    models: Sequence[str]
    target: Target
    policies: Policies
    dtype: str | None
    devices: int | None
    time_svd: bool


def run(method: Method, options: Options, *, as_json: bool) -> None:
    """Merges and says what was made.

    Raises:
      ValueError: bad input of any kind; nothing was lost.
    """
    job = Job(
        open_member(options.base),
        tuple(open_member(model) for model in options.models),
        method,
        options.dtype,
        _devices(options.devices),
        options.time_svd,
    )
    with console.progress_bar(method.name) as report:
        outcome = merge_checkpoints(job, options.policies, options.target, report)
    plot = _plot(outcome)
    if as_json:
        console.print_json(outcome.report)
        return
    _say(outcome, plot)


def _devices(count: int | None) -> tuple[Any, ...]:
    import jax

    found = jax.devices()
    if count is None:
        return () if found[0].platform == "cpu" else tuple(found)
    if count > len(found):
        raise ValueError(f"devices is {count}; there are {len(found)}")
    return tuple(found[:count])


def _plot(outcome: Outcome) -> Path | None:
    path = outcome.path.with_suffix(".png")
    try:
        draw(outcome.report, path)
    except ImportError:
        console.note("no plot: it needs matplotlib (pip install matplotlib)")
        return None
    return path


def _say(outcome: Outcome, plot: Path | None) -> None:
    report = outcome.report
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("matrices")
    heads = ("number", "delta/base", "rank", "energy", "lambda", "merged/base", "s", "SVD s")
    for head in heads:
        table.add_column(head, justify="right")
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for name, tensor in matrices(report).items():
        kinds.setdefault(f"{kind_of(name)} {'x'.join(map(str, tensor['shape']))}", []).append(
            tensor
        )
    for kind, found in kinds.items():
        table.add_row(kind, str(len(found)), *_row(found))
    console.stdout().print(table)
    for note in report["notes"]:
        console.say(f"note: {note}")
    if "published" in report:
        published = report["published"]
        console.say(f"published as {published['name']} version {published['version']}")
    done = f"in {report['seconds']:.1f} s" if not outcome.already else "there already"
    more = f", {outcome.resumed} tensors of an earlier run" if outcome.resumed else ""
    beside = f" and {plot.name}" if plot is not None else ""
    console.say(f"{outcome.out}: {done}{more}; {outcome.path}{beside} say what was kept")


def _row(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    def mean(values: Sequence[float | None], form: str) -> str:
        known = [value for value in values if value is not None]
        return format(sum(known) / len(known), form) if known else ""

    def figure(name: str, form: str) -> str:
        return mean([mean_of(tensor, name) for tensor in tensors], form)

    last = [t["models"][-1].get("lambda") for t in tensors]
    return [
        figure("delta_over_base", ".4f"),
        figure("rank", ".1f"),
        figure("energy", ".4f"),
        mean(last, ".4f"),
        mean([t.get("merged_over_base") for t in tensors], ".4f"),
        mean([t["seconds"] for t in tensors], ".3f"),
        mean([t.get("svd_seconds") for t in tensors], ".3f"),
    ]
