"""BitDelta's known answers, worked out in float64 outside the project."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.packing import hashed_bits, pack_signs
from zen_jax.delta import compress
from zen_jax.delta.apply import effective_weight
from zen_jax.delta.compress import compress_tensor, keep_vector
from zen_jax.delta.format import WeightDelta

ROW = np.array([[0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9]], np.float32)


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_known_row(scale) -> None:
    delta, stats = compress_tensor(np.zeros_like(ROW), ROW, scale=scale)
    assert delta.bits is not None and delta.bits.tolist() == [[[85, 1]]]
    np.testing.assert_allclose(delta.scale, [[0.5]], rtol=1e-6)
    assert stats.zeros == 0


def test_a_two_valued_delta_comes_back_exactly() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(-8, 8, (6, 11)).astype(np.float32)
    tuned = base + 0.25 * rng.choice([-1, 1], base.shape).astype(np.float32)
    delta, stats = compress_tensor(base, tuned)
    assert np.array_equal(np.asarray(effective_weight(base, delta)), tuned)
    assert stats.relative_error == 0


def test_a_row_of_zeros_has_scale_0() -> None:
    tuned = np.zeros((2, 16), np.float32)
    tuned[1] = 1
    delta, stats = compress_tensor(np.zeros_like(tuned), tuned)
    assert delta.scale is not None and delta.scale.tolist() == [[0.0, 1.0]]
    assert stats.zeros == 0.5


def test_mean_absolute_delta_is_the_least_squares_scale() -> None:
    rng = np.random.default_rng(1)
    rest = rng.laplace(size=(3, 200)).astype(np.float32)
    delta, stats = compress_tensor(np.zeros_like(rest), rest, scale="matrix")
    alpha = float(np.asarray(delta.scale)[0, 0])

    def error(a: float) -> float:
        return float(np.linalg.norm(rest - a * np.sign(rest)))

    assert all(error(alpha) <= error(alpha + step) for step in (-0.01, -0.001, 0.001, 0.01))
    assert stats.relative_error == pytest.approx(error(alpha) / np.linalg.norm(rest), rel=1e-5)


@pytest.mark.parametrize(("levels", "want"), [(1, 0.603), (2, 0.343), (3, 0.194), (4, 0.123)])
def test_error_of_a_gaussian_delta_by_levels(levels: int, want: float) -> None:
    rest = np.random.default_rng(2).normal(size=(64, 2048)).astype(np.float32)
    _, stats = compress_tensor(np.zeros_like(rest), rest, levels=levels)
    # Max (1960): the best two and four values. Eight and more are sums of scales, not any values:
    # the best eight leave 0.186, the best sixteen 0.0977.
    assert stats.relative_error == pytest.approx(want, abs=0.004)


@pytest.mark.parametrize("scale", ["row", "matrix"])
@pytest.mark.parametrize("levels", [2, 3, 4])
def test_levels_together_beat_one_after_the_other(scale, levels: int) -> None:
    rng = np.random.default_rng(5)
    rest = (rng.normal(size=(16, 512)) * (rng.random((16, 512)) < 0.5)).astype(np.float32)
    _, stats = compress_tensor(np.zeros_like(rest), rest, scale=scale, levels=levels)
    left = rest
    for _ in range(levels):
        part, _ = compress_tensor(np.zeros_like(left), left, scale=scale)
        left = left - np.asarray(effective_weight(np.zeros_like(left), _broadcast(part)))
    assert stats.relative_error < 0.9 * np.linalg.norm(left) / np.linalg.norm(rest)


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_two_levels_hold_a_ternary_delta_exactly(scale) -> None:
    """Rows of any size with any share of zeros, none and all among them; 0 is a and -a."""
    rng = np.random.default_rng(6)
    size = np.full((9, 1), 0.7) if scale == "matrix" else rng.uniform(1e-3, 2, (9, 1))
    kept = rng.random((9, 333)) < np.linspace(0, 1, 9)[:, None]
    rest = (size * rng.choice([-1, 1], kept.shape) * kept).astype(np.float32)
    delta, stats = compress_tensor(np.zeros_like(rest), rest, scale=scale, levels=2)
    assert np.array_equal(np.asarray(effective_weight(0 * rest, _broadcast(delta))), rest)
    assert stats.relative_error == 0


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_what_is_given_for_zeros_has_hashed_signs(
    scale, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small values beside the zeros, so that no sum of scales is 0."""
    monkeypatch.setattr(compress, "_BLOCK", 3000)
    rest = np.abs(np.random.default_rng(7).normal(size=(8, 1024))).astype(np.float32)
    rest[:, ::4] = 0
    delta, _ = compress_tensor(0 * rest, rest, scale=scale, levels=levels)
    given = np.asarray(effective_weight(0 * rest, _broadcast(delta)))[:, ::4]
    hashed = hashed_bits(0, rest.size).reshape(rest.shape)[:, ::4]
    assert len(np.unique(np.abs(given), axis=1)[0]) == 1 and (given != 0).all()
    assert np.array_equal(given > 0, hashed)


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_scales_of_two_levels_are_the_least_squares_ones(scale) -> None:
    rest = np.random.default_rng(8).laplace(size=(3, 700)).astype(np.float32)
    delta, stats = compress_tensor(0 * rest, rest, scale=scale, levels=2)

    def error(moved: np.ndarray) -> float:
        other = WeightDelta(delta.bits, delta.scale + moved)
        return float(np.linalg.norm(rest - effective_weight(0 * rest, _broadcast(other))))

    best = error(np.zeros_like(delta.scale))
    assert stats.relative_error == pytest.approx(best / np.linalg.norm(rest), rel=1e-6)
    for at in np.ndindex(delta.scale.shape):
        for step in (-0.03, 0.03):
            moved = np.zeros_like(delta.scale)
            moved[at] = step
            assert error(moved) > best, at


