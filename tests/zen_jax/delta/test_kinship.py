"""Figures that tell a fine-tune from weights that have nothing to do with the base."""

import math

import ml_dtypes
import numpy as np
import pytest

from zen_jax.delta import kinship
from zen_jax.delta.kinship import FARTHEST, FEWEST_SIGNS, Kinship, compare, together


def _normal(seed: int, size: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, (256, 128)).astype(np.float32)


def test_known_figures() -> None:
    base = np.array([[3.0, -4.0, 0.0, 5.0], [1.0, -1.0, 1.0, -1.0]], np.float32)
    tuned = base + np.array([[1.0, -1.0, 0.0, 2.0], [-2.0, 0.0, 0.0, 0.0]], np.float32)
    found = compare(base, tuned)
    assert found.distance == pytest.approx(math.sqrt(10 / 54))
    assert found.signs_kept == 7 / 8  # one fell through 0
    assert found.zeros == 4 / 8
    assert found.scale_over_base == pytest.approx(6 / 8 / math.sqrt(54 / 8))
    assert found.sign_entropy == 1.0  # two up, two down
    # Row scales are 1 and 1/2: they explain 4 x 1 + 4 x 1/4 of 10.
    assert found.energy_left == pytest.approx(0.5)


def test_a_constant_shift_has_no_entropy() -> None:
    base = _normal(0)
    assert compare(base, base + np.float32(0.25)).sign_entropy == 0.0
    assert compare(base, base + np.float32(0.25)).energy_left == pytest.approx(0, abs=1e-6)


def test_the_base_itself() -> None:
    found = compare(_normal(0), _normal(0))
    assert (found.distance, found.signs_kept, found.zeros) == (0, 1, 1)
    assert found.energy_left == 0 and found.sign_entropy == 1 and not found.unrelated


@pytest.mark.parametrize("size", [0.01, 0.1, 1.0, 10.0])
def test_other_weights_are_unrelated_whatever_their_size(size: float) -> None:
    found = compare(_normal(0), _normal(1, size))
    assert found.distance == pytest.approx(math.sqrt(1 + size**2), rel=0.02)
    assert found.signs_kept == pytest.approx(0.5, abs=0.02)
    assert found.unrelated


def test_shuffled_zeroed_and_turned_weights_are_unrelated() -> None:
    base = _normal(0)
    shuffled = np.random.default_rng(1).permutation(base)
    for other in (shuffled, np.zeros_like(base), -base):
        assert compare(base, other).unrelated


@pytest.mark.parametrize("size", [0.001, 0.1, 0.35])
def test_fine_tunes_are_related(size: float) -> None:
    base = _normal(0)
    assert not compare(base, base + _normal(1, size)).unrelated
    # Larger, smaller or blended weights are still this base's.
    assert not compare(base, base * np.float32(2.5)).unrelated
    assert not compare(base, base * np.float32(0.1)).unrelated
    assert FARTHEST == 0.65 and FEWEST_SIGNS == 0.7


def test_a_base_of_zeros_has_finite_figures() -> None:
    zeros = np.zeros((4, 8), np.float32)
    found = compare(zeros, zeros + np.float32(0.5))
    assert found.distance == found.scale_over_base == 1e9
    assert all(math.isfinite(value) for value in found.report().values())


def test_several_matrices_are_figured_as_one() -> None:
    base, tuned = _normal(0), _normal(0) + _normal(1, 0.1)
    tuned[:64] = base[:64]
    parts = [compare(base[:64], tuned[:64]), compare(base[64:], tuned[64:])]
    whole, joined = compare(base, tuned), together(parts)
    for name in ("distance", "signs_kept", "zeros", "sign_entropy", "energy_left"):
        assert getattr(joined, name) == pytest.approx(getattr(whole, name), rel=1e-6), name
    assert joined.elements == base.size
    with pytest.raises(ValueError, match="no matrices"):
        together([])


def test_a_sample_tells_as_much(monkeypatch) -> None:
    base, tuned = _normal(0), _normal(0) + _normal(1, 0.1)
    whole = compare(base, tuned)
    monkeypatch.setattr(kinship, "_SAMPLE", base.size // 8)
    part = compare(base, tuned)
    assert part.elements == whole.elements and part != whole
    assert part.distance == pytest.approx(whole.distance, rel=0.05)


def test_what_is_not_finite_is_refused() -> None:
    base = _normal(0).astype(ml_dtypes.bfloat16)
    tuned = base.copy()
    tuned[3, 4] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        compare(base, tuned)


def test_figures_read_as_a_line() -> None:
    assert str(Kinship(8, 1.0, 4.0, 1.0, 2.0, 0.25, 0.5, 0.5)) == (
        "difference over base 2.000, signs kept 50.0%, scale over base 1.00e+00, "
        "differences of 0 25.0%, entropy of signs 1.000 bits, energy left 50.0%"
    )
