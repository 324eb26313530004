"""The bit layout of packed signs, in its one definition.

Signs are packed along the input dimension, eight to a byte, little-endian: bit k of byte j is
input 8 j + k; 1 stands for +1 and 0 for -1. An input size that is no multiple of 8 is padded with
zeros, its true size kept by whoever holds the array. A delta of exactly 0 takes a bit hashed from
its flat index in its tensor, so that many zeros add no bias.
"""

import jax
import jax.numpy as jnp
import numpy as np


def packed_size(size: int) -> int:
    """Bytes that `size` signs take along the input dimension."""
    return -(-size // 8)


def hashed_bits(start: int, count: int) -> np.ndarray:
    """The bits that zeros take: the low bit of splitmix32 of the flat index, bool[count].

    Args:
      start: flat index (row-major) of the first element in its tensor; taken modulo 2**32.
      count: how many elements in a row.
    """
    index = (np.arange(count, dtype=np.uint64) + np.uint64(start)).astype(np.uint32)
    z = index + np.uint32(0x9E3779B9)
    z = (z ^ (z >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    z = (z ^ (z >> np.uint32(15))) * np.uint32(0x735A2D97)
    z = z ^ (z >> np.uint32(15))
    return (z & np.uint32(1)).astype(bool)


def pack_signs(delta: np.ndarray, start: int = 0) -> np.ndarray:
    """Packs the signs of a delta along its last axis.

    Args:
      delta: float[..., I].
      start: flat index of its first element in the tensor it belongs to (when it is a slice).

    Returns:
      uint8[..., ceil(I / 8)].

    Raises:
      ValueError: a delta is NaN, so has no sign.
    """
    delta = np.asarray(delta)
    positive = delta > 0
    zero = delta == 0
    if zero.any():
        bits = hashed_bits(start, delta.size).reshape(delta.shape)
        positive |= zero & bits
    if np.isnan(delta).any():
        raise ValueError("a delta is NaN; expected finite numbers, check the source checkpoints")
    return np.packbits(positive, axis=-1, bitorder="little")


def unpack_signs(bits: jax.Array, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Unpacks signs to -1 and +1: uint8[..., ceil(I / 8)] -> dtype[..., I].

    Args:
      bits: packed signs.
      size: I, the true input size.
      dtype: of the result.
    """
    each = (bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & jnp.uint8(1)
    flat = each.reshape(*bits.shape[:-1], bits.shape[-1] * 8)[..., :size]
    return flat.astype(dtype) * 2 - 1
