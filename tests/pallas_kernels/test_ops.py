"""One body of tests over every implementation of the products, and who is chosen."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_build
from pallas_kernels.bitdelta_matmul import cpu, ops, reference
from pallas_kernels.packing import pack_signs

IMPLEMENTATIONS = ["reference", "cpu", "auto"]
# Rows, tokens of a row, O, I: tails of every kind, several blocks, one input.
SHAPES = [(1, 1, 37, 41), (5, 1, 130, 64), (3, 7, 9, 24), (15, 1, 67, 200), (2, 2, 3, 1)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The kernel is there: a machine that runs the tests has a compiler."""
    assert cpu_build.build("bitdelta_matmul") is not None
    assert cpu.available()


def case(outputs: int, size: int, dtype: str, levels: int = 2):
    """w, signs in float64, packed bits and scales of three variants."""
    rng = np.random.default_rng(outputs * 1000 + size)
    w = jnp.asarray(rng.normal(0, 0.05, (outputs, size)), dtype)
    signs = rng.choice([-1.0, 1.0], (3, levels, outputs, size))
    scale = rng.uniform(0.001, 0.1, (3, levels, outputs)).astype(np.float32)
    return w, signs, jnp.asarray(pack_signs(signs)), jnp.asarray(scale)


def rows_of(batch: int, tokens: int, size: int) -> np.ndarray:
    return np.random.default_rng(batch).normal(0.3, 1, (batch, tokens, size)).astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64(shape, dtype: str, implementation) -> None:
    batch, tokens, outputs, size = shape
    w, signs, bits, scale = case(outputs, size, dtype)
    x, slots = rows_of(batch, tokens, size), np.arange(batch, dtype=np.int32) % 5 - 1  # -1 .. 3
    wide = np.asarray(w.astype(jnp.float32), np.float64)
    want = np.stack(
        [
            row @ (wide if not 0 <= s < 3 else wide + (scale[s][..., None] * signs[s]).sum(0)).T
            for row, s in zip(x.astype(np.float64), slots, strict=True)
        ]
    )
    got = ops.bitdelta_matmul_mixed(x, w, bits, scale, slots, implementation)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    base = ops.base_matmul(jnp.asarray(x), w, implementation)
    np.testing.assert_allclose(base, x.astype(np.float64) @ wide.T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_loops_and_avx512_have_the_same_bits(shape, dtype: str) -> None:
    batch, tokens, outputs, size = shape
    w, _, bits, scale = case(outputs, size, dtype)
    x, slots = rows_of(batch, tokens, size), np.arange(batch, dtype=np.int32) % 4 - 1
    fast = cpu.bitdelta_matmul_mixed(x, w, bits, scale, slots, False)
    plain = cpu.bitdelta_matmul_mixed(x, w, bits, scale, slots, True)
    assert np.array_equal(fast, plain)
    assert np.array_equal(cpu.base_matmul(x, w, False), cpu.base_matmul(x, w, True))


def test_a_row_has_the_same_bits_in_any_company_and_a_nan_stays_in_its_row() -> None:
    w, _, bits, scale = case(130, 72, "bfloat16")
    x = rows_of(7, 1, 72)
    slots = np.array([0, 1, 2, -1, 0, 2, 1], np.int32)
    whole = np.asarray(cpu.bitdelta_matmul_mixed(x, w, bits, scale, slots))
    for row in range(7):
        alone = cpu.bitdelta_matmul_mixed(x[row : row + 1], w, bits, scale, slots[row : row + 1])
        assert np.array_equal(whole[row], np.asarray(alone)[0])
    broken = x.copy()
    broken[3] = np.nan
    got = np.asarray(cpu.bitdelta_matmul_mixed(broken, w, bits, scale, slots))
    assert np.isnan(got[3]).all()
    others = [0, 1, 2, 4, 5, 6]
    assert np.array_equal(got[others], whole[others])


def test_gradients_are_the_references() -> None:
    w, _, bits, scale = case(40, 24, "float32")
    x, slots = jnp.asarray(rows_of(3, 1, 24)), jnp.array([0, -1, 2])

    def loss(implementation):
        def of(x, w, scale):
            y = ops.bitdelta_matmul_mixed(x, w, bits, scale, slots, implementation)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(ops.base_matmul(x, w, implementation)))

        return jax.grad(of, argnums=(0, 1, 2))(x, w, scale)

    for got, want in zip(loss("cpu"), loss("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def programs(rows: int, dtype: str = "float32") -> str:
    """What a product of so many rows is compiled to."""
    w, _, bits, scale = case(16, 8, "bfloat16")
    x, slots = jnp.zeros((rows, 1, 8), dtype), jnp.zeros((rows,), jnp.int32)
    return jax.jit(ops.bitdelta_matmul_mixed).lower(x, w, bits, scale, slots).as_text()


def test_few_rows_take_the_kernel_and_many_do_not() -> None:
    assert "zen_bitdelta_matmul" in programs(ops.CPU_ROWS)
    assert "zen_bitdelta_matmul" not in programs(ops.CPU_ROWS + 1)
    assert "zen_bitdelta_matmul" not in programs(2, "bfloat16")


def test_without_the_library_xla_does_it_and_says_so_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpu_build, "library_path", lambda kernel: Path("/nowhere/kernel.so"))
    cpu_build.load.cache_clear()
    cpu.available.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert "zen_bitdelta_matmul" not in programs(3) and "zen" not in programs(2)
    assert caplog.text.count("is not built") == 1
    with pytest.raises(ValueError, match="has to be built"):
        ops.base_matmul(jnp.zeros((1, 1, 8)), jnp.zeros((4, 8)), "cpu")
    monkeypatch.undo()
    cpu_build.load.cache_clear()
    cpu.available.cache_clear()
    assert cpu.available()


def test_bad_choices_are_named() -> None:
    x, w = jnp.zeros((1, 1, 8)), jnp.zeros((4, 8))
    with pytest.raises(ValueError, match="'gpu'"):
        ops.base_matmul(x, w, "gpu")
    with pytest.raises(ValueError, match="no CPU kernel for x bfloat16"):
        ops.base_matmul(x.astype(jnp.bfloat16), w, "cpu")
    with pytest.raises(ValueError, match="'attention'"):
        cpu_build.library_path("attention")


def test_a_library_is_named_by_what_it_is_made_of(monkeypatch, tmp_path: Path) -> None:
    before = cpu_build.library_path("bitdelta_matmul")
    changed = tmp_path / "cpu.cc"
    changed.write_text("int other;")
    monkeypatch.setitem(cpu_build.SOURCES, "bitdelta_matmul", changed)
    monkeypatch.setattr(cpu_build, "ROOT", tmp_path)
    assert cpu_build.library_path("bitdelta_matmul").name != before.name
    assert cpu_build.build("bitdelta_matmul") is not None
    changed.write_text("no C++ at all")
    with pytest.raises(RuntimeError, match="could not build bitdelta_matmul"):
        cpu_build.build("bitdelta_matmul")
    assert [path.suffix for path in (tmp_path / "_build").iterdir()] == [".so"]
    monkeypatch.setattr(cpu_build.shutil, "which", lambda name: None)
    assert cpu_build.build("bitdelta_matmul") is None


def test_reference_is_what_it_was() -> None:
    """The reference is not routed through what it is the measure of."""
    w, _, bits, scale = case(16, 8, "bfloat16")
    text = jax.jit(reference.bitdelta_matmul_mixed).lower(
        jnp.zeros((2, 1, 8)), w, bits, scale, jnp.zeros((2,), jnp.int32)
    )
    assert "zen_" not in text.as_text()
