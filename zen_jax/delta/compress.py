"""A fine-tuned tensor to packed signs and scales: BitDelta, arXiv:2402.10193, eq. 1 to 3.

W_ft ~ W_base + alpha sign(W_ft - W_base), alpha the mean of |delta| over a row of outputs (or over
the matrix, as published). That is the least-squares scale for these signs. Everything is float32.
"""

import dataclasses
from typing import Literal

import numpy as np

from pallas_kernels.packing import pack_signs
from zen_jax.delta.format import WeightDelta

ScaleKind = Literal["row", "matrix"]


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
    start = base.astype(np.float32)
    rest = tuned.astype(np.float32) - start
    if not np.isfinite(rest).all():
        raise ValueError("a delta is not finite; look for NaN or infinity in base or fine-tune")
    norm = float(np.linalg.norm(rest))
    zeros = float(np.mean(rest == 0)) if rest.size else 0.0
    bits, scales = [], []
    for _ in range(levels):
        packed = pack_signs(rest)
        axis = 1 if scale == "row" else None
        alpha = np.mean(np.abs(rest), axis=axis, keepdims=True, dtype=np.float64)
        alpha = alpha.astype(np.float32)
        signs = np.unpackbits(packed, axis=-1, count=rest.shape[1], bitorder="little")
        rest = rest - alpha * (signs.astype(np.float32) * 2 - 1)
        bits.append(packed)
        scales.append(alpha.reshape(-1))
    stats = TensorStats(
        zeros=zeros,
        alpha_mean=float(scales[0].mean()),
        base_rms=float(np.sqrt(np.mean(np.square(start, dtype=np.float64)))),
        relative_error=float(np.linalg.norm(rest)) / norm if norm else 0.0,
    )
    return WeightDelta(bits=np.stack(bits), scale=np.stack(scales)), stats


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
