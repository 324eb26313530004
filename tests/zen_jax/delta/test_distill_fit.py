"""Signs and scales fitted to second moments, against the formulas in float64."""

import numpy as np
import pytest

from zen_jax.delta.compress import ScaleKind, compress_tensor
from zen_jax.delta.distill_fit import Fit, damped, fit_matrix, unpack_codes


def _case(seed: int, rows: int = 24, size: int = 72) -> tuple[np.ndarray, np.ndarray]:
    """A delta with zeros, and second moments of inputs of very different sizes."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(size, size)) * np.linspace(2, 0.01, size)
    inputs = rng.normal(size=(500, size)) @ mixing
    delta = rng.normal(size=(rows, size)) * 1e-3
    delta[rng.random(delta.shape) < 0.4] = 0
    return delta.astype(np.float32), damped((inputs.T @ inputs / 500).astype(np.float32))


def _value(fit: Fit, size: int) -> np.ndarray:
    signs = unpack_codes(fit.delta, size).astype(np.float64)
    return np.sum(np.asarray(fit.delta.scale, np.float64)[..., None] * signs, axis=0)


def _error(delta: np.ndarray, second: np.ndarray, value: np.ndarray) -> float:
    left, c = delta.astype(np.float64) - value, second.astype(np.float64)
    return float(np.trace(left @ c @ left.T) / np.trace(delta @ c @ delta.T.astype(np.float64)))


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_the_closed_form(scale: ScaleKind) -> None:
    delta, second = _case(1)
    start, _ = compress_tensor(np.zeros_like(delta), delta, scale=scale)
    fit = fit_matrix(delta, second, start, scale=scale)
    d, c = delta.astype(np.float64), second.astype(np.float64)
    s = unpack_codes(start, delta.shape[1])[0].astype(np.float64)
    wanted, seen = np.diag(d @ c @ s.T), np.diag(s @ c @ s.T)
    alpha = wanted / seen if scale == "row" else [wanted.sum() / seen.sum()]
    np.testing.assert_allclose(np.asarray(fit.delta.scale)[0], alpha, rtol=2e-5)
    np.testing.assert_array_equal(fit.delta.bits, start.bits)


def test_inputs_that_are_all_alike_leave_the_mean() -> None:
    delta, _ = _case(2)
    start, _ = compress_tensor(np.zeros_like(delta), delta)
    fit = fit_matrix(delta, np.eye(delta.shape[1], dtype=np.float32), start, sweeps=3)
    np.testing.assert_array_equal(fit.delta.bits, start.bits)
    np.testing.assert_allclose(fit.delta.scale, np.asarray(start.scale), rtol=1e-5)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("size", [72, 64, 19])
def test_no_sweep_makes_it_worse(levels: int, size: int) -> None:
    delta, second = _case(3, size=size)
    start, _ = compress_tensor(np.zeros_like(delta), delta, levels=levels)
    errors = []
    for sweeps in (0, 1, 2, 6):
        fit = fit_matrix(delta, second, start, sweeps=sweeps)
        assert fit.after == pytest.approx(_error(delta, second, _value(fit, size)), rel=1e-3)
        errors.append(fit.after)
    given = Fit(start, 0.0, 0.0)
    assert fit.before == pytest.approx(_error(delta, second, _value(given, size)), rel=1e-3)
    assert errors[0] <= fit.before
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]


def test_in_the_end_no_single_sign_is_better_turned() -> None:
    delta, second = _case(4)
    start, _ = compress_tensor(np.zeros_like(delta), delta)
    fit = fit_matrix(delta, second, start, sweeps=60)
    value = _value(fit, delta.shape[1])
    pull = (delta - value) @ second.astype(np.float64)
    change = 4 * value * pull + 4 * np.square(value) * np.diag(second)
    assert change.min() > -1e-6 * np.abs(change).max()


def test_inputs_that_no_text_showed_count_a_little() -> None:
    second = np.diag(np.array([4.0, 0.0, 2.0], np.float32))
    np.testing.assert_allclose(damped(second), np.diag([4.02, 0.02, 2.02]), rtol=1e-5)


def test_what_will_not_do_is_named() -> None:
    delta, second = _case(5)
    start, _ = compress_tensor(np.zeros_like(delta), delta)
    with pytest.raises(ValueError, match=r"shape \(71, 71\); expected \[72, 72\]"):
        fit_matrix(delta, second[1:, 1:], start)
    second[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        fit_matrix(delta, second, start)


def test_a_delta_of_zeros_stays_one() -> None:
    _, second = _case(6)
    nothing = np.zeros((3, 72), np.float32)
    start, _ = compress_tensor(nothing, nothing)
    fit = fit_matrix(nothing, second, start, sweeps=2)
    assert not np.asarray(fit.delta.scale).any() and fit.after == 0