def test_error_and_scale_of_a_laplace_delta() -> None:
    rest = np.random.default_rng(3).laplace(0, 0.02, size=(64, 2048)).astype(np.float32)
    delta, stats = compress_tensor(np.zeros_like(rest), rest)
    assert stats.relative_error == pytest.approx(0.7071, abs=0.006)
    assert float(np.mean(np.asarray(delta.scale))) == pytest.approx(0.02, rel=0.01)


def test_hashed_zeros_beat_zeros_that_read_as_plus_one() -> None:
    """68 % zeros and inputs of mean 0.1 sigma: error 0.87 of the delta's own size, not 1.71."""
    rng = np.random.default_rng(4)
    rest = rng.normal(size=(256, 2304)).astype(np.float32)
    rest[rng.random(rest.shape) < 0.68] = 0
    x = rng.normal(0.1, 1, (256, 2304)).astype(np.float32)
    delta, stats = compress_tensor(np.zeros_like(rest), rest)
    assert stats.zeros == pytest.approx(0.68, abs=0.01)
    want = x @ rest.T
    plus = x @ (np.asarray(delta.scale)[0][:, None] * np.where(rest >= 0, 1, -1)).T
    got = x @ np.asarray(effective_weight(np.zeros_like(rest), delta)).T
    size = np.linalg.norm(want)
    assert np.linalg.norm(got - want) / size == pytest.approx(0.87, abs=0.03)
    assert np.linalg.norm(plus - want) / size == pytest.approx(1.71, abs=0.05)


def test_deltas_are_taken_against_the_base_as_stored() -> None:
    base = np.array([[1.0, 2.0]], ml_dtypes.bfloat16)
    tuned = np.array([[1.001, 1.999]], np.float32)
    delta, _ = compress_tensor(base, tuned)
    assert np.array_equal(delta.bits, pack_signs(np.array([[[1.0, -1.0]]])))
    np.testing.assert_allclose(delta.scale, [[0.001]], rtol=1e-3)


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_blocks_of_rows_change_nothing(scale, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    base = rng.normal(size=(37, 24)).astype(np.float32)
    tuned = base + np.where(rng.random(base.shape) < 0.4, 0, rng.normal(size=base.shape))
    tuned = tuned.astype(np.float32)
    whole, figures = compress_tensor(base, tuned, scale=scale, levels=levels)
    monkeypatch.setattr(compress, "_BLOCK", 100)
    parts, others = compress_tensor(base, tuned, scale=scale, levels=levels)
    assert np.array_equal(whole.bits, parts.bits)
    assert np.array_equal(whole.scale, parts.scale)
    assert figures.zeros == others.zeros > 0.3
    left = tuned - np.asarray(effective_weight(base, _broadcast(parts)))
    error = np.linalg.norm(left) / np.linalg.norm(tuned - base)
    assert others.relative_error == pytest.approx(error, rel=1e-4)


def _broadcast(delta: WeightDelta) -> WeightDelta:
    return WeightDelta(delta.bits, np.broadcast_to(delta.scale, delta.bits.shape[:2]))


@pytest.mark.parametrize(
    ("base", "tuned", "kind", "message"),
    [
        (np.ones((2, 3)), np.ones((3, 2)), {}, r"shapes \(2, 3\) and \(3, 2\)"),
        (np.ones(3), np.ones(3), {}, "shapes"),
        (np.ones((1, 2)), np.array([[1, np.nan]]), {}, "not finite"),
        (np.ones((1, 2)), np.array([[1, np.inf]]), {}, "not finite"),
        (np.ones((1, 2)), np.array([[1, np.nan]]), {"levels": 2}, "not finite"),
        (np.ones((1, 2)), np.array([[1, np.inf]]), {"levels": 2, "scale": "matrix"}, "not finite"),
        (np.ones((1, 2)), np.ones((1, 2)), {"levels": 0}, "levels is 0; expected 1 to 4"),
        (np.ones((1, 2)), np.ones((1, 2)), {"levels": 5}, "levels is 5; expected 1 to 4"),
        (np.ones((1, 2)), np.ones((1, 2)), {"scale": "column"}, "'column'"),
    ],
)
def test_bad_input_is_named(base, tuned, kind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compress_tensor(base.astype(np.float32), tuned.astype(np.float32), **kind)


def test_vectors_are_kept_whole_or_shared() -> None:
    base = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert keep_vector(base, base.copy()).empty
    kept = keep_vector(base, np.array([1.5, 2.0], np.float32))
    assert np.asarray(kept.dense).tolist() == [0.5, 0.0]
    with pytest.raises(ValueError, match="not finite"):
        keep_vector(base, np.array([np.nan, 0], np.float32))
    with pytest.raises(ValueError, match="shapes"):
        keep_vector(base, np.zeros(3, np.float32))
