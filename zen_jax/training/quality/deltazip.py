"""DeltaZip's way with a delta (arXiv:2312.05215): two of four inputs pruned, the others in 2 bits,
each decision's error passed on to the inputs that are still to be decided.

Written from the paper: SparseGPT's order of work (arXiv:2301.00774) over the second moments of a
layer's inputs, 2:4 masks chosen by w^2 / [H^-1]_jj^2, symmetric 2-bit codes with one float16 scale
for 128 inputs of a row. Its lossless stage is left out. Compared with here, and nowhere served.
"""

import numpy as np
import scipy.linalg

_GROUP = 128
_LEVELS = np.array([-1.5, -0.5, 0.5, 1.5], np.float32)
_DAMPING = 0.01


def compress(delta: np.ndarray, second: np.ndarray) -> np.ndarray:
    """What the method gives back of a delta.

    Args:
      delta: float32[O, I], I a multiple of 4.
      second: C, float32[I, I].

    Raises:
      ValueError: I is no multiple of 4.
    """
    size = delta.shape[1]
    if size % 4:
        raise ValueError(f"a matrix has {size} inputs; 2:4 needs a multiple of 4")
    h = second.astype(np.float64)
    h[np.diag_indices(size)] += _DAMPING * np.trace(h) / size + 1e-12
    factor = scipy.linalg.cholesky(np.linalg.inv(h), lower=False).astype(np.float32)
    left, given = delta.copy(), np.zeros_like(delta)
    step = np.zeros((len(delta), 1), np.float32)
    for start in range(0, size, 4):
        here = slice(start, start + 4)
        if start % _GROUP == 0:
            step = _step(left[:, start : start + _GROUP])
        diagonal = np.diag(factor)[here]
        kept = _two_of_four(np.square(left[:, here] / diagonal))
        for at in range(4):
            column = start + at
            value = left[:, column]
            code = _LEVELS[np.abs(value[:, None] / step - _LEVELS).argmin(axis=1)]
            given[:, column] = np.where(kept[:, at], code * step[:, 0], 0)
            error = (value - given[:, column]) / factor[column, column]
            left[:, column + 1 :] -= error[:, None] * factor[column, None, column + 1 :]
    return given


def _two_of_four(worth: np.ndarray) -> np.ndarray:
    """bool[O, 4], true for the two that are worth most."""
    order = np.argsort(-worth, axis=1, kind="stable")
    kept = np.zeros(worth.shape, bool)
    np.put_along_axis(kept, order[:, :2], True, axis=1)
    return kept


def _step(group: np.ndarray) -> np.ndarray:
    """float32[O, 1], the least-squares step of the larger half's 2-bit codes."""
    size = np.sort(np.abs(group), axis=1)[:, group.shape[1] // 2 :]
    step = size.mean(axis=1, keepdims=True)
    for _ in range(8):
        code = np.where(size > step, np.float32(1.5), np.float32(0.5))
        step = np.sum(size * code, axis=1, keepdims=True) / np.sum(
            np.square(code), axis=1, keepdims=True
        )
    return np.maximum(step, np.float32(1e-20)).astype(np.float16).astype(np.float32) + np.float32(
        1e-20
    )


def packed_bytes(rows: int, size: int) -> int:
    """Bytes of a matrix: 2 bits a kept element and 2 for its place, and the scales."""
    return rows * (size // 4 + 2 * -(-size // _GROUP))
