"""What is compared: each method takes a fine-tune to the tensors that it gives back, and bytes."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from zen_jax.delta.compress import ScaleKind, compress_tensor, keep_vector
from zen_jax.delta.distill_layers import Samples, Sides, Walk, distill_layers, own_moments
from zen_jax.delta.distill_logits import distill_logits
from zen_jax.delta.distill_scales import Training
from zen_jax.delta.format import WeightDelta
from zen_jax.training.format_study.formats import FORMATS, Format, Stored, Tensors, store
from zen_jax.training.format_study.study import Subject
from zen_jax.training.quality import deltazip

Deltas = dict[str, WeightDelta]


@dataclasses.dataclass(frozen=True)
class Case:
    """A fine-tune and the text to distil it on, none of which it is examined on.

    Attributes:
      subject: the fine-tune.
      train, held: what is fitted to, and what the best is chosen by.
      rows: of a forward pass.
      steps: of training scales; 0 leaves it out.
      work: a folder for what is under way.
      fitted: what was fitted already, by name; two methods begin with it.
    """

    subject: Subject
    train: Samples
    held: Samples
    rows: int
    steps: int
    work: Path
    fitted: dict[str, Deltas] = dataclasses.field(default_factory=dict)


def sides(subject: Subject, deltas: Mapping[str, WeightDelta]) -> Sides:
    """A subject as distillation reads it."""
    return Sides(
        subject.config,
        subject.base.__getitem__,
        subject.tuned.__getitem__,
        deltas.__getitem__,
    )


def plain(base: Tensors, tuned: Tensors, scale: ScaleKind = "row", levels: int = 1) -> Deltas:
    """A fine-tune's deltas as conversion makes them, embedding and head like other matrices."""
    return {
        name: compress_tensor(start, tuned[name], scale=scale, levels=levels)[0]
        if start.ndim == 2
        else keep_vector(start, tuned[name])
        for name, start in base.items()
    }


def _stored(case: Case, deltas: Deltas) -> Stored:
    both = sides(case.subject, deltas)
    tensors = {name: np.asarray(both.whole(name)) for name in deltas}
    left = norm = 0.0
    for name, value in tensors.items():
        if value.ndim == 2:
            wanted = case.subject.tuned[name].astype(np.float32)
            left += float(np.square(wanted - value, dtype=np.float64).sum())
            norm += float(np.square(both.difference(name), dtype=np.float64).sum())
    nbytes = sum(delta.nbytes for delta in deltas.values())
    return Stored(tensors, nbytes, (left / norm) ** 0.5 if norm else 0.0)


def _logits(case: Case, deltas: Deltas) -> Deltas:
    if not case.steps:
        return deltas
    training = Training(case.steps, every=max(1, case.steps // 4))
    both = sides(case.subject, deltas)
    better, _ = distill_logits(both, {}, case.train, case.held, training, rows=case.rows)
    return deltas | better


def _fitted(case: Case, deltas: Deltas, walk: Walk, name: str) -> Deltas:
    if name in case.fitted:
        return case.fitted[name]
    folder = case.work / name
    folder.mkdir(parents=True, exist_ok=True)
    found = distill_layers(sides(case.subject, deltas), case.train, case.held, walk, folder)
    shutil.rmtree(folder)
    case.fitted[name] = deltas | found.deltas
    return case.fitted[name]


def _bitdelta(case: Case) -> Stored:
    deltas = plain(case.subject.base, case.subject.tuned, "matrix")
    return _stored(case, _logits(case, deltas))


def _closed_form(case: Case) -> Stored:
    deltas = plain(case.subject.base, case.subject.tuned)
    return _stored(case, _fitted(case, deltas, Walk("scales", rows=case.rows), "closed-form"))


def _fit(case: Case) -> Stored:
    deltas = plain(case.subject.base, case.subject.tuned)
    return _stored(case, _fitted(case, deltas, Walk("signs", rows=case.rows), "fit"))


def _ours(case: Case) -> Stored:
    deltas = plain(case.subject.base, case.subject.tuned)
    return _stored(case, _logits(case, _fitted(case, deltas, Walk(rows=case.rows), "fit")))


def _ours_2(case: Case) -> Stored:
    deltas = plain(case.subject.base, case.subject.tuned, levels=2)
    return _stored(case, _fitted(case, deltas, Walk(rows=case.rows), "ours-2"))


def _deltazip(case: Case) -> Stored:
    subject = case.subject
    deltas = plain(subject.base, subject.tuned)
    both = sides(subject, deltas)
    given: Deltas = {n: d for n, d in deltas.items() if d.bits is None}
    nbytes = sum(delta.nbytes for delta in given.values())
    for name, moment in own_moments(both, case.train, case.rows):
        difference = both.difference(name)
        given[name] = WeightDelta(dense=deltazip.compress(difference, moment))
        nbytes += deltazip.packed_bytes(*difference.shape)
    # The paper leaves the embedding alone; at these sizes it counts, so it takes 2 bits too.
    for name in sorted(set(deltas) - set(given)):
        given[name], _ = compress_tensor(subject.base[name], subject.tuned[name], levels=2)
        nbytes += given[name].nbytes
    return dataclasses.replace(_stored(case, given), nbytes=nbytes)


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
      name: in the results.
      title: in the table.
      bits: a weight, about; those of the same are compared with each other.
      made: takes a fine-tune through it; or a format of `FORMATS` does.
    """

    name: str
    title: str
    bits: int
    made: Callable[[Case], Stored] | Format

    def store(self, case: Case) -> Stored:
        """A fine-tune after it."""
        if isinstance(self.made, Format):
            return store(self.made, case.subject.base, case.subject.tuned)
        return self.made(case)


OURS = "ours"
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("base", "the base alone", 0, FORMATS["base"]),
        Method("tuned", "the fine-tune itself", 16, FORMATS["tuned"]),
        Method("matrix", "BitDelta, a scale a matrix", 1, FORMATS["matrix"]),
        Method("bitdelta", "BitDelta distilled, a scale a matrix", 1, _bitdelta),
        Method("row", "signs and a scale a row", 1, FORMATS["row"]),
        Method("closed-form", "... scales by the closed form", 1, _closed_form),
        Method("fit", "... signs and scales fitted", 1, _fit),
        Method(OURS, "ours: fitted, then distilled", 1, _ours),
        Method("svd-1", "SVD of the same bytes", 1, FORMATS["svd-1"]),
        Method("two-bit", "rounded to 2 bits", 2, FORMATS["two-bit"]),
        Method("row-2", "2 levels fitted together", 2, FORMATS["row-2-together"]),
        Method("svd-2", "SVD of the same bytes", 2, FORMATS["svd-2"]),
        Method("deltazip", "DeltaZip, 2 bits and 2:4", 2, _deltazip),
        Method("ours-2", "ours with 2 levels", 2, _ours_2),
    )
}
