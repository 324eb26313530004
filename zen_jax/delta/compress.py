"""A fine-tuned tensor to packed signs and scales: BitDelta, arXiv:2402.10193, eq. 1 to 3.

W_ft ~ W_base + alpha sign(W_ft - W_base), alpha the mean of |delta| over a row of outputs (or over
the matrix, as published). That is the least-squares scale for these signs. More levels of signs and
scales than one are fitted together (`zen_jax.delta.levels`). Deltas are float32, sums float64; a
block of rows is worked on at a time.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from pallas_kernels.packing import pack_signs, packed_size
from zen_jax.delta.format import WeightDelta
from zen_jax.delta.levels import (
    MAX_LEVELS,
    fit_matrix,
    fit_rows,
    level_values,
    nearest,
    sign_codes,
)

ScaleKind = Literal["row", "matrix"]

# Elements that are worked on at once.
_BLOCK = 1 << 20
_NOT_FINITE = "a delta is not finite; look for NaN or infinity in base or fine-tune"


@dataclasses.dataclass(frozen=True)
class TensorStats:
    """What one tensor's conversion looked like.

    Attributes:
      zeros: share of the delta's elements that are exactly 0.
      alpha_mean: mean of the first level's scales.
      base_rms: root mean square of the base's elements.
      relative_error: ||delta - sum alpha s|| / ||delta||; 0 for a delta of zeros.
    """

    zeros: float
    alpha_mean: float
    base_rms: float
    relative_error: float


def compress_tensor(
    base: np.ndarray, tuned: np.ndarray, *, scale: ScaleKind = "row", levels: int = 1
) -> tuple[WeightDelta, TensorStats]:
    """Packs what a fine-tuned matrix adds to the base's.

    Args:
      base: [O, I], as it is stored (bfloat16, float16 or float32).
      tuned: [O, I], any of these.
      scale: one scale a "row" or one a "matrix".
      levels: sets of signs and scales, 1 to 4; more than one are fitted together.

    Returns:
      WeightDelta with bits uint8[levels, O, ceil(I / 8)] and scale float32[levels, O] or
      float32[levels, 1]; and its figures.

    Raises:
      ValueError: not two matrices of one shape, a level count outside 1 to 4, an unknown kind of
        scale, or a delta that is not finite in float32.
    """
    if base.ndim != 2 or base.shape != tuned.shape:
        raise ValueError(f"shapes {base.shape} and {tuned.shape}; expected two equal [O, I]")
    if not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"levels is {levels}; expected 1 to {MAX_LEVELS}")
    if scale not in ("row", "matrix"):
        raise ValueError(f"scale is {scale!r}; expected 'row' or 'matrix'")
    tally = _Tally()
    if levels == 1:
        delta, left = _one_level(base, tuned, scale, tally)
    else:
        delta, left = _together(base, tuned, scale, levels, tally)
    stats = TensorStats(
        zeros=tally.zeros / max(base.size, 1),
        alpha_mean=float(np.asarray(delta.scale)[0].mean()),
        base_rms=float(np.sqrt(tally.base_squares / max(base.size, 1))),
        relative_error=float(np.sqrt(left / tally.squares)) if tally.squares else 0.0,
    )
    return delta, stats


@dataclasses.dataclass
class _Tally:
    """Sums over what was seen of a matrix: zeros and squares of the delta, squares of the base."""

    zeros: int = 0
    base_squares: float = 0.0
    squares: float = 0.0

    def add(self, start: np.ndarray, delta: np.ndarray) -> None:
        self.zeros += int(np.count_nonzero(delta == 0))
        self.base_squares += _sum_of_squares(start)
        self.squares += _sum_of_squares(delta)


def _one_level(
    base: np.ndarray, tuned: np.ndarray, scale: ScaleKind, tally: _Tally
) -> tuple[WeightDelta, float]:
    """(bits uint8[1, O, ceil(I / 8)] and scale, ||delta - alpha s||^2)."""
    outputs, size = base.shape
    bits = np.zeros((1, outputs, packed_size(size)), np.uint8)
    scales = np.zeros((1, outputs if scale == "row" else 1), np.float32)
    absolute = np.zeros(outputs)
    for rows, start, delta in _deltas(base, tuned):
        tally.add(start, delta)
        bits[0, rows] = pack_signs(delta, rows.start * size)
        absolute[rows] = np.abs(delta).sum(axis=1, dtype=np.float64)
    alpha = absolute / max(size, 1)
    scales[0] = alpha if scale == "row" else alpha.mean()
    # ||d - alpha s||^2 = ||d||^2 - n alpha^2, since s . d is the sum of |d|.
    exact = alpha if scale == "row" else np.full(outputs, alpha.mean())
    left = max(tally.squares - size * float(np.square(exact).sum()), 0.0)
    return WeightDelta(bits=bits, scale=scales), left


def _together(
    base: np.ndarray, tuned: np.ndarray, scale: ScaleKind, levels: int, tally: _Tally
) -> tuple[WeightDelta, float]:
    """(bits uint8[levels, O, ceil(I / 8)] and scale, ||delta - sum alpha s||^2)."""
    outputs, size = base.shape
    codes = sign_codes(levels)
    bits = np.zeros((levels, outputs, packed_size(size)), np.uint8)
    scales = np.zeros((levels, outputs if scale == "row" else 1), np.float32)
    if scale == "matrix":

        def sizes() -> Iterator[np.ndarray]:
            return (np.abs(delta) for _, _, delta in _deltas(base, tuned))

        scales[:] = fit_matrix(sizes, levels).T
    left = 0.0
    for rows, start, delta in _deltas(base, tuned):
        tally.add(start, delta)
        absolute = np.abs(delta)
        if scale == "row":
            scales[:, rows] = fit_rows(absolute, levels).T
        values = level_values((scales if scale == "matrix" else scales[:, rows]).T)
        chosen = nearest(absolute, values)
        packed = pack_signs(delta, rows.start * size)
        unpacked = np.unpackbits(packed, axis=-1, count=size, bitorder="little")
        signs = unpacked.astype(np.float32) * 2 - 1
        for level in range(levels):
            bits[level, rows] = pack_signs(signs * codes[:, level][chosen])
        given = np.take_along_axis(
            np.broadcast_to(values, (len(delta), len(codes))), chosen, axis=1
        )
        left += _sum_of_squares(absolute - given)
    return WeightDelta(bits=bits, scale=scales), left


def _deltas(base: np.ndarray, tuned: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """(rows, the base's, the delta's), a block of rows at a time, in float32.

    Raises:
      ValueError: a delta is not finite.
    """
    for rows in _blocks(*base.shape):
        start = base[rows].astype(np.float32)
        delta = tuned[rows].astype(np.float32) - start
        if not np.isfinite(delta).all():
            raise ValueError(_NOT_FINITE)
        yield rows, start, delta


def _blocks(outputs: int, size: int) -> Iterator[slice]:
    """Rows that are worked on at once, so that a matrix of any size takes little memory."""
    step = max(1, _BLOCK // max(size, 1))
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))


def _sum_of_squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def keep_vector(base: np.ndarray, tuned: np.ndarray) -> WeightDelta:
    """What a norm or another vector adds, whole in float32; empty when the two are equal.

    Args:
      base: [D].
      tuned: [D].

    Raises:
      ValueError: the shapes differ or a difference is not finite.
    """
    if base.shape != tuned.shape:
        raise ValueError(f"shapes {base.shape} and {tuned.shape}; expected equal ones")
    delta = tuned.astype(np.float32) - base.astype(np.float32)
    if not np.isfinite(delta).all():
        raise ValueError(_NOT_FINITE)
    return WeightDelta(dense=delta) if delta.any() else WeightDelta()
