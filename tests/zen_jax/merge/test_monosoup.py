"""MonoSoup and truncated soup: worked answers, and what holds for any matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.merge.folding import Mean, merge_arrays
from zen_jax.merge.monosoup import monosoup, split_values, truncated_soup

SHAPES = st.sampled_from([(6, 4), (4, 6), (5, 5)])
SEEDS = st.integers(0, 2**32 - 1)
RANKS = st.sampled_from(["effective", "energy"])
ZERO3 = np.zeros((3, 3))


def close(found: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 * max(scale, 1e-6))


# ---- worked out apart from this code


@pytest.mark.parametrize(
    ("delta", "options", "expected"),
    [
        ((8, 1.5, 0.5), {}, (7.48015459, 1.40252899, 0.03249034)),
        ((2, 1.2, 0.8), {"rank": "energy"}, (1.13493603, 0.68096162, 0.34602559)),
    ],
)
def test_worked_answers(delta, options, expected) -> None:
    base = np.arange(9.0).reshape(3, 3)
    for start in (ZERO3, base):
        found = monosoup(start, start + np.diag(delta), **options)
        np.testing.assert_allclose(found - start, np.diag(expected), rtol=0, atol=5e-9)


def test_worked_split() -> None:
    first = split_values(np.array([8, 1.5, 0.5]))
    assert (first.rank, round(first.low, 8)) == (2, 0.06498068)
    second = split_values(np.array([2, 1.2, 0.8]), "energy", 0.8)
    assert (second.rank, round(second.low, 8)) == (2, 0.43253199)
    assert first.high == 1 - first.low
    # By the formulas of the paper, from scratch.
    rho, tail = (0.5 / 8) ** 2, 0.25 / (64 + 2.25 + 0.25)
    assert first.rho == pytest.approx(rho) and first.energy == pytest.approx(1 - tail)
    assert first.low == pytest.approx(rho + (1 - rho) * tail**0.5)


def test_worked_truncation() -> None:
    found = truncated_soup(ZERO3, [np.diag([3.0, 2, 1])], 2)
    np.testing.assert_allclose(found, np.diag([3, 2, 0]), atol=1e-12)


def test_a_rank_that_is_whole_is_not_rounded_up() -> None:
    assert split_values(np.array([1.0, 1, 1, 0, 0])).rank == 3
    assert split_values(np.array([2.0, 2, 0, 0])).rank == 2
    assert split_values(np.array([4.0, 0, 0])).rank == 1
    assert split_values(np.array([2.0, 1, 1]), "energy", 1.0).rank == 3
    assert split_values(np.array([1.0, 1, 1, 1]), "energy", 0.5).rank == 2


# ---- what is left alone


@given(SEEDS, SHAPES, RANKS)
def test_rank_one_comes_back(matrix, seed, shape, rank) -> None:
    base = np.random.default_rng(seed).normal(size=shape)
    tuned = base + matrix(seed, shape, rank=1)
    close(monosoup(base, tuned, rank), tuned)


@given(SEEDS, SHAPES)
def test_two_singular_values_come_back_under_effective(matrix, seed, shape) -> None:
    delta = matrix(seed, shape, rank=2)
    close(monosoup(np.zeros(shape), delta), delta, np.abs(delta).max())


def test_without_a_tail_not_a_bit_is_changed(matrix) -> None:
    delta = matrix(3, (6, 4), rank=1)
    assert (monosoup(np.zeros((6, 4)), delta) == delta).all()


def test_vectors_and_what_hardly_moved_keep_the_tuned_value() -> None:
    base, tuned = np.ones(5, np.float32), np.arange(5, dtype=np.float32)
    assert (monosoup(base, tuned) == tuned).all()
    start = np.full((4, 4), 100.0)
    for size, kept in ((0.9e-6, True), (1.1e-6, False)):
        end = start + size * 100 * np.diag([3.9, 0.4, 0.2, 0.1])
        assert (monosoup(start, end) == end).all() == kept
    assert (monosoup(start, start) == start).all()


# ---- invariants of MonoSoup


@given(SEEDS, SHAPES, RANKS)
def test_orthogonally_equivariant(matrix, rotation, seed, shape, rank) -> None:
    left, right = rotation(seed, shape[0]), rotation(seed + 1, shape[1])
    delta, base = matrix(seed, shape), np.random.default_rng(seed).normal(size=shape)
    turned = monosoup(left @ base @ right, left @ (base + delta) @ right, rank)
    close(turned, left @ monosoup(base, base + delta, rank) @ right)


@given(SEEDS, SHAPES, RANKS, st.floats(-50, 50).filter(lambda c: abs(c) > 0.01))
def test_scales_with_the_delta(matrix, seed, shape, rank, factor) -> None:
    delta, zero = matrix(seed, shape), np.zeros(shape)
    close(monosoup(zero, factor * delta, rank), factor * monosoup(zero, delta, rank), abs(factor))


@given(SEEDS, SHAPES, RANKS)
def test_never_longer_than_the_delta(matrix, seed, shape, rank) -> None:
    delta = matrix(seed, shape)
    found = monosoup(np.zeros(shape), delta, rank)
    assert np.linalg.norm(found) <= np.linalg.norm(delta) * (1 + 1e-12)
    # Nothing is turned, and nothing changes its sign.
    left, values, right = np.linalg.svd(delta, full_matrices=False)
    kept = left.T @ found @ right.T / values
    assert (np.diag(kept) <= 1 + 1e-9).all() and (np.diag(kept) >= -1e-9).all()
    assert np.abs((kept - np.diag(np.diag(kept))) * values).max() <= 1e-9 * values[0]


# ---- invariants of truncated soup


def _several(matrix, seed, shape, count):
    base = np.random.default_rng(seed).normal(size=shape)
    return base, [base + matrix(seed + i, shape) for i in range(count)]


@given(SEEDS, SHAPES, st.integers(1, 4), st.integers(1, 4))
def test_order_does_not_matter_and_the_rank_is_bounded(matrix, seed, shape, count, rank) -> None:
    base, tuned = _several(matrix, seed, shape, count)
    found = truncated_soup(base, tuned, rank)
    close(truncated_soup(base, tuned[::-1], rank), found)
    values = np.linalg.svd(found - base, compute_uv=False)
    assert (values[count * rank :] <= 1e-9 * values[0]).all()


@given(SEEDS, SHAPES, st.integers(1, 4), st.integers(0, 3))
def test_a_full_rank_is_the_plain_mean(matrix, seed, shape, count, more) -> None:
    base, tuned = _several(matrix, seed, shape, count)
    found = truncated_soup(base, tuned, min(shape) + more)
    close(found, np.mean(tuned, axis=0))
    assert (found == merge_arrays(Mean(), base, tuned)).all(), "not a bit is rounded by an SVD"


@given(SEEDS, SHAPES, st.integers(1, 4))
def test_one_checkpoint_loses_what_is_dropped(matrix, seed, shape, rank) -> None:
    base, (tuned,) = _several(matrix, seed, shape, 1)
    values = np.linalg.svd(tuned - base, compute_uv=False)
    lost = np.linalg.norm(truncated_soup(base, [tuned], rank) - tuned)
    assert lost == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), abs=1e-7)


@given(SEEDS, SHAPES, st.integers(1, 4))
def test_a_truncated_soup_is_orthogonally_equivariant(matrix, rotation, seed, shape, rank) -> None:
    left, right = rotation(seed, shape[0]), rotation(seed + 1, shape[1])
    base, tuned = _several(matrix, seed, shape, 2)
    turned = truncated_soup(left @ base @ right, [left @ t @ right for t in tuned], rank)
    close(turned, left @ truncated_soup(base, tuned, rank) @ right)


@given(SEEDS, SHAPES, st.integers(1, 3), st.integers(1, 4))
def test_duplicates_leave_it_unchanged(matrix, seed, shape, count, rank) -> None:
    base, (tuned,) = _several(matrix, seed, shape, 1)
    close(truncated_soup(base, [tuned] * count, rank), truncated_soup(base, [tuned], rank))


def test_vectors_are_averaged_whole() -> None:
    base = np.array([1.0, 2, 3])
    found = truncated_soup(base, [base + 1, base + [0, 0, 4]], 1)
    np.testing.assert_allclose(found, base + [0.5, 0.5, 2.5])


def test_the_two_methods_are_two() -> None:
    delta = np.diag([8, 1.5, 0.5])
    assert np.abs(monosoup(ZERO3, delta) - truncated_soup(ZERO3, [delta], 2)).max() > 0.03


# ---- inputs


def test_one_checkpoint_is_held_at_a_time() -> None:
    """A generator is drawn from only when the one before has gone in."""
    alive = []

    class Checkpoint(np.ndarray):
        def __del__(self) -> None:
            alive.remove(None)

    def checkpoints():
        for i in range(4):
            assert not alive
            alive.append(None)
            yield (np.eye(3) * i).view(Checkpoint)

    truncated_soup(ZERO3, checkpoints(), 1)


def test_inputs_are_never_changed(matrix) -> None:
    base, tuned = np.zeros((6, 4)), matrix(1, (6, 4))
    for array in (base, tuned):
        array.flags.writeable = False
    before = tuned.copy()
    monosoup(base, tuned)
    truncated_soup(base, [tuned, tuned], 2)
    truncated_soup(base, [tuned, tuned], 9)
    assert (tuned == before).all() and not base.any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_results_are_float32_or_better(dtype) -> None:
    tuned = np.diag([8, 1.5, 0.5]).astype(dtype)
    found = monosoup(ZERO3.astype(dtype), tuned)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.diag([7.48015459, 1.40252899, 0.03249034]), rtol=3e-7)


def test_bad_input_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"checkpoint 0 has shape \(2, 3\); the base's is \(3, 3\)"
    ):
        monosoup(ZERO3, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="checkpoint 1 has 1 of 9 values that are NaN"):
        truncated_soup(ZERO3, [ZERO3, ZERO3 + [[np.nan, 0, 0], [0] * 3, [0] * 3]], 1)
    with pytest.raises(ValueError, match="at least one checkpoint"):
        truncated_soup(ZERO3, [], 1)
    with pytest.raises(ValueError, match="rank is 0"):
        truncated_soup(ZERO3, [ZERO3], 0)
    with pytest.raises(ValueError, match="rank is 'whole'; expected one of effective, energy"):
        monosoup(ZERO3, ZERO3, "whole")
    with pytest.raises(ValueError, match="energy is 1.5"):
        monosoup(ZERO3, ZERO3, "energy", 1.5)
    with pytest.raises(ValueError, match="expected a matrix or a vector"):
        monosoup(np.zeros((2, 2, 2)), np.zeros((2, 2, 2)))
