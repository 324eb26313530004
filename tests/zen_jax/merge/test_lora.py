"""The algebra of adapters: everything from the factors is what the dense task vectors give."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.merge import lora
from zen_jax.merge.lora import Factors


def factors(seed: int, rank: int = 3, shape: tuple[int, int] = (7, 9)) -> Factors:
    rng = np.random.default_rng(seed)
    return Factors(rng.normal(size=(rank, shape[1])), rng.normal(size=(shape[0], rank)))


def regauged(one: Factors, seed: int) -> Factors:
    """The same adapter by other factors: (b g, g^-1 a)."""
    g = np.random.default_rng(seed).normal(size=(one.rank, one.rank)) + 2 * np.eye(one.rank)
    return Factors(np.linalg.inv(g) @ one.a, one.b @ g)


def test_scaling() -> None:
    assert lora.scaling(8, 16, rslora=False) == 2
    assert lora.scaling(16, 16, rslora=True) == 4
    with pytest.raises(ValueError, match="rank is 0"):
        lora.scaling(0, 16, rslora=False)
    with pytest.raises(ValueError, match="alpha is nan"):
        lora.scaling(4, math.nan, rslora=False)


def test_factors_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(3, 9\) and \(7, 2\)"):
        Factors(np.zeros((3, 9)), np.zeros((7, 2)))
    with pytest.raises(ValueError, match="expected one"):
        lora.dot(factors(0), factors(0, shape=(9, 7)))


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5))
def test_inner_products_are_those_of_the_task_vectors(seed: int, r: int, s: int) -> None:
    one, other = factors(seed, r), factors(seed + 1, s)
    x, y = one.b @ one.a, other.b @ other.a
    assert lora.dot(one, other) == pytest.approx(np.sum(x * y), rel=1e-10, abs=1e-10)
    assert lora.norm(one) == pytest.approx(np.linalg.norm(x), rel=1e-10)
    wanted = np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y)
    assert lora.cosine(one, other) == pytest.approx(wanted, abs=1e-12)
    assert lora.cosine(regauged(one, seed), other) == pytest.approx(wanted, abs=1e-9)


def test_similarity_is_the_mean_over_modules() -> None:
    one, other = factors(0), factors(1)
    same = lora.similarity({"q": one, "v": other}, {"q": one, "v": one})
    assert same == pytest.approx((1 + lora.cosine(one, other)) / 2)
    assert lora.similarity({"q": one, "v": other}, {"q": one}) == pytest.approx(0.5)
    assert lora.cosine(one, Factors(0 * one.a, one.b)) == 0
    with pytest.raises(ValueError, match="nothing to compare"):
        lora.similarity({}, {})


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_the_mean_is_exact_at_both_ranks_together_and_eckart_youngs_below(
    seed: int, r: int, s: int
) -> None:
    one, other = factors(seed, r), factors(seed + 1, s)
    mean = lora.combine([(0.5, one), (0.5, other)])
    dense = (one.b @ one.a + other.b @ other.a) / 2
    assert mean.rank == r + s
    np.testing.assert_allclose(mean.dense(), dense, atol=1e-10)
    values = np.linalg.svd(dense, compute_uv=False)
    for rank in range(1, r + s + 1):
        found = lora.cut(mean, rank)
        lost = math.sqrt(np.sum(values[rank:] ** 2))
        assert found.rank <= rank
        assert np.linalg.norm(found.dense() - dense) == pytest.approx(lost, abs=1e-8)


def test_a_merge_of_task_vectors_does_not_see_the_gauge_and_one_of_factors_does() -> None:
    one, other = factors(0), factors(1)
    turned = regauged(one, 2)
    np.testing.assert_allclose(turned.dense(), one.dense(), atol=1e-10)

    def mean(x: Factors) -> np.ndarray:
        return lora.cut(lora.combine([(0.5, x), (0.5, other)]), 3).dense()

    def factor_mean(x: Factors) -> np.ndarray:
        return Factors((x.a + other.a) / 2, (x.b + other.b) / 2).dense()

    np.testing.assert_allclose(mean(turned), mean(one), atol=1e-9)
    assert np.abs(factor_mean(turned) - factor_mean(one)).max() > 0.1


def test_zero_task_vectors() -> None:
    zero = Factors(np.zeros((3, 9)), np.ones((7, 3)))
    u, s, vt = lora.svd(zero)
    assert (u.shape, s.shape, vt.shape) == ((7, 0), (0,), (0, 9))
    assert lora.cut(zero, 1).dense().shape == (7, 9)
    assert not lora.cut(zero, 1).dense().any()


def test_inputs_are_left_as_they_were() -> None:
    one, other = factors(0), factors(1)
    before = one.a.copy(), one.b.copy()
    lora.cut(lora.combine([(0.5, one), (0.5, other)]), 2)
    lora.svd(one)
    np.testing.assert_array_equal(one.a, before[0])
    np.testing.assert_array_equal(one.b, before[1])
