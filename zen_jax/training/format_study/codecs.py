"""Formats of a delta: each takes a base's and a fine-tune's tensor to the tensor that the format
gives back, in float32, and the bytes that it takes.

Signs with a scale a row or a matrix are the product's own (`zen_jax.delta.compress`); everything
else is here to be compared with them and nowhere served. Bytes are those of packed codes and of
scales; names and headers are left out, as they are alike for all formats.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.packing import pack_signs, packed_size
from zen_jax.delta.apply import effective_weight
from zen_jax.delta.compress import ScaleKind, compress_tensor, keep_vector

# (base, tuned), any float dtype and one shape -> (what the format gives back, float32; bytes)
Codec = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, int]]

_SCALE_BYTES = 4
_LLOYD_ROUNDS = 20
_POWER_ROUNDS = 20


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _difference(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(base, tuned - base), both float32.

    Raises:
      ValueError: not two matrices of one shape.
    """
    if base.ndim != 2 or base.shape != tuned.shape:
        raise ValueError(f"shapes {base.shape} and {tuned.shape}; expected two equal [O, I]")
    start = base.astype(np.float32)
    return start, tuned.astype(np.float32) - start


def _signs(delta: np.ndarray) -> np.ndarray:
    """float32[O, I] of -1 and +1, a zero's hashed from its index."""
    packed = pack_signs(delta)
    bits = np.unpackbits(packed, axis=-1, count=delta.shape[1], bitorder="little")
    return bits.astype(np.float32) * 2 - 1


def signs(
    base: np.ndarray,
    tuned: np.ndarray,
    *,
    scale: ScaleKind = "row",
    levels: int = 1,
    bf16: bool = False,
) -> tuple[np.ndarray, int]:
    """alpha sign(delta) as it is served: zeros take hashed signs.

    Args:
      base, tuned: [O, I].
      scale: one a "row" or one a "matrix".
      levels: sets of signs and scales, fitted together.
      bf16: whether scales are rounded to bfloat16.
    """
    delta, _ = compress_tensor(base, tuned, scale=scale, levels=levels)
    if delta.bits is None or delta.scale is None:
        raise ValueError("a matrix was compressed to no signs")
    nbytes = delta.nbytes
    if bf16:
        nbytes -= 2 * delta.scale.size
        delta = dataclasses.replace(delta, scale=_bfloat16(delta.scale))
    return np.asarray(effective_weight(jnp.asarray(base), delta)), nbytes


def signs_plus(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, int]:
    """alpha sign(delta), one scale a row, with +1 for every delta of exactly 0."""
    start, delta = _difference(base, tuned)
    alpha = np.mean(np.abs(delta), axis=1, keepdims=True)
    rows, size = delta.shape
    nbytes = rows * (packed_size(size) + _SCALE_BYTES)
    return start + alpha * np.where(delta >= 0, np.float32(1), np.float32(-1)), nbytes


