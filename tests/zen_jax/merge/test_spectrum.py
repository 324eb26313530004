"""Singular values by each way, on one device and on several, and when one does not converge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from zen_jax.merge import spectrum as module
from zen_jax.merge.folding import place_any
from zen_jax.merge.spectrum import both_sides, full_svd, leading, place, reweigh, spectrum, trim

SHAPES = [(7, 4), (4, 7), (6, 6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_vectors_are_those_of_lapack(matrix, shape) -> None:
    x = matrix(1, shape)
    found = spectrum(place_any(x))
    left, values, right = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(found.values, values, rtol=1e-8)
    own = right.T if shape[0] >= shape[1] else left
    overlap = np.abs(np.sum(np.asarray(found.vectors) * own, axis=0))
    np.testing.assert_allclose(overlap, 1, atol=1e-8)
    assert found.how == "gram"


def test_what_is_below_the_resolution_is_zero(matrix) -> None:
    found = spectrum(place_any(matrix(2, (8, 6), rank=2)))
    assert (found.values[2:] == 0).all() and found.values[1] > 0
    assert found.energy.sum() == pytest.approx(1)


def test_more_rows_than_a_block_are_summed_whole() -> None:
    rows = module._BLOCK * 2 + 37
    x = np.random.default_rng(0).normal(size=(rows, 3))
    np.testing.assert_allclose(
        spectrum(place_any(x)).values, np.linalg.svd(x, compute_uv=False), rtol=1e-10
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_both_sides_make_the_matrix_again(matrix, shape) -> None:
    x = matrix(3, shape, rank=3)
    left, values, right = both_sides(place_any(x), 1e-9)
    left, right = np.asarray(left), np.asarray(right)
    np.testing.assert_allclose((left * values) @ right.T, x, atol=1e-10)
    assert (values > 0).sum() == 3 and not left[:, 3:].any() and not right[:, 3:].any()
    np.testing.assert_allclose(
        left.T @ left, np.diag([1, 1, 1, *[0] * (min(shape) - 3)]), atol=1e-9
    )


def test_small_values_get_vectors_from_the_full_decomposition(matrix, rotation) -> None:
    x = rotation(1, 6) @ np.diag([1, 0.3, 1e-3, 1e-5, 3e-6, 1e-6]) @ rotation(2, 6)
    left, _, _ = both_sides(place_any(x), 1e-9)
    np.testing.assert_allclose(np.asarray(left).T @ np.asarray(left), np.eye(6), atol=1e-12)


def test_reweigh_scales_each_value(matrix) -> None:
    x = matrix(4, (5, 7))
    weights = np.array([1.0, 0.5, 0.0, 2.0, 0.1])
    found = reweigh(place_any(x), spectrum(place_any(x)), weights)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(np.asarray(found), (left * values * weights) @ right, atol=1e-12)


# ---- when something does not converge


@pytest.fixture
def no_eigen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gram):
        return gram[0] * jnp.nan, gram * jnp.nan

    monkeypatch.setattr(module, "_eigen", fails)


def test_a_gram_matrix_that_does_not_converge_goes_to_lapack(matrix, no_eigen) -> None:
    for shape in SHAPES:
        x = matrix(5, shape)
        found = spectrum(place_any(x))
        assert found.how == "svd"
        kept = reweigh(place_any(x), found, np.arange(min(shape)) < 2)
        left, values, right = np.linalg.svd(x, full_matrices=False)
        expected = (left[:, :2] * values[:2]) @ right[:2]
        np.testing.assert_allclose(np.asarray(kept), expected, atol=1e-12)


def test_a_sketch_that_does_not_converge_goes_to_the_gram_matrix(
    matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(matrix, key, rank, iterations):
        return matrix * jnp.nan, jnp.float32(jnp.nan)

    monkeypatch.setattr(module, "_sketch", fails)
    x = matrix(6, (30, 20))
    found, energy, how = leading(place_any(x), 2, "w")
    assert how == "gram"
    values = np.linalg.svd(x, compute_uv=False)
    assert energy == pytest.approx((values[:2] ** 2).sum() / (values**2).sum())
    assert np.linalg.norm(np.asarray(found) - x) == pytest.approx(np.linalg.norm(values[2:]))


def test_divide_and_conquer_that_fails_is_followed_by_qr(
    matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args, **kwargs):
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", fails)
    x = matrix(7, (5, 4))
    left, values, right = full_svd(x)
    np.testing.assert_allclose((left * values) @ right, x, atol=1e-12)
    monkeypatch.setattr(module.scipy.linalg, "svd", fails)
    with pytest.raises(ValueError, match=r"\[5, 4\] does not converge"):
        full_svd(x)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        spectrum(jnp.full((3, 3), jnp.nan))


# ---- the first few by a sketch


def _decaying(size: int) -> np.ndarray:
    """[size, size] with singular values j^-1/2, in float32."""
    rng = np.random.default_rng(8)
    left = np.linalg.qr(rng.normal(size=(size, size)))[0]
    right = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return ((left * np.arange(1, size + 1) ** -0.5) @ right).astype(np.float32)


def test_two_power_iterations_come_close_to_the_best() -> None:
    """1024 x 1024 at rank 32: the error over the best there is, with 0, 2 and 4 iterations."""
    size, rank = 1024, 32
    values = 1 / np.arange(1, size + 1)
    turned = scipy.linalg.hadamard(size) / 32.0
    x = jnp.asarray((turned * values) @ turned[::-1].T, jnp.float32)
    best = np.sqrt((values[rank:] ** 2).sum())
    errors = []
    for iterations in (0, 2, 4):
        with jax.enable_x64(True):
            found, _ = module._sketch(x, jax.random.key(0), rank, iterations)
        errors.append(np.linalg.norm(np.asarray(found) - np.asarray(x)) / best)
    assert errors[0] > 1.3 and errors[1] < 1.004 and errors[2] < 1.002
    assert errors[0] > errors[1] > errors[2] > 1 - 1e-4
    assert (module.POWER_ITERATIONS, module.OVERSAMPLING) == (2, 10)


def test_a_sketch_is_seeded_by_the_name() -> None:
    x = place_any(_decaying(64))
    one, _, how = leading(x, 8, "a")
    again, _, _ = leading(x, 8, "a")
    other, _, _ = leading(x, 8, "b")
    assert how == "randomised"
    assert (np.asarray(one) == np.asarray(again)).all()
    assert (np.asarray(one) != np.asarray(other)).any()


def test_a_sketch_tells_the_energy_that_it_kept() -> None:
    x = _decaying(64)
    found, energy, _ = leading(place_any(x), 8, "a")
    assert energy == pytest.approx((np.linalg.norm(found) / np.linalg.norm(x)) ** 2, rel=1e-5)
    left = np.linalg.norm(np.asarray(found) - x) / np.linalg.norm(x)
    assert energy == pytest.approx(1 - left**2, rel=1e-5)


@pytest.mark.parametrize("shape", [(96, 33), (33, 96)])
def test_a_sketch_has_the_rank_that_was_asked_for(matrix, shape) -> None:
    found, _, how = leading(place_any(matrix(9, shape)), 5, "x")
    assert how == "randomised"
    values = np.linalg.svd(np.asarray(found), compute_uv=False)
    assert (values > 1e-10 * values[0]).sum() == 5


def test_a_zero_matrix_has_nothing_and_all_of_it() -> None:
    found, energy, _ = leading(jnp.zeros((40, 30)), 3)
    assert not np.asarray(found).any() and energy == 1.0


# ---- several devices


@pytest.mark.parametrize("shape", [(50, 24), (24, 50)])
def test_a_matrix_that_is_cut_over_devices_gives_the_same(matrix, devices, shape) -> None:
    x = matrix(10, shape).astype(np.float32)
    cut = place(x, devices)
    longer = max(shape)
    assert {s.data.shape for s in cut.addressable_shards} == {
        (-(-longer // 8), min(shape)) if shape[0] >= shape[1] else (min(shape), -(-longer // 8))
    }
    alone, together = spectrum(place(x)), spectrum(cut)
    np.testing.assert_allclose(together.values, alone.values, rtol=1e-6, atol=1e-8)
    weights = np.arange(min(shape)) < 5
    for one, other in (
        (reweigh(cut, together, weights), reweigh(place(x), alone, weights)),
        (leading(cut, 5, "n")[0], leading(place(x), 5, "n")[0]),
    ):
        np.testing.assert_allclose(trim(one, shape), np.asarray(other), atol=2e-6)


def test_a_matrix_stays_cut_while_its_gram_matrix_is_summed(devices) -> None:
    """No device ever has all rows: the sum goes round, the rows do not."""
    x = place(np.ones((64, 8), np.float32), devices)
    with jax.enable_x64(True):
        text = module._gram.lower(x, module._mesh(x)).compile().as_text() or ""
    assert "all-reduce" in text and "all-gather" not in text
    kept = reweigh(x, spectrum(x), np.ones(8))
    assert {shard.data.shape for shard in kept.addressable_shards} == {(8, 8)}
