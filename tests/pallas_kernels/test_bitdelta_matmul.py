"""The fused products against float64, row by row, at tiles and sizes that do not divide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitdelta_matmul import reference
from pallas_kernels.bitdelta_matmul.bank import SignBank
from pallas_kernels.packing import pack_signs

# (O, I): one tile, several tiles, an input size that is no multiple of 8, a last tile that overlaps
SHAPES = [(24, 16), (40, 37), (301, 24), (7, 8)]


def case(outputs: int, size: int, variants: int, levels: int, dtype: type = jnp.float32):
    """Random weights, signs [M, levels, O, I] in float64, and their bank."""
    rng = np.random.default_rng(outputs * size + variants)
    w = jnp.asarray(rng.normal(0, 0.05, (outputs, size)), dtype)
    signs = rng.choice([-1.0, 1.0], (variants, levels, outputs, size))
    scale = rng.uniform(0.001, 0.1, (variants, levels, outputs)).astype(np.float32)
    return w, signs, SignBank(jnp.asarray(pack_signs(signs)), jnp.asarray(scale))


def expected(x, w, signs, bank, slots) -> np.ndarray:
    """x[R, I] through each row's own W + sum alpha S, float64."""
    w, scale = np.asarray(w, np.float64), np.asarray(bank.scale)
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
    w, signs, bank = case(*shape, 1, levels)
    x = np.random.default_rng(1).normal(size=(5, shape[1])).astype(np.float32)
    got = jax.jit(reference.bitdelta_matmul)(x, w, bank, jnp.int32(0))
    np.testing.assert_allclose(got, expected(x, w, signs, bank, [0] * 5), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [1, 2])
def test_rows_of_many_variants(shape: tuple[int, int], levels: int) -> None:
    w, signs, bank = case(*shape, 3, levels)
    slots = [2, -1, 0, 2, 1]
    x = np.random.default_rng(2).normal(size=(5, shape[1])).astype(np.float32)
    got = jax.jit(reference.bitdelta_matmul_mixed)(x, w, bank, np.array(slots, np.int32))
    np.testing.assert_allclose(got, expected(x, w, signs, bank, slots), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_a_bfloat16_base_is_read_exactly() -> None:
    w, signs, bank = case(301, 24, 2, 1, jnp.bfloat16)
    x = np.random.default_rng(3).normal(size=(2, 24)).astype(np.float32)
    want = expected(x, np.asarray(w, np.float32), signs, bank, [1, -1])
    got = reference.bitdelta_matmul_mixed(x, w, bank, jnp.array([1, -1]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    base = reference.base_matmul(jnp.asarray(x), w)
    np.testing.assert_allclose(base, x @ np.asarray(w, np.float32).T, rtol=1e-5, atol=1e-5)


def test_a_slot_out_of_range_is_the_base() -> None:
    w, signs, bank = case(24, 16, 2, 1)
    x = np.ones((3, 16), np.float32)
    got = reference.bitdelta_matmul_mixed(x, w, bank, jnp.array([-1, 2, -7]))
    np.testing.assert_allclose(got, expected(x, w, signs, bank, [-1] * 3), rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_company() -> None:
    w, _, bank = case(301, 40, 3, 1)
    x = np.random.default_rng(4).normal(size=(4, 40)).astype(np.float32)
    run = jax.jit(reference.bitdelta_matmul_mixed)
    whole = np.asarray(run(x, w, bank, np.array([0, 1, 2, -1], np.int32)))
    other = x.copy()
    other[1:] = np.nan
    alone = np.asarray(run(other, w, bank, np.array([0, -1, -1, -1], np.int32)))
    assert np.array_equal(whole[0], alone[0])


@pytest.mark.usefixtures("small_tiles")
def test_segments_are_each_of_their_variant() -> None:
    w, signs, bank = case(301, 24, 3, 2)
    x = np.random.default_rng(6).normal(size=(9, 24)).astype(np.float32)
    slots, ends = jnp.array([2, -1, 0, 5]), jnp.array([2, 3, 3, 7])  # the third is empty
    got = jax.jit(reference.bitdelta_matmul_segments)(x, w, bank, slots, ends)
    want = expected(x, w, signs, bank, [2, 2, -1, -1, -1, -1, -1, -1, -1])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    rows = reference.row_slots(slots, ends, 9)
    assert np.array_equal(rows, [2, 2, -1, 5, 5, 5, 5, -1, -1])


def test_embedding_rows() -> None:
    w, signs, bank = case(31, 20, 3, 2)
    ids, slots = np.array([[0, 30], [5, 5], [7, 8]]), np.array([1, -1, 2], np.int32)
    got = np.asarray(jax.jit(reference.bitdelta_embed)(ids, w, bank, slots))
    for b, slot in enumerate(slots):
        whole = np.asarray(w, np.float64)
        if slot >= 0:
            whole = whole + (np.asarray(bank.scale)[slot][..., None] * signs[slot]).sum(0)
        np.testing.assert_allclose(got[b], whole[ids[b]], rtol=1e-6, atol=1e-6)
