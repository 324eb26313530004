"""The bit layout: known bytes, round trips, the bits that zeros take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.packing import hashed_bits, pack_signs, packed_size, unpack_signs


def test_known_bytes() -> None:
    row = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9], np.float32)
    assert pack_signs(row).tolist() == [85, 1]


def test_sizes_of_the_specification() -> None:
    assert pack_signs(np.ones((64, 4096), np.float32)).shape == (64, 512)
    assert packed_size(9) == 2


@settings(max_examples=40)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=2, max_side=21),
        elements=st.floats(-3, 3, width=32).filter(lambda v: v != 0),
    )
)
def test_unpacking_gives_the_signs_back(delta: np.ndarray) -> None:
    with jax.disable_jit():  # each example has another shape
        signs = unpack_signs(jnp.asarray(pack_signs(delta)), delta.shape[-1], jnp.float32)
    assert np.array_equal(np.asarray(signs), np.sign(delta))


def splitmix32(index: int) -> int:
    """The generator in plain integers."""
    mask = 0xFFFFFFFF
    z = (index + 0x9E3779B9) & mask
    z = ((z ^ (z >> 16)) * 0x21F0AAAD) & mask
    z = ((z ^ (z >> 15)) * 0x735A2D97) & mask
    return z ^ (z >> 15)


@pytest.mark.parametrize("start", [0, 12345, 2**32 - 3])
def test_zeros_take_hashed_bits(start: int) -> None:
    want = [splitmix32((start + i) & 0xFFFFFFFF) & 1 for i in range(40)]
    assert hashed_bits(start, 40).tolist() == [bool(bit) for bit in want]
    packed = pack_signs(np.zeros((2, 20), np.float32), start)
    bits = np.unpackbits(packed, axis=-1, count=20, bitorder="little")
    assert bits.ravel().tolist() == want


def test_zeros_add_no_bias() -> None:
    assert abs(hashed_bits(0, 1_000_000).mean() - 0.5) < 0.002


def test_zeros_between_signs_keep_the_signs() -> None:
    delta = np.array([[1.0, 0.0, -1.0, 0.0]], np.float32)
    bits = np.unpackbits(pack_signs(delta), axis=-1, count=4, bitorder="little")[0]
    assert bits[0] == 1 and bits[2] == 0


def test_nan_has_no_sign() -> None:
    with pytest.raises(ValueError, match="NaN"):
        pack_signs(np.array([1.0, np.nan], np.float32))
