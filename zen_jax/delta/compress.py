"""A fine-tuned tensor to packed signs and scales: BitDelta, arXiv:2402.10193, eq. 1 to 3.

W_ft ~ W_base + alpha sign(W_ft - W_base), alpha the mean of |delta| over a row of outputs (or over
the matrix, as published). That is the least-squares scale for these signs. Deltas are float32, sums
float64; a block of rows is worked on at a time.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from pallas_kernels.packing import pack_signs, packed_size
from zen_jax.delta.format import WeightDelta

ScaleKind = Literal["row", "matrix"]

# Elements that are worked on at once.
_BLOCK = 1 << 20


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
      levels: how many times signs and scales are taken, each of what the ones before leave.

    Returns:
      WeightDelta with bits uint8[levels, O, ceil(I / 8)] and scale float32[levels, O] or
      float32[levels, 1]; and its figures.

    Raises:
      ValueError: not two matrices of one shape, a level count below 1, an unknown kind of scale,
        or a delta that is not finite in float32.
    """
    if base.ndim != 2 or base.shape != tuned.shape:
        raise ValueError(f"shapes {base.shape} and {tuned.shape}; expected two equal [O, I]")
    if levels < 1:
        raise ValueError(f"levels is {levels}; expected 1 or more")
    if scale not in ("row", "matrix"):
        raise ValueError(f"scale is {scale!r}; expected 'row' or 'matrix'")
    outputs, size = base.shape
    bits = np.zeros((levels, outputs, packed_size(size)), np.uint8)
    scales = np.zeros((levels, outputs if scale == "row" else 1), np.float32)
    zeros, base_squares, squares, left = 0, 0.0, 0.0, 0.0
    for level in range(levels):
        absolute, left = np.zeros(outputs), 0.0
        for rows in _blocks(outputs, size):
            start = base[rows].astype(np.float32)
            rest = tuned[rows].astype(np.float32) - start
            if not level:
                zeros += int(np.count_nonzero(rest == 0))
                base_squares += _sum_of_squares(start)
                squares += _sum_of_squares(rest)
                if not np.isfinite(squares):
                    raise ValueError(
                        "a delta is not finite; look for NaN or infinity in base or fine-tune"
                    )
            _subtract(rest, bits[:level, rows], scales[:level], rows)
            bits[level, rows] = pack_signs(rest, rows.start * size)
            absolute[rows] = np.abs(rest).sum(axis=1, dtype=np.float64)
            left += _sum_of_squares(rest)
        alpha = absolute / max(size, 1)
        scales[level] = alpha if scale == "row" else alpha.mean()
        # ||r - alpha s||^2 = ||r||^2 - n alpha^2, since s . r is the sum of |r|.
        exact = alpha if scale == "row" else np.full(outputs, alpha.mean())
        left = max(left - size * float(np.square(exact).sum()), 0.0)
    stats = TensorStats(
        zeros=zeros / max(base.size, 1),
        alpha_mean=float(scales[0].mean()),
        base_rms=float(np.sqrt(base_squares / max(base.size, 1))),
        relative_error=float(np.sqrt(left / squares)) if squares else 0.0,
    )
    return WeightDelta(bits=bits, scale=scales), stats


def _blocks(outputs: int, size: int) -> Iterator[slice]:
    """Rows that are worked on at once, so that a matrix of any size takes little memory."""
    step = max(1, _BLOCK // max(size, 1))
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))


def _sum_of_squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _subtract(rest: np.ndarray, bits: np.ndarray, scales: np.ndarray, rows: slice) -> None:
    """Takes the levels that are done off a block of the delta, in place."""
    for packed, scale in zip(bits, scales, strict=True):
        signs = np.unpackbits(packed, axis=-1, count=rest.shape[1], bitorder="little")
        alpha = scale if scale.size == 1 else scale[rows, None]
        rest -= alpha * (signs.astype(np.float32) * 2 - 1)


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
        raise ValueError("a delta is not finite; look for NaN or infinity in base or fine-tune")
    return WeightDelta(dense=delta) if delta.any() else WeightDelta()
