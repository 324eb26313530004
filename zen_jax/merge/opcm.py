"""OPCM, arXiv:2501.09522: fine-tunes merged one after another, each without what it has in common
with the merge so far.

Let U S V^T be the merged task vector. Of a new one, what lies in single directions u_i v_i^T that
the merge has already, and in the block of its first s directions, is left out. What remains is
orthogonal to the merge. Then the merge is scaled to the mean length of the task vectors so far.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.merge.folding import Figures, Fold, MeanFold, merge_arrays, norm
from zen_jax.merge.spectrum import both_sides, in_float64

# Where the block of leading directions ends. The paper's text takes the least k whose share of the
# singular values' sum exceeds alpha; the authors' code takes one fewer.
SplitRule = Literal["code", "doc"]
# What becomes of what a task vector has outside the merge's rows and columns.
Outside = Literal["keep", "drop"]


@dataclasses.dataclass(frozen=True)
class Opcm:
    """How to merge.

    Attributes:
      alpha: share of the sum of singular values that the leading block has, in [0, 1).
      split: the block's size, as in the authors' "code" or as their text says, "doc".
      outside: "keep" what lies outside the merge's rows and columns, as the full bases of the
        authors' code do, or "drop" it.
    """

    alpha: float = 0.5
    split: SplitRule = "code"
    outside: Outside = "keep"
    name, single = "opcm", False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; expected a share in [0, 1)")
        if self.split not in get_args(SplitRule):
            raise ValueError(f"split is {self.split!r}; expected one of {get_args(SplitRule)}")
        if self.outside not in get_args(Outside):
            raise ValueError(f"outside is {self.outside!r}; expected one of {get_args(Outside)}")

    def fold(self, name: str) -> Fold:
        """See `zen_jax.merge.folding.Method`."""
        return _OpcmFold(self)


@dataclasses.dataclass(frozen=True)
class OpcmState:
    """A merge so far.

    Attributes:
      merged: the merged task vector, [O, I]; its length is `length`.
      factor: lambda, what the sum of cleaned task vectors was divided by.
      length: mean length of the task vectors so far.
      count: how many there were.
    """

    merged: jax.Array
    factor: float
    length: float
    count: int


def begin(delta: jax.Array) -> OpcmState:
    """A merge of one task vector [O, I]: itself, with lambda 1."""
    return OpcmState(delta, 1.0, norm(delta), 1)


@in_float64
def step(state: OpcmState, delta: jax.Array, method: Opcm) -> tuple[OpcmState, Figures]:
    """Merges one more task vector.

    Args:
      state: the merge so far.
      delta: [O, I].
      method: how.

    Returns:
      The new merge, and the numerical rank of the old one, the block, the share of ||delta||^2 that
      was kept, and lambda.
    """
    own = norm(delta)
    left, values, right = both_sides(state.merged, resolution(state))
    rank = int((values > 0).sum())
    block = leading_block(values[:rank], method)
    inside_only = method.outside == "drop" and rank > 0
    cleaned = _clean(delta, left, right, block, inside_only)
    raw = _add_scaled(state.merged, cleaned, state.factor)
    length = state.length + (own - state.length) / (state.count + 1)
    factor = norm(raw) / length if length else 1.0
    kept = (norm(cleaned) / own) ** 2 if own else 0.0
    figures = {"rank": rank, "block": block, "energy": kept, "lambda": factor}
    merged = raw / jnp.asarray(factor, raw.dtype)
    return OpcmState(merged, factor, length, state.count + 1), figures


def resolution(state: OpcmState) -> float:
    """Singular values of a merge at or below this are rounding: rounding each element moves none by
    more than eps ||merged||, and those from a Gram matrix are known to sqrt(eps64) ||merged||."""
    eps = float(jnp.finfo(state.merged.dtype).eps)
    gram = float(np.finfo(np.float64).eps) ** 0.5
    return 4 * max(eps, gram) * state.length


def leading_block(values: np.ndarray, method: Opcm) -> int:
    """How many leading directions are left out as a block; `values` are those above 0."""
    if not len(values):
        return 0
    beyond = np.cumsum(values) / values.sum() > method.alpha
    first = int(np.argmax(beyond)) if beyond.any() else len(values) - 1
    return first if method.split == "code" else first + 1


@functools.partial(jax.jit, static_argnames=("inside_only",))
def _clean(
    delta: jax.Array, left: jax.Array, right: jax.Array, block: int, inside_only: bool
) -> jax.Array:
    """A task vector without its diagonal and leading block in the bases `left` and `right`."""
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    inside = exact(exact(left.T, delta), right)
    at = jnp.arange(inside.shape[0])
    common = (at[:, None] == at) | ((at[:, None] < block) & (at < block))
    if inside_only:
        return exact(exact(left, jnp.where(common, 0, inside)), right.T)
    return delta - exact(exact(left, jnp.where(common, inside, 0)), right.T)


@jax.jit
def _add_scaled(merged: jax.Array, cleaned: jax.Array, factor: float) -> jax.Array:
    return merged * jnp.asarray(factor, merged.dtype) + cleaned


class _OpcmFold:
    """Matrices by OPCM; vectors, which have no directions, by their mean."""

    def __init__(self, method: Opcm) -> None:
        self._method = method
        self._state: OpcmState | None = None
        self._vectors = MeanFold()

    def add(self, delta: jax.Array) -> Figures:
        if delta.ndim == 1:
            return self._vectors.add(delta)
        if self._state is None:
            self._state = begin(delta)
            return {"energy": 1.0, "lambda": 1.0}
        self._state, figures = step(self._state, delta, self._method)
        return figures

    def merged(self) -> jax.Array:
        return self._vectors.merged() if self._state is None else self._state.merged


def opcm(
    base: Any,
    tuned_list: Iterable[Any],
    alpha: float = 0.5,
    split: SplitRule = "code",
    outside: Outside = "keep",
) -> np.ndarray:
    """Fine-tunes of one matrix merged in turn by OPCM, arXiv:2501.09522.

    Args:
      base: [O, I] or [D], any float type; not changed.
      tuned_list: arrays of its shape in the order of merging, held one at a time; not changed.
      alpha, split, outside: see `Opcm`.

    Returns:
      [O, I] or [D], float64 if one of them is, else float32; the mean, for vectors.

    Raises:
      ValueError: there is no checkpoint, shapes differ, a value is not finite, or an option has a
        value it cannot have.
    """
    return merge_arrays(Opcm(alpha, split, outside), base, tuned_list)
