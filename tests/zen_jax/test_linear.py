"""Vectors and whole differences by slot: a row of the base gets nothing of anybody's."""

import jax.numpy as jnp
import numpy as np

from zen_jax.delta.format import WeightDelta
from zen_jax.linear import Weight, embed, linear, vector

SLOTS = jnp.array([-1, 1, 0, 7])


def added(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Two variants' differences, and what each of the four rows gets."""
    dense = np.random.default_rng(0).normal(1, 1, (2, *shape)).astype(np.float32)
    none = np.zeros(shape, np.float32)
    return dense, np.stack([none, dense[1], dense[0], none])


def test_a_vector_by_slot() -> None:
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    dense, rows = added((2, 3))
    got = vector(Weight(base, WeightDelta(dense=dense), SLOTS))
    np.testing.assert_array_equal(got, (base + rows)[:, None])


def test_whole_differences_by_slot() -> None:
    base = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    dense, rows = added((5, 8))
    weight = Weight(jnp.asarray(base), WeightDelta(dense=jnp.asarray(dense)), SLOTS)
    x = np.random.default_rng(2).normal(size=(4, 1, 8)).astype(np.float32)
    want = np.einsum("bti,boi->bto", x, base + rows)
    np.testing.assert_allclose(linear(x, weight, (None, None)), want, rtol=1e-5, atol=1e-5)
    ids = jnp.array([[0], [1], [2], [3]])
    found = embed(ids, weight, (None, None), jnp.float32)
    np.testing.assert_allclose(found[:, 0], (base + rows)[range(4), range(4)], rtol=1e-6)
