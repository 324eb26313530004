"""The kernels' order of bits: there and back, and what the operands in it stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.packing import pack_signs


def random_signs(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).choice([-1.0, 1.0], shape).astype(np.float32)


@pytest.mark.parametrize("outputs, size", [(128, 256), (70, 300), (1, 9), (130, 3696 // 8)])
def test_there_and_back(outputs: int, size: int) -> None:
    bits = jnp.asarray(pack_signs(random_signs(2, 2, outputs, size)))
    words = layout.to_kernel_order(bits, size)
    high, wide = -(-outputs // 128) * 2, -(-size // 256) * 2
    assert words.shape == (2, 2, high, wide, 256) and words.dtype == jnp.uint32
    assert np.array_equal(layout.from_kernel_order(words, outputs, size), bits)


def test_a_bit_lies_where_the_text_says() -> None:
    """Row 16 warp + 8 h + r, input 64 c + 32 i + 8 q + 2 j + e."""
    signs = -np.ones((1, 1, 128, 256), np.float32)
    warp, h, r, c, i, q, j, e = 2, 1, 5, 1, 1, 3, 2, 1
    signs[0, 0, 64 + 16 * warp + 8 * h + r, 128 + 64 * c + 32 * i + 8 * q + 2 * j + e] = 1
    words = layout.to_kernel_order(jnp.asarray(pack_signs(signs)), 256)
    found = np.argwhere(np.asarray(words))
    assert found.tolist() == [[0, 0, 1, 1, 2 * (32 * warp + 4 * r + j) + i]]
    assert int(words[*found[0]]) == 1 << (layout.POSITIONS[c][q] - 4 * h + 16 * e)


def test_every_bit_of_a_word_is_used_once() -> None:
    places = [p - 4 * h + 16 * e for p in sum(layout.POSITIONS, ()) for h in (0, 1) for e in (0, 1)]
    assert sorted(places) == list(range(32))


def test_operands_are_offset_and_step() -> None:
    """Two sums and a correction give x . s; offsets and steps are what the table says."""
    signs = random_signs(1, 1, 64, 512)
    words = layout.to_kernel_order(jnp.asarray(pack_signs(signs)), 512)
    x = np.random.default_rng(0).normal(1, 1, (5, 512))
    sums = np.zeros((5, 64))
    for block in range(4):
        for c in range(2):
            operands = np.asarray(layout.operands(words[0, 0, 0, block], c), np.float64)
            columns = slice(128 * block + 64 * c, 128 * block + 64 * c + 64)
            sums += (1, 2)[c] * x[:, columns] @ operands.T
            coefficient = layout.coefficients(512)[columns].reshape(2, 4, 8)
            step = (1.0, 0.5)[c]
            want = step * (signs[0, 0, :, columns] + coefficient.reshape(64))
            assert np.array_equal(operands, np.where(want == 0, operands, want))
            assert np.abs(operands[want == 0]).max(initial=0) <= 2.0**-32
    sums -= (x * layout.coefficients(512)).sum(1)[:, None]
    np.testing.assert_allclose(sums, x @ signs[0, 0].T, atol=1e-6)


def test_signed_magnitudes() -> None:
    signs = random_signs(1, 1, 64, 256)
    words = layout.to_kernel_order(jnp.asarray(pack_signs(signs)), 256)
    magnitude = jnp.arange(1.0, 65.0)
    for block in range(2):
        for c in range(2):
            got = layout.signed(words[0, 0, 0, block], c, magnitude)
            columns = slice(128 * block + 64 * c, 128 * block + 64 * c + 64)
            assert np.array_equal(got, magnitude[:, None] * signs[0, 0, :, columns])


def test_reordering_holds_little_at_once() -> None:
    """At load, on the device: a weight of 8 MB of bits, in some tens of its size."""
    bits = jax.ShapeDtypeStruct((1, 1, 8192, 1024), jnp.uint8)
    run = jax.jit(layout.to_kernel_order, static_argnums=1).lower(bits, 8192).compile()
    assert run.memory_analysis().temp_size_in_bytes < 40 * 8192 * 1024
