"""OPCM: worked answers, and what holds at every step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.merge.folding import place_any
from zen_jax.merge.opcm import Opcm, begin, leading_block, opcm, step

SHAPES = st.sampled_from([(6, 4), (4, 6), (5, 5)])
SEEDS = st.integers(0, 2**32 - 1)
METHODS = st.builds(
    Opcm,
    st.sampled_from([0.0, 0.3, 0.5, 0.8]),
    st.sampled_from(["code", "doc"]),
    st.sampled_from(["keep", "drop"]),
)
PREVIOUS = np.diag([4.0, 3, 2, 1])


def cleaned(previous: np.ndarray, new: np.ndarray, method: Opcm) -> np.ndarray:
    """What a step adds to the merge: lambda_t merged_t - lambda_{t-1} merged_{t-1}."""
    before = begin(place_any(previous))
    after, _ = step(before, place_any(new), method)
    return after.factor * np.asarray(after.merged) - before.factor * np.asarray(before.merged)


def reference(previous: np.ndarray, new: np.ndarray, alpha: float, split: str) -> np.ndarray:
    """The authors' loop in full bases, for a square `previous` of full rank."""
    left, values, right = np.linalg.svd(previous)
    inside = left.T @ new @ right.T
    share = np.cumsum(values) / values.sum()
    block = int(np.argmax(share > alpha)) + (split == "doc")
    np.fill_diagonal(inside, 0)
    inside[:block, :block] = 0
    return left @ inside @ right


# ---- worked out apart from this code


@pytest.mark.parametrize(("split", "zeros"), [("code", 1), ("doc", 2)])
def test_worked_answer(split, zeros) -> None:
    expected = np.ones((4, 4)) - np.eye(4)
    expected[:zeros, :zeros] = 0
    new = np.ones((4, 4))
    np.testing.assert_allclose(cleaned(PREVIOUS, new, Opcm(0.5, split)), expected, atol=1e-12)
    raw = PREVIOUS + expected
    length = (np.linalg.norm(PREVIOUS) + 4) / 2
    base = np.arange(16.0).reshape(4, 4)
    found = opcm(base, [base + PREVIOUS, base + new], split=split)
    np.testing.assert_allclose(found - base, raw * length / np.linalg.norm(raw), atol=1e-12)


def test_lambda_is_the_raw_length_over_the_mean_length() -> None:
    after, figures = step(begin(place_any(PREVIOUS)), place_any(np.ones((4, 4))), Opcm())
    raw = np.linalg.norm(PREVIOUS + np.ones((4, 4)) - np.eye(4))
    assert figures["lambda"] == pytest.approx(raw / ((np.linalg.norm(PREVIOUS) + 4) / 2))
    assert after.factor == figures["lambda"]
    assert (figures["rank"], figures["block"]) == (4, 1)
    assert figures["energy"] == pytest.approx(12 / 16)


def test_the_first_passes_through() -> None:
    assert (opcm(np.zeros((4, 4)), [PREVIOUS]) == PREVIOUS).all()
    assert begin(place_any(PREVIOUS)).factor == 1.0


def test_blocks_of_both_rules() -> None:
    values = np.array([4.0, 3, 2, 1])
    for alpha, code in ((0.0, 0), (0.39, 0), (0.41, 1), (0.5, 1), (0.71, 2), (0.95, 3)):
        assert leading_block(values, Opcm(alpha, "code")) == code
        assert leading_block(values, Opcm(alpha, "doc")) == code + 1
    assert leading_block(values[:0], Opcm()) == 0


@given(SEEDS, st.sampled_from(["code", "doc"]), st.sampled_from([0.2, 0.5, 0.8]))
def test_as_the_authors_do_where_full_bases_are_unique(matrix, seed, split, alpha) -> None:
    previous, new = matrix(seed, (5, 5)), matrix(seed + 1, (5, 5))
    expected = reference(previous, new, alpha, split)
    np.testing.assert_allclose(cleaned(previous, new, Opcm(alpha, split)), expected, atol=1e-7)


@given(SEEDS, st.sampled_from(["code", "doc"]))
def test_four_in_turn_are_as_in_the_authors_loop(matrix, seed, split) -> None:
    """merged_t = (lambda_t-1 merged_t-1 + cleaned) / lambda_t, from the paper."""
    deltas = [matrix(seed + i, (5, 5)) for i in range(4)]
    merged, factor = deltas[0], 1.0
    for i, new in enumerate(deltas[1:], 2):
        raw = factor * merged + reference(merged, new, 0.5, split)
        length = np.mean([np.linalg.norm(d) for d in deltas[:i]])
        factor = np.linalg.norm(raw) / length
        merged = raw / factor
    np.testing.assert_allclose(opcm(np.zeros((5, 5)), deltas, 0.5, split), merged, atol=1e-6)


