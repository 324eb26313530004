"""The scales of several levels of signs, fitted together.

The levels of an element add up to sign (a_1 + c_2 a_2 + ... + c_L a_L), where each c is +1 or -1:
with its sign apart, an element's size is one of 2^(L-1) values. From scales of which each is the
mean of what the ones before leave, two steps take turns: each size takes the nearest value, and the
scales become the least-squares ones for what was taken. That is Lloyd's method (1982) for values
that are sums of scales; the squared error never grows. Two levels hold a ternary code, as a - a is
0.
"""

import itertools
from collections.abc import Callable, Iterable

import numpy as np

# The values double with each level.
MAX_LEVELS = 4
_ROUNDS = 8

# What sums over rows [O, n] become before they are divided: themselves, or those of the matrix.
_Gather = Callable[[np.ndarray], np.ndarray]


def sign_codes(levels: int) -> np.ndarray:
    """The c of each value, float32[2^(levels - 1), levels] of +1 and -1; each first is +1."""
    rest = np.array(list(itertools.product((1, -1), repeat=levels - 1)), np.float32)
    return np.concatenate([np.ones((len(rest), 1), np.float32), rest], axis=1)


def level_values(scales: np.ndarray) -> np.ndarray:
    """The values that sizes can take, float32[O, 2^(levels - 1)], of scales float32[O, levels]."""
    return np.sum(scales[:, None, :] * sign_codes(scales.shape[1]), axis=-1)


def nearest(size: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each of size[O, I] the index of the nearest of values[O or 1, n], the first of equals."""
    best = np.zeros(size.shape, np.int8)
    least = np.abs(size - values[:, :1])
    for index in range(1, values.shape[1]):
        distance = np.abs(size - values[:, index, None])
        best[distance < least] = index
        least = np.minimum(least, distance)
    return best


def fit_rows(size: np.ndarray, levels: int) -> np.ndarray:
    """Scales float32[O, levels] of each row.

    Args:
      size: |delta|, finite float32[O, I].
      levels: 1 or more.
    """
    return _fit(lambda: (size,), levels, lambda sums: sums)


def fit_matrix(sizes: Callable[[], Iterable[np.ndarray]], levels: int) -> np.ndarray:
    """Scales float32[1, levels] of a whole matrix.

    Args:
      sizes: gives the matrix from its start, a block of rows at a time: |delta|, finite
        float32[rows, I]. Called levels + 8 times.
      levels: 1 or more.
    """
    return _fit(sizes, levels, lambda sums: sums.sum(axis=0, keepdims=True))


def _fit(sizes: Callable[[], Iterable[np.ndarray]], levels: int, gather: _Gather) -> np.ndarray:
    codes = sign_codes(levels)
    scales = _each_of_what_is_left(sizes, levels, gather)
    for _ in range(_ROUNDS):
        values = level_values(scales)
        sums = [_sums(size, nearest(size, values), len(codes)) for size in sizes()]
        count, total = (gather(np.concatenate(part)) for part in zip(*sums, strict=True))
        scales = _least_squares(count, total, codes.astype(np.float64))
    return scales


def _each_of_what_is_left(
    sizes: Callable[[], Iterable[np.ndarray]], levels: int, gather: _Gather
) -> np.ndarray:
    """The start: each scale the mean of what the ones before leave, float32[O or 1, levels]."""
    columns: list[np.ndarray] = []
    for _ in range(levels):
        total, count = [], []
        for size in sizes():
            rest = size
            for scale in columns:
                rest = np.abs(rest - scale)
            total.append(rest.sum(axis=1, dtype=np.float64, keepdims=True))
            count.append(np.full_like(total[-1], size.shape[1]))
        mean = gather(np.concatenate(total)) / np.maximum(gather(np.concatenate(count)), 1)
        columns.append(mean.astype(np.float32))
    return np.concatenate(columns, axis=1)


def _sums(size: np.ndarray, chosen: np.ndarray, codes: int) -> tuple[np.ndarray, np.ndarray]:
    """By row and value, how many sizes took it and their sum; float64[O, codes] both."""
    members = [chosen == index for index in range(codes)]
    count = np.stack([m.sum(axis=1, dtype=np.float64) for m in members], axis=1)
    total = np.stack([np.sum(size * m, axis=1, dtype=np.float64) for m in members], axis=1)
    return count, total


def _least_squares(count: np.ndarray, total: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Scales float32[O, levels] with the smallest sum of (size - scales . code)^2, by the normal
    equations."""
    gram = np.einsum("on,nk,nl->okl", count, codes, codes)
    # Too few values may be taken to fix all scales: the shortest solution then.
    inverse = np.linalg.pinv(gram, rcond=1e-9, hermitian=True)
    return np.einsum("okl,ol->ok", inverse, total @ codes).astype(np.float32)