def _row_and_column(size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a[O, 1], b[1, I]) with a b nearest to a matrix without negative elements.

    Its leading singular vectors, by power iteration: their elements have one sign
    (Perron-Frobenius), so the iteration from a mean over rows cannot miss them.
    """
    b = size.mean(axis=0, keepdims=True, dtype=np.float64)
    a = np.zeros((size.shape[0], 1))
    for _ in range(_POWER_ROUNDS if b.any() else 0):
        a = (size @ b.T) / np.sum(b * b)
        b = (a.T @ size) / np.sum(a * a)
    return a.astype(np.float32), b.astype(np.float32)


def signs_row_column(
    base: np.ndarray, tuned: np.ndarray, *, levels: int = 1, bf16: bool = False
) -> tuple[np.ndarray, int]:
    """a[o] b[i] sign(delta), with the least-squares a and b: the rank-1 part of |delta|.

    Args:
      base, tuned: [O, I].
      levels: sets of signs and scales, each of what the ones before leave.
      bf16: whether scales are rounded to bfloat16.
    """
    start, delta = _difference(base, tuned)
    rest = delta
    for _ in range(levels):
        a, b = _row_and_column(np.abs(rest))
        if bf16:
            a, b = _bfloat16(a), _bfloat16(b)
        rest = rest - a * b * _signs(rest)
    rows, size = delta.shape
    scales = (rows + size) * (2 if bf16 else _SCALE_BYTES)
    return start + (delta - rest), levels * (rows * packed_size(size) + scales)


def signs_in_turn(
    base: np.ndarray, tuned: np.ndarray, *, levels: int = 2
) -> tuple[np.ndarray, int]:
    """Levels one after the other, each alpha sign(what the ones before leave), one float32 scale a
    row and level: what `signs` fits together, without the fitting.

    Args:
      base, tuned: [O, I].
      levels: 1 or more; 1 is `signs`.
    """
    start, delta = _difference(base, tuned)
    rest, given = delta, np.zeros_like(delta)
    for _ in range(levels):
        alpha = np.mean(np.abs(rest), axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
        part = alpha * _signs(rest)
        rest, given = rest - part, given + part
    rows, size = delta.shape
    return start + given, levels * rows * (packed_size(size) + _SCALE_BYTES)


def ternary(
    base: np.ndarray, tuned: np.ndarray, *, threshold: Literal["zeros", "best"] = "best"
) -> tuple[np.ndarray, int]:
    """alpha t with t of -1, 0 and 1, one float32 scale a row, five t to a byte: 1.6 bits.

    Args:
      base, tuned: [O, I].
      threshold: which deltas become 0: the "zeros" alone, or those below the "best" threshold of
        the row, which leaves the smallest squared error.
    """
    start, delta = _difference(base, tuned)
    size = np.abs(delta)
    if threshold == "zeros":
        kept = size > 0
    else:
        falling = -np.sort(-size, axis=1)
        # k kept elements with their mean as the scale take (sum of them)^2 / k off the error
        gain = np.cumsum(falling, axis=1, dtype=np.float64) ** 2 / np.arange(1, size.shape[1] + 1)
        least = np.take_along_axis(falling, gain.argmax(axis=1)[:, None], axis=1)
        kept = (size >= least) & (size > 0)
    count = np.maximum(kept.sum(axis=1, keepdims=True), 1)
    alpha = np.sum(size * kept, axis=1, keepdims=True, dtype=np.float64) / count
    nbytes = delta.shape[0] * (-(-delta.shape[1] // 5) + _SCALE_BYTES)
    return start + alpha.astype(np.float32) * np.sign(delta) * kept, nbytes


def two_bit(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, int]:
    """Delta rounded to step * (-1.5, -0.5, 0.5, 1.5), one float32 step a row, the best one.

    The step starts at the best one for a normal distribution (Max, 1960: 0.9957 sigma) and then is
    the least-squares one for the codes and the codes the nearest for the step, in turn.
    """
    start, delta = _difference(base, tuned)
    sign, size = _signs(delta), np.abs(delta)
    step = 0.9957 * np.sqrt(np.mean(size * size, axis=1, keepdims=True))
    code = np.zeros_like(size)
    for _ in range(_LLOYD_ROUNDS):
        code = np.where(size > step, np.float32(1.5), np.float32(0.5))
        step = np.sum(size * code, axis=1, keepdims=True) / np.sum(
            code * code, axis=1, keepdims=True
        )
    rows, columns = delta.shape
    return start + step * code * sign, rows * (-(-columns // 4) + _SCALE_BYTES)


def rank_for(shape: tuple[int, ...], nbytes: int) -> int:
    """The largest rank whose two bfloat16 factors take no more than some bytes; at least 1."""
    return max(1, min(nbytes // (2 * (shape[0] + shape[1])), *shape))


def low_rank(
    base: np.ndarray, tuned: np.ndarray, *, rank: int = 0, levels: int = 1, bf16: bool = True
) -> tuple[np.ndarray, int]:
    """The delta's truncated SVD, as when a LoRA is extracted from a fine-tune.

    Args:
      base, tuned: [O, I].
      rank: of the factors; 0 for the one that takes the bytes of `levels` sets of signs with a
        float32 scale a row, rounded down.
      levels: see rank.
      bf16: whether factors are rounded to bfloat16, or kept in float32.
    """
    start, delta = _difference(base, tuned)
    rows, size = delta.shape
    r = rank or rank_for(delta.shape, levels * rows * (packed_size(size) + _SCALE_BYTES))
    wide = delta.astype(np.float64)
    # The smaller Gram matrix's leading eigenvectors span what the SVD's leading vectors do.
    if rows >= size:
        inner = np.linalg.eigh(wide.T @ wide)[1][:, ::-1][:, :r].T
        outer = wide @ inner.T
    else:
        outer = np.linalg.eigh(wide @ wide.T)[1][:, ::-1][:, :r]
        inner = outer.T @ wide
    a, b = inner.astype(np.float32), outer.astype(np.float32)
    if bf16:
        a, b = _bfloat16(a), _bfloat16(b)
    return start + b @ a, (2 if bf16 else 4) * r * (rows + size)


def bf16_delta(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, int]:
    """The delta itself, rounded to bfloat16."""
    start, delta = _difference(base, tuned)
    return start + _bfloat16(delta), 2 * delta.size


def whole(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, int]:
    """The fine-tune's own tensor in bfloat16; of any rank."""
    if base.shape != tuned.shape:
        raise ValueError(f"shapes {base.shape} and {tuned.shape}; expected equal ones")
    return _bfloat16(tuned), 2 * tuned.size


def shared(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, int]:
    """The base's tensor: nothing is stored; of any rank."""
    if base.shape != tuned.shape:
        raise ValueError(f"shapes {base.shape} and {tuned.shape}; expected equal ones")
    return base.astype(np.float32), 0


def own_vector(base: np.ndarray, tuned: np.ndarray) -> tuple[np.ndarray, int]:
    """A vector as it is served: whole in float32, or shared when the two are equal."""
    delta = keep_vector(base, tuned)
    return np.asarray(effective_weight(jnp.asarray(base), delta)), delta.nbytes
