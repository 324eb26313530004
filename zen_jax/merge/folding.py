"""What all ways of merging share: deltas of one tensor come in one by one, one delta goes out.

A fold holds what it has made of the deltas so far and never a list of them, so its memory does not
grow with their number. Deltas and sums are float32, or float64 where an input is.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.merge.spectrum import in_float64, place, trim

# What is said of one checkpoint's part in one tensor: rank kept, energy and so on.
type Figures = dict[str, Any]

# ||delta|| / ||W_base|| below which a tensor hardly moved, arXiv:2602.09689.
HARDLY = 1e-6


class Fold(Protocol):
    """One tensor on its way: give it deltas, then ask for the merged one."""

    def add(self, delta: jax.Array) -> Figures:
        """Takes a delta, [O, I] or [D]; returns what was kept of it."""
        ...

    def merged(self) -> jax.Array:
        """The merged delta of all so far; at least one was added."""
        ...


class Method(Protocol):
    """A way of merging."""

    @property
    def name(self) -> str:
        """How commands call it."""
        ...

    @property
    def single(self) -> bool:
        """Whether it cleans one checkpoint; then vectors, and tensors that hardly moved, keep the
        tuned value."""
        ...

    def fold(self, name: str) -> Fold:
        """Begins a tensor of a name."""
        ...


class Mean:
    """The plain mean of deltas."""

    name, single = "mean", False

    def fold(self, name: str) -> Fold:
        """See `Method`."""
        return MeanFold()


class MeanFold:
    """A running sum of deltas, and their number."""

    def __init__(self) -> None:
        self._total: jax.Array | None = None
        self._count = 0

    def add(self, delta: jax.Array) -> Figures:
        """See `Fold`."""
        self._total = delta if self._total is None else plus(self._total, delta)
        # What is computed behind the next reads would hold several deltas at once.
        self._total.block_until_ready()
        self._count += 1
        return {}

    @in_float64
    def merged(self) -> jax.Array:
        """See `Fold`."""
        if self._total is None:
            raise ValueError("nothing was added; expected at least one checkpoint")
        return self._total if self._count == 1 else self._total / self._count


@in_float64
def plus(total: jax.Array, delta: jax.Array) -> jax.Array:
    """Their sum."""
    return _plus(total, delta)


@jax.jit
def _plus(total: jax.Array, delta: jax.Array) -> jax.Array:
    return total + delta


@in_float64
def difference(tuned: jax.Array, base: jax.Array) -> jax.Array:
    """tuned - base, in the wider of their types."""
    return tuned - base


@in_float64
def norm(array: jax.Array) -> float:
    """The Euclidean length of all elements, summed in float64."""
    return float(_norm(array))


@jax.jit
def _norm(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(array.astype(jnp.float64))))


def checked(array: Any, what: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A tensor as NumPy array, in float32 or float64.

    Raises:
      ValueError: it has another shape, more than two dimensions, or values that are not finite.
    """
    found = np.asarray(array)
    found = found.astype(np.promote_types(found.dtype, np.float32), copy=False)
    if shape is not None and found.shape != shape:
        raise ValueError(f"{what} has shape {found.shape}; the base's is {shape}")
    if found.ndim not in (1, 2) or not found.size:
        raise ValueError(f"{what} has shape {found.shape}; expected a matrix or a vector")
    bad = found.size - int(np.isfinite(found).sum())
    if bad:
        raise ValueError(f"{what} has {bad} of {found.size} values that are NaN or infinite")
    return found


def merge_arrays(method: Method, base: Any, tuned: Iterable[Any], name: str = "") -> np.ndarray:
    """One tensor merged: `base` plus the merged delta.

    Args:
      method: how.
      base: [O, I] or [D], any float type; not changed.
      tuned: arrays of its shape; one is held at a time, and none is changed.
      name: of the tensor, for what is drawn at random.

    Returns:
      [O, I] or [D], float64 if one of them is, else float32.

    Raises:
      ValueError: there is no checkpoint, one has another shape, or a value is not finite.
    """
    start = checked(base, "base")
    fold, kept, dtype, count = method.fold(name), None, start.dtype, 0
    for array in tuned:  # not enumerated: that would hold the one before
        end = checked(array, f"checkpoint {count}", start.shape)
        dtype = np.promote_types(dtype, end.dtype)
        delta = place_any(end.astype(dtype) - start.astype(dtype))
        if method.single and hardly_moved(delta, start):
            kept = end
        else:
            fold.add(delta)
        count += 1
        del array, end, delta  # before the next one is made
    if kept is not None:
        return kept.astype(dtype)
    return start.astype(dtype) + trim(fold.merged(), start.shape)


def place_any(array: np.ndarray) -> jax.Array:
    """A matrix or a vector on JAX's first device, in its own dtype."""
    if array.ndim == 2:
        return in_float64(place)(array)
    return in_float64(jax.device_put)(array)


def hardly_moved(delta: jax.Array, base: np.ndarray) -> bool:
    """Whether a method that cleans one checkpoint leaves a tensor as it was tuned: a vector, or
    ||delta|| / ||base|| < 1e-6."""
    if delta.ndim == 1:
        return True
    return norm(delta) < HARDLY * float(np.linalg.norm(base.astype(np.float64)))
