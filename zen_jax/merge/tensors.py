"""One tensor of a merged model, from files: read, merged in float32, cast once."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zen_jax.checkpoint.hf import not_finite
from zen_jax.checkpoint.safetensors import DTYPES
from zen_jax.checkpoint.source import Source
from zen_jax.merge.folding import (
    HARDLY,
    Figures,
    Fold,
    MeanFold,
    Method,
    difference,
    norm,
    place_any,
    plus,
)
from zen_jax.merge.pairing import Item
from zen_jax.merge.spectrum import full_svd, place, trim

# What a report says of a tensor.
type TensorReport = dict[str, Any]


class Unusable(ValueError):
    """Values that cannot be merged.

    Attributes:
      problems: one line each.
    """

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("; ".join(problems))


@dataclasses.dataclass(frozen=True)
class Job:
    """What is merged, and how.

    Attributes:
      base: what deltas are taken to.
      models: the checkpoints, in order.
      method: how.
      dtype: code of `zen_jax.checkpoint.safetensors.DTYPES` for every tensor of the result, or None
        for the base's own.
      devices: that each matrix is cut over; JAX's first if there are none.
      time_svd: also time LAPACK's full SVD of the last delta, for the first matrix of each shape.
    """

    base: Source
    models: tuple[Source, ...]
    method: Method
    dtype: str | None = None
    devices: tuple[Any, ...] = ()
    time_svd: bool = False

    def code(self, item: Item) -> str:
        """The dtype of a tensor of the result, as a code."""
        if self.dtype is not None:
            return self.dtype
        if item.base is not None:
            return self.base.tensors[item.base].dtype
        first = next(i for i, name in enumerate(item.models) if name is not None)
        return self.models[first].tensors[item.models[first] or ""].dtype


def merge_tensor(job: Job, item: Item, time_svd: bool = False) -> tuple[np.ndarray, TensorReport]:
    """Merges one tensor; the base's, and one checkpoint's at a time, are in memory.

    Args:
      job: what is merged.
      item: which tensor.
      time_svd: also time LAPACK's full SVD of the last delta.

    Returns:
      The merged tensor in the job's dtype, and what there is to report.

    Raises:
      Unusable: a value of a source is not finite, or the result does not fit its dtype.
      SourceError, Corrupt: a file is damaged.
    """
    began, merging = time.perf_counter(), _Merging(job, item)
    for i in range(len(job.models)):
        merging.add(i)
    whole, more = merging.result()
    code = job.code(item)
    with np.errstate(over="ignore"):
        cast = whole.astype(DTYPES[code])
    problem = not_finite(item.name, cast)
    if problem:
        raise Unusable([f"{problem} once merged and cast to {code}; choose --dtype F32 or BF16"])
    report = {"shape": list(item.shape), "dtype": code, "models": merging.figures, **more}
    report["seconds"] = round(time.perf_counter() - began, 4)
    if time_svd and merging.last is not None and merging.last.ndim == 2:
        matrix = np.asarray(merging.last)
        began = time.perf_counter()
        full_svd(matrix)
        report["svd_seconds"] = round(time.perf_counter() - began, 4)
    return cast, report


def values_of(job: Job, item: Item) -> list[str]:
    """What is wrong with the values of a tensor's sources, without merging them."""
    problems = []
    for source, name in zip((job.base, *job.models), (item.base, *item.models), strict=True):
        if name is not None:
            problem = not_finite(f"{name} of {source.name}", source.read(name))
            problems += [problem] if problem else []
    return problems


class _Merging:
    """The state of one tensor."""

    def __init__(self, job: Job, item: Item) -> None:
        self._job, self._item = job, item
        self.figures: list[Figures] = []
        self.last: jax.Array | None = None
        self._fold: Fold = MeanFold() if item.base is None else job.method.fold(item.name)
        self._added = 0
        self._kept: np.ndarray | None = None
        # Rows beyond the base's: their sum in float32, and how many have each.
        self._rows = np.zeros((0, *item.shape[1:]), np.float32)
        self._having = np.zeros(0, np.float32)
        self._base, self._length, self._height = None, 0.0, item.shape[0]
        if item.base is not None:
            start = _read(job.base, item.base)
            self._height = start.shape[0]
            self._base = _placed(start, job.devices)
            self._length = norm(self._base)
            more = item.shape[0] - self._height
            self._rows = np.zeros((more, *item.shape[1:]), np.float32)
            self._having = np.zeros(more, np.float32)

    def add(self, i: int) -> None:
        """Takes checkpoint i."""
        name = self._item.models[i]
        if name is None:
            self.figures.append({"left_out": True})
            return
        tuned = _read(self._job.models[i], name)
        rows = tuned[self._height : self._item.shape[0]]
        if rows.size:
            self._rows[: len(rows)] += rows.astype(np.float32)
            self._having[: len(rows)] += 1
        overlap = tuned[: self._height]
        if self._base is None:
            self._fold.add(_placed(overlap, self._job.devices))
            self._added += 1
            self.figures.append({"base_lacks_it": True})
            return
        delta = difference(_placed(overlap, self._job.devices), self._base)
        self.last = delta if self._job.time_svd else None
        length = norm(delta)
        figures: Figures = {"delta_over_base": length / self._length if self._length else None}
        if self._job.method.single and (delta.ndim == 1 or length < HARDLY * self._length):
            self._kept = overlap
            figures["kept"] = "vector" if delta.ndim == 1 else "hardly moved"
        else:
            figures |= self._fold.add(delta)
            self._added += 1
        self.figures.append(figures)

    def result(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The merged tensor in float32 or as it was tuned, and what there is to say of it."""
        shape = (self._height, *self._item.shape[1:])
        if self._kept is not None:
            whole, more = self._kept, {}
        elif not self._added:
            whole, more = trim(self._base, shape), {"merged_over_base": 0.0}  # pyright: ignore
        else:
            delta = self._fold.merged()
            whole = trim(delta if self._base is None else plus(self._base, delta), shape)
            over = norm(delta) / self._length if self._length else None
            more = {} if self._base is None else {"merged_over_base": over}
        if len(self._rows):
            count = np.maximum(self._having, 1).reshape(-1, *[1] * (whole.ndim - 1))
            whole = np.concatenate([whole.astype(np.float32), self._rows / count])
            more["extra_rows"] = len(self._rows)
        return whole, more


def _placed(array: np.ndarray, devices: Sequence[Any]) -> jax.Array:
    if array.ndim == 2:
        return place(array, devices)
    return place_any(array.astype(np.float32))


def _read(source: Source, name: str) -> np.ndarray:
    values = source.read(name)
    problem = not_finite(f"{name} of {source.name}", values)
    if problem:
        raise Unusable([problem])
    return values
