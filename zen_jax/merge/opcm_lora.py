"""OPCM (arXiv:2501.09522) and means of adapters from their factors, where no [O, I] is ever made.

The same steps as `zen_jax.merge.opcm`, within the numerical rank of the merge: its bases U, V come
from the factors, what is left out is a small core between them, and what remains is [U, b] times
a core times [V, a]. Everything is float64; a cut to a rank comes before the norm rule, so that the
rule holds for what is kept.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from zen_jax.merge import lora
from zen_jax.merge.lora import Adapter, Factors
from zen_jax.merge.opcm import Opcm, leading_block

Operation = Literal["mean_delta", "mean_factors", "opcm"]


@dataclasses.dataclass(frozen=True)
class Share:
    """What OPCM has to know of one weight's merge beside its factors.

    Attributes:
      factor: lambda, what the sum of cleaned task vectors was divided by.
      length: mean length of the task vectors so far.
    """

    factor: float
    length: float


@dataclasses.dataclass(frozen=True)
class Merge:
    """Some adapters in one.

    Attributes:
      adapter: the factors.
      count: how many went in.
      shares: by weight, for OPCM; what is not named has its own length and lambda 1.
    """

    adapter: Adapter
    count: int = 1
    shares: Mapping[str, Share] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Merger:
    """How adapters are merged.

    Attributes:
      operation: "mean_delta" (the mean of task vectors, weights [1 - 1/n, 1/n]), "mean_factors" (a
        and b each by these weights, as the code of arXiv:2510.13537 does) or "opcm".
      rank: of a merge at most.
      opcm: how, for "opcm".
    """

    operation: Operation
    rank: int
    opcm: Opcm = dataclasses.field(default_factory=Opcm)

    def __post_init__(self) -> None:
        if self.operation not in get_args(Operation):
            raise ValueError(
                f"operation is {self.operation!r}; expected one of {get_args(Operation)}"
            )
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; expected at least 1")

    def add(self, merge: Merge, adapter: Adapter) -> Merge:
        """A merge with one more adapter in it, in float64; neither input is changed.

        A weight that one side lacks counts as unchanged there.

        Raises:
          ValueError: task vectors of one weight differ in shape; or, for "mean_factors", in rank.
        """
        merged: dict[str, Factors] = {}
        shares: dict[str, Share] = {}
        for name in lora.weights_in([merge.adapter, adapter]):
            old, new = merge.adapter.get(name), adapter.get(name)
            old, new = old or _none_like(new), new or _none_like(old)
            if old.shape != new.shape:
                raise ValueError(
                    f"{name}: task vectors have shapes {old.shape} and {new.shape}; expected one"
                )
            try:
                merged[name], share = self._add(old, new, merge.count, merge.shares.get(name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            shares |= {} if share is None else {name: share}
        return Merge(merged, merge.count + 1, shares)

    def _add(
        self, old: Factors, new: Factors, count: int, share: Share | None
    ) -> tuple[Factors, Share | None]:
        if self.operation == "opcm":
            share = share or Share(1.0, lora.norm(old))
            return step(old, share, count, new, self.opcm, self.rank)
        if self.operation == "mean_factors":
            return mean_factors(old, new, count), None
        weight = 1 / (count + 1)
        return lora.cut(lora.combine([(1 - weight, old), (weight, new)]), self.rank), None


def _none_like(other: Factors | None) -> Factors:
    """The task vector 0, with the ranks of another."""
    assert other is not None
    return Factors(np.zeros(other.a.shape), np.zeros(other.b.shape))


def mean_factors(old: Factors, new: Factors, count: int) -> Factors:
    """(1 - 1/n) of each factor and 1/n of the new one's, n = count + 1: cross terms and all.

    Raises:
      ValueError: their ranks differ.
    """
    if old.rank != new.rank:
        raise ValueError(
            f"factors have ranks {old.rank} and {new.rank}; their mean needs one rank, "
            "a mean of deltas does not"
        )
    weight, x, y = 1 / (count + 1), old.wide(), new.wide()
    return Factors(x.a + weight * (y.a - x.a), x.b + weight * (y.b - x.b))


def step(
    merged: Factors, share: Share, count: int, new: Factors, method: Opcm, rank: int | None = None
) -> tuple[Factors, Share]:
    """One more task vector, as `zen_jax.merge.opcm.step`.

    Args:
      merged: the merge so far; its length is `share.length`.
      share: its lambda and mean length.
      count: how many went in.
      new: of its shape.
      method: how.
      rank: of the result at most; None keeps all of it, the rank of both together.

    Returns:
      The new merge in float64, and its share.
    """
    raw = _raw(merged, share.factor, new.wide(), method)
    if rank is not None:
        raw = lora.cut(raw, rank)
    length = share.length + (lora.norm(new) - share.length) / (count + 1)
    factor = lora.norm(raw) / length if length else 1.0
    return Factors(raw.a, raw.b / (factor or 1.0)), Share(factor or 1.0, length)


def _raw(merged: Factors, factor: float, new: Factors, method: Opcm) -> Factors:
    """lambda times the merge, plus what the new one has that the merge has not."""
    left, values, right = lora.svd(merged)
    inside = (left.T @ new.b) @ (new.a @ right.T)
    block = leading_block(values, method)
    at = np.arange(len(values))
    common = (at[:, None] == at) | ((at[:, None] < block) & (at < block))
    if method.outside == "drop" and len(values):
        core = factor * np.diag(values) + np.where(common, 0, inside)
        return Factors(right, left @ core)
    core = factor * np.diag(values) - np.where(common, inside, 0)
    return Factors(np.concatenate([right, new.a]), np.concatenate([left @ core, new.b], 1))
