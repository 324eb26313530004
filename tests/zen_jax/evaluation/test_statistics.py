"""Intervals are what they say, and a share of a gain is given only where there is a gain."""

import numpy as np
import pytest

from zen_jax.evaluation.statistics import Draws, recovered, share

RNG = np.random.default_rng(5)
ROWS = 40


def _draws(rows: int = ROWS) -> Draws:
    return Draws.of(rows, 2000, 1)


def test_a_mean_weighs_tokens_and_its_interval_is_the_bootstraps() -> None:
    tokens = RNG.integers(1, 30, ROWS).astype(np.float64)
    sums = tokens * RNG.normal(2.0, 0.5, ROWS)
    found = _draws().mean(sums, tokens)
    assert found.value == pytest.approx(sums.sum() / tokens.sum(), rel=1e-12)
    rng = np.random.default_rng(9)
    again = []
    for _ in range(2000):  # drawn in the plainest way
        at = rng.integers(ROWS, size=ROWS)
        again.append(sums[at].sum() / tokens[at].sum())
    low, high = np.percentile(again, [2.5, 97.5])
    width = high - low
    assert found.low == pytest.approx(low, abs=width / 10)
    assert found.high == pytest.approx(high, abs=width / 10)


def test_draws_are_the_same_for_a_seed_and_have_as_many_rows() -> None:
    one, two, other = Draws.of(7, 50, 3), Draws.of(7, 50, 3), Draws.of(7, 50, 4)
    assert np.array_equal(one.counts, two.counts) and not np.array_equal(one.counts, other.counts)
    assert (one.counts.sum(axis=1) == 7).all()


def test_one_row_has_no_interval() -> None:
    found = _draws(1).mean(np.array([6.0]), np.array([3.0]))
    assert (found.value, found.low, found.high) == (2.0, None, None)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Published values of Wilson's interval, as R's prop.test(..., correct = FALSE) gives them.
    [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0), (50, 100, 0.404, 0.596)],
)
def test_a_share_has_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    found = share(np.array([1.0] * right + [0.0] * (count - right)))
    assert found.value == right / count
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize("part", [-0.5, 0.0, 0.5, 1.0, 1.25])
def test_what_is_recovered_keeps_its_sign(part: float) -> None:
    weights = np.full(ROWS, 10.0)
    base = RNG.normal(30, 1, ROWS)
    tuned = base - RNG.normal(8, 1, ROWS)
    found = recovered(_draws(), base, base + part * (tuned - base), tuned, weights)
    assert found.value == pytest.approx(part, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((part, part), abs=1e-9)


def test_what_is_recovered_of_wrong_answers_is_that_of_accuracies() -> None:
    base, tuned = np.ones(10), np.array([0.0] * 9 + [1.0])
    model = np.array([0.0] * 6 + [1.0] * 4)
    found = recovered(_draws(10), base, model, tuned, np.ones(10))
    assert found.value == pytest.approx(0.6 / 0.9)
    assert found.low is not None and found.high is not None
    assert found.low < 0.6 / 0.9 < found.high


def test_there_is_no_share_of_no_gain() -> None:
    noise = RNG.normal(0, 1, ROWS)
    base, ones = RNG.normal(30, 1, ROWS), np.ones(ROWS)
    better = base - 5
    for tuned, why in (
        (base + 1, "no gain"),
        (base, "no gain"),
        (base - noise + noise.mean() - 0.01, "gain within chance"),
    ):
        found = recovered(_draws(), base, better, tuned, ones)
        assert (found.value, found.low, found.why) == (None, None, why)
    single = recovered(_draws(1), np.array([3.0]), np.array([2.0]), np.array([1.0]), np.ones(1))
    assert (single.value, single.why) == (None, "one row")