def test_rounding_is_no_direction(matrix) -> None:
    """In float32 a matrix of rank 2 has other singular values too, of the size of its rounding."""
    previous = matrix(1, (6, 5), rank=2).astype(np.float32)
    _, figures = step(begin(place_any(previous)), place_any(previous), Opcm())
    assert figures["rank"] == 2


# ---- invariants


@given(SEEDS, SHAPES, METHODS, st.integers(1, 4))
def test_what_is_added_is_orthogonal_to_the_merge(matrix, seed, shape, method, rank) -> None:
    previous, new = matrix(seed, shape, rank=rank), matrix(seed + 1, shape)
    product = np.sum(cleaned(previous, new, method) * previous)
    assert abs(product) <= 1e-9 * np.linalg.norm(previous) * np.linalg.norm(new)


@given(SEEDS, SHAPES, METHODS, st.integers(2, 5))
def test_the_norm_rule_holds_at_every_step(matrix, seed, shape, method, count) -> None:
    deltas = [matrix(seed + i, shape) for i in range(count)]
    state = begin(place_any(deltas[0]))
    for i, delta in enumerate(deltas[1:], 2):
        state, _ = step(state, place_any(delta), method)
        mean = np.mean([np.linalg.norm(d) for d in deltas[:i]])
        assert np.linalg.norm(state.merged) == pytest.approx(mean, rel=1e-9)
        assert state.count == i


@given(SEEDS, SHAPES, METHODS, st.integers(1, 4))
def test_a_duplicate_leaves_the_merge_unchanged(matrix, seed, shape, method, rank) -> None:
    base, delta = np.ones(shape), matrix(seed, shape, rank=rank)
    found = opcm(base, [base + delta] * 2, method.alpha, method.split, method.outside)
    np.testing.assert_allclose(found, base + delta, atol=1e-8)


@given(SEEDS, SHAPES, METHODS)
def test_orthogonally_equivariant(matrix, rotation, seed, shape, method) -> None:
    left, right = rotation(seed, shape[0]), rotation(seed + 1, shape[1])
    options = (method.alpha, method.split, method.outside)
    deltas = [matrix(seed, shape, rank=2), matrix(seed + 1, shape), matrix(seed + 2, shape, rank=1)]
    zero = np.zeros(shape)
    turned = opcm(zero, [left @ d @ right for d in deltas], *options)
    np.testing.assert_allclose(turned, left @ opcm(zero, deltas, *options) @ right, atol=1e-6)


@given(SEEDS, SHAPES)
def test_what_lies_outside_a_low_rank_is_kept_or_dropped(matrix, seed, shape) -> None:
    """The full basis of a low-rank matrix is arbitrary beyond its rank: nothing depends on it."""
    previous, new = matrix(seed, shape, rank=2), matrix(seed + 1, shape)
    left, _, right = np.linalg.svd(previous)
    left, right = left[:, :2], right[:2]
    outside = new - left @ left.T @ new @ right.T @ right
    keep, drop = (cleaned(previous, new, Opcm(0.5, "code", o)) for o in ("keep", "drop"))
    np.testing.assert_allclose(keep - drop, outside, atol=1e-7)
    np.testing.assert_allclose(left @ left.T @ drop @ right.T @ right, drop, atol=1e-7)


def test_nothing_before_leaves_the_new_one_whole(matrix) -> None:
    zero, new = np.zeros((5, 5)), matrix(1, (5, 5))
    for outside in ("keep", "drop"):
        found = opcm(zero, [zero, new], outside=outside)
        np.testing.assert_allclose(found, new / 2, atol=1e-12)
        assert not opcm(zero, [zero, zero], outside=outside).any()


def test_vectors_are_averaged() -> None:
    np.testing.assert_allclose(opcm(np.ones(3), [np.zeros(3), np.full(3, 4.0)]), 2)


def test_bad_options_are_named() -> None:
    for bad, told in (
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"split": "both"}, "split is 'both'"),
        ({"outside": "?"}, "outside is '\\?'"),
    ):
        with pytest.raises(ValueError, match=told):
            Opcm(**bad)
