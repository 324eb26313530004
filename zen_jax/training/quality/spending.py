"""Where a few more bytes do most: a second level of signs, or a residual of low rank.

Judged as a layer sees it: tr(E C E^t) / tr(D C D^t), C the second moments of its inputs.
"""

from collections.abc import Iterator

import numpy as np

from zen_jax.delta.compress import compress_tensor
from zen_jax.delta.distill_fit import damped, fit_matrix, unpack_codes
from zen_jax.delta.distill_layers import own_moments
from zen_jax.training.quality.methods import Case, plain, sides

RANKS = (1, 2, 4, 8)


def residual(left: np.ndarray, second: np.ndarray, rank: int) -> np.ndarray:
    """The best E of a rank for tr((left - E) C (left - E)^t): a truncated SVD of left C^(1/2).

    Args:
      left: float32[O, I], what signs and scales leave of a delta.
      second: C, float32[I, I], positive definite.
      rank: of E.
    """
    values, vectors = np.linalg.eigh(second.astype(np.float64))
    root = vectors * np.sqrt(np.maximum(values, values[-1] * 1e-9))
    u, s, vt = np.linalg.svd(left.astype(np.float64) @ root, full_matrices=False)
    back = vectors / np.sqrt(np.maximum(values, values[-1] * 1e-9))
    return ((u[:, :rank] * s[:rank]) @ vt[:rank] @ back.T).astype(np.float32)


def spend(case: Case) -> Iterator[tuple[str, float, float]]:
    """Means over the matrices of a fine-tune's layers, by size: (what, bits a weight, error)."""
    subject = case.subject
    both = sides(subject, plain(subject.base, subject.tuned))
    names = ["1 level", *(f"1 level, rank {rank}" for rank in RANKS), "2 levels"]
    bits, errors, weights = np.zeros(len(names)), np.zeros(len(names)), 0
    for name, moment in own_moments(both, case.train, case.rows):
        second, delta = damped(moment), both.difference(name)
        rows, size = delta.shape
        whole = float(np.sum(delta * (delta @ second), dtype=np.float64))
        one = fit_matrix(delta, second, both.delta(name), sweeps=4)
        two_levels, _ = compress_tensor(subject.base[name], subject.tuned[name], levels=2)
        two = fit_matrix(delta, second, two_levels, sweeps=4)
        signs = unpack_codes(one.delta, size).astype(np.float32)
        left = delta - np.sum(np.asarray(one.delta.scale)[..., None] * signs, axis=0)
        found = [(8 * one.delta.nbytes / delta.size, one.after)]
        for rank in RANKS:
            rest = left - residual(left, second, rank)
            error = float(np.sum(rest * (rest @ second), dtype=np.float64)) / whole
            found.append((found[0][0] + 16 * rank * (rows + size) / delta.size, error))
        found.append((8 * two.delta.nbytes / delta.size, two.after))
        bits += delta.size * np.array([b for b, _ in found])
        errors += delta.size * np.array([e for _, e in found])
        weights += delta.size
    for at, name in enumerate(names):
        yield name, float(bits[at] / weights), float(errors[at] / weights)
