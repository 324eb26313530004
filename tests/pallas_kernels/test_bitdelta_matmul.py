"""The fused products against float64, row by row, at tiles and sizes that do not divide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitdelta_matmul import reference
from pallas_kernels.packing import pack_signs

# (O, I): one tile, several tiles, an input size that is no multiple of 8, a last tile that overlaps
SHAPES = [(24, 16), (40, 37), (301, 24), (7, 8)]


def case(outputs: int, size: int, variants: int, levels: int, dtype: type = jnp.float32):
    """Random weights, signs [M, levels, O, I] in float64, packed bits, scales."""
    rng = np.random.default_rng(outputs * size + variants)
    w = jnp.asarray(rng.normal(0, 0.05, (outputs, size)), dtype)
    signs = rng.choice([-1.0, 1.0], (variants, levels, outputs, size))
    scale = rng.uniform(0.001, 0.1, (variants, levels, outputs)).astype(np.float32)
    return w, signs, jnp.asarray(pack_signs(signs)), scale


def expected(x, w, signs, scale, slots) -> np.ndarray:
    """x[B, T, I] through each row's own W + sum alpha S, float64."""
    w = np.asarray(w, np.float64)
    rows = []
    for row, slot in zip(np.asarray(x, np.float64), slots, strict=True):
        whole = w if slot < 0 else w + (scale[slot][..., None] * signs[slot]).sum(0)
        rows.append(row @ whole.T)
    return np.stack(rows)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows, so that small shapes take several."""
    monkeypatch.setattr(reference, "TILE_BYTES", 2048)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [1, 2])
def test_rows_of_one_variant(shape: tuple[int, int], levels: int) -> None:
    w, signs, bits, scale = case(*shape, 1, levels)
    x = np.random.default_rng(1).normal(size=(1, 5, shape[1])).astype(np.float32)
    got = jax.jit(reference.bitdelta_matmul)(x, w, bits[0], scale[0])
    np.testing.assert_allclose(got, expected(x, w, signs, scale, [0]), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [1, 2])
def test_rows_of_many_variants(shape: tuple[int, int], levels: int) -> None:
    w, signs, bits, scale = case(*shape, 3, levels)
    slots = [2, -1, 0, 2, 1]
    x = np.random.default_rng(2).normal(size=(5, 1, shape[1])).astype(np.float32)
    got = jax.jit(reference.bitdelta_matmul_mixed)(x, w, bits, scale, np.array(slots, np.int32))
    np.testing.assert_allclose(got, expected(x, w, signs, scale, slots), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_a_bfloat16_base_is_read_exactly() -> None:
    w, signs, bits, scale = case(301, 24, 2, 1, jnp.bfloat16)
    x = np.random.default_rng(3).normal(size=(2, 1, 24)).astype(np.float32)
    want = expected(x, np.asarray(w, np.float32), signs, scale, [1, -1])
    got = reference.bitdelta_matmul_mixed(x, w, bits, scale, jnp.array([1, -1]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    base = reference.base_matmul(jnp.asarray(x), w)
    np.testing.assert_allclose(base, x @ np.asarray(w, np.float32).T, rtol=1e-5, atol=1e-5)


def test_a_slot_out_of_range_is_the_base() -> None:
    w, signs, bits, scale = case(24, 16, 2, 1)
    x = np.ones((3, 1, 16), np.float32)
    got = reference.bitdelta_matmul_mixed(x, w, bits, scale, jnp.array([-1, 2, -7]))
    np.testing.assert_allclose(got, expected(x, w, signs, scale, [-1] * 3), rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_company() -> None:
    w, _, bits, scale = case(301, 40, 3, 1)
    x = np.random.default_rng(4).normal(size=(4, 1, 40)).astype(np.float32)
    run = jax.jit(reference.bitdelta_matmul_mixed)
    whole = np.asarray(run(x, w, bits, scale, np.array([0, 1, 2, -1], np.int32)))
    other = x.copy()
    other[1:] = np.nan
    alone = np.asarray(run(other, w, bits, scale, np.array([0, -1, -1, -1], np.int32)))
    assert np.array_equal(whole[0], alone[0])


def test_a_small_scale_is_not_lost() -> None:
    """The delta term at W ~ N(0, .02), alpha = 2e-5, over a bfloat16 base: at most 2 % off."""
    rng = np.random.default_rng(5)
    w = jnp.asarray(rng.normal(0, 0.02, (256, 512)), jnp.bfloat16)
    signs = rng.choice([-1.0, 1.0], (1, 1, 256, 512))
    bits, scale = jnp.asarray(pack_signs(signs)), np.full((1, 1, 256), 2e-5, np.float32)
    x = rng.normal(size=(1, 64, 512)).astype(np.float32)
    base = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    term = 2e-5 * (np.asarray(x, np.float64) @ signs[0, 0].T)
    one = np.asarray(reference.bitdelta_matmul(x, w, bits[0], scale[0]), np.float64)
    rows = np.repeat(x[0][:, None], 1, axis=1)
    mixed = reference.bitdelta_matmul_mixed(rows, w, bits, scale, jnp.zeros(64, jnp.int32))
    for got in (one[0], np.asarray(mixed, np.float64)[:, 0]):
        assert np.linalg.norm(got - base[0] - term[0]) / np.linalg.norm(term) <= 0.02


def test_embedding_rows() -> None:
    w, signs, bits, scale = case(31, 20, 3, 2)
    ids, slots = np.array([[0, 30], [5, 5], [7, 8]]), np.array([1, -1, 2], np.int32)
    got = np.asarray(jax.jit(reference.bitdelta_embed)(ids, w, bits, scale, slots))
    for b, slot in enumerate(slots):
        whole = np.asarray(w, np.float64)
        if slot >= 0:
            whole = whole + (scale[slot][..., None] * signs[slot]).sum(0)
        np.testing.assert_allclose(got[b], whole[ids[b]], rtol=1e-6, atol=1e-6)
