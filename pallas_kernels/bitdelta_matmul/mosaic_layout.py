"""The order of packed signs that the Hopper kernels read, and how a word becomes matrix operands.

A block is 64 output rows by 128 inputs, 1 KB: thread t of a warpgroup holds words 2 t and 2 t + 1.
The bits of a word lie where the left operand of a wgmma wants them, so that one bitwise operation
makes two bfloat16 operands. Only the sign of a bfloat16 is worth +-1; the other bits used toggle an
exponent or a mantissa, and give {0, 2} or {4, 5}. Such an operand is offset + step * sign, with the
same offset and step for all rows of an input. The steps are powers of two and go into two sums; the
offsets are taken off again with one sum per row of x:

    x . s = first + 2 second - correction,    correction = sum over inputs of COEFFICIENT x

Inputs of a block: 64 c + 32 i + 8 q + 2 j + e. Its rows: 16 warp + 8 h + r. The sign of both lies
with thread 32 warp + 4 r + j, in word i, at bit POSITIONS[c][q] - 4 h + 16 e.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 64  # output rows of a block
COLUMNS = 128  # inputs of a block
WORDS = 256  # of 32 bits in a block
# A shard's blocks are filled up to whole multiples of these, so that two warpgroups share a program
# and chunks of inputs have sizes to choose from.
PADDED_ROWS = 128
PADDED_COLUMNS = 256

# Of operands for the first sum and for the second: the bit that is taken from the word, what is
# set beside it, and the coefficient of the correction. Values: -1, 1; 0, 2; 2, 4; 4, 6 with step 1;
# 0, 1; 0, 1; 4, 5; 8, 9 with step 1/2. (Two zeros are in truth 2**-64 and 2**-32.)
POSITIONS = ((15, 14, 7, 6), (13, 12, 5, 4))
FIXED = ((0xBF80, 0x0000, 0x4000, 0x4080), (0x1F80, 0x2F80, 0x4080, 0x4100))
COEFFICIENTS = ((0.0, 1.0, 3.0, 5.0), (1.0, 1.0, 9.0, 17.0))


def padded(size: int, to: int) -> int:
    """The least multiple of `to` that is at least `size`."""
    return -(-size // to) * to


def _bit_positions() -> np.ndarray:
    """uint32[c, q, h, e]: where a bit lies in its word."""
    base = np.array(POSITIONS, np.uint32)[:, :, None, None]
    h, e = np.arange(2, dtype=np.uint32)[:, None], np.arange(2, dtype=np.uint32)
    return base - 4 * h + 16 * e


def to_kernel_order(bits: jax.Array, size: int) -> jax.Array:
    """Reorders packed signs for the kernels, padded to whole blocks. Run once, at load, per shard.

    Args:
      bits: uint8[M, levels, O, ceil(I / 8)], in the order of `packing`.
      size: I.

    Returns:
      uint32[M, levels, H, W, 256]: H = O to multiples of 128, over 64; W = I to multiples of 256,
      over 128.
    """
    variants, levels, outputs, _ = bits.shape
    high, wide = padded(outputs, PADDED_ROWS), padded(size, PADDED_COLUMNS)
    short = wide // 8 - bits.shape[3]
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, high - outputs), (0, short)))
    each = jnp.unpackbits(bits, axis=-1, bitorder="little")
    high, wide = high // ROWS, wide // COLUMNS
    # warp, h, r of a row; c, i, q, j, e of a column
    each = each.reshape(variants, levels, high, 4, 2, 8, wide, 2, 2, 4, 4, 2)
    each = each.transpose(0, 1, 2, 6, 3, 5, 10, 8, 7, 9, 4, 11)
    words = jnp.sum(each.astype(jnp.uint32) << _bit_positions(), axis=(-4, -3, -2, -1))
    return words.astype(jnp.uint32).reshape(variants, levels, high, wide, WORDS)


def from_kernel_order(words: jax.Array, outputs: int, size: int) -> jax.Array:
    """The inverse of `to_kernel_order`: uint8[M, levels, O, ceil(I / 8)]; bits beyond I are 0."""
    variants, levels, high, wide = words.shape[:4]
    words = words.reshape(variants, levels, high, wide, 4, 8, 4, 2, 1, 1, 1, 1)
    each = ((words >> _bit_positions()) & 1).astype(jnp.uint8)
    # back from (warp, r, j, i, c, q, h, e) to (warp, h, r) and (c, i, q, j, e)
    each = each.transpose(0, 1, 2, 4, 10, 5, 3, 8, 7, 9, 6, 11)
    each = each.reshape(variants, levels, high * ROWS, wide * COLUMNS)[:, :, :outputs, :size]
    return jnp.packbits(each, axis=-1, bitorder="little")


def row_signs(words: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers the signs of single output rows: float32[..., 128 W], -1 and +1.

    Args:
      words: uint32[M, H, W, 256], of one level.
      slots: int32[...], which variant.
      rows: int32[...], which output row, of a shape that the slots broadcast to.
    """
    variants, high, wide, _ = words.shape
    words = words.reshape(variants, high, wide, 4, 8, 4, 2)  # warp, r, j, i
    warp, h, r = rows // 16 % 4, rows // 8 % 2, rows % 8
    own = words[slots, rows // ROWS, :, warp, r]  # ..., W, j, i
    positions = jnp.asarray(_bit_positions().transpose(2, 0, 1, 3))[h]  # ..., c, q, e
    each = (own[..., None, None, None] >> positions[..., None, None, None, :, :, :]) & 1
    each = jnp.moveaxis(each, (-5, -4, -3, -2, -1), (-2, -4, -5, -3, -1))  # c, i, q, j, e
    return each.reshape(*rows.shape, wide * COLUMNS).astype(jnp.float32) * 2 - 1


def coefficients(columns: int) -> np.ndarray:
    """float32[columns]: what each input adds to the correction; columns a multiple of 128."""
    pattern = np.broadcast_to(np.array(COEFFICIENTS, np.float32)[:, None, :, None], (2, 2, 4, 8))
    return np.tile(pattern.reshape(COLUMNS), columns // COLUMNS)


def masks() -> np.ndarray:
    """uint32[8, 128]: the bits taken from a word, [4 c + q], once for every thread.

    The kernels load them: a compiler that knew their values would make them again in every turn of
    a loop.
    """
    taken = np.uint32(0x10001) << np.array(POSITIONS, np.uint32).reshape(8, 1)
    return np.ascontiguousarray(np.broadcast_to(taken, (8, 128)), np.uint32)


def operands(words: jax.Array, c: int) -> jax.Array:
    """What a block's words stand for in the matrix product, in plain arithmetic.

    Args:
      words: uint32[256], a block.
      c: which half of its 128 inputs; 0 is for the first sum, 1 for the second.

    Returns:
      bfloat16[64, 64].
    """
    words = words.reshape(4, 8, 4, 2)  # warp, r, j, i
    parts = []
    for q in range(4):
        mask = jnp.uint32((1 << POSITIONS[c][q]) * 0x10001)
        for h in range(2):
            taken = (words << (4 * h)) & mask
            parts.append(taken ^ jnp.uint32(FIXED[c][q] * 0x10001))
    pairs = jnp.stack(parts).reshape(4, 2, 4, 8, 4, 2)  # q, h, warp, r, j, i
    pairs = pairs.transpose(2, 1, 3, 5, 0, 4)  # warp, h, r, i, q, j
    halves = [pairs.astype(jnp.uint16), (pairs >> 16).astype(jnp.uint16)]
    values = jnp.stack(halves, axis=-1).reshape(ROWS, 64)
    return jax.lax.bitcast_convert_type(values, jnp.bfloat16)


def signed(words: jax.Array, c: int, magnitude: jax.Array) -> jax.Array:
    """The signs of 64 inputs of a block, each with its row's magnitude.

    Args:
      words: uint32[256], a block.
      c: which half of its 128 inputs.
      magnitude: float[64], of the rows.

    Returns:
      float[64, 64].
    """
    words = words.reshape(4, 8, 4, 2)
    parts = [
        (words >> (POSITIONS[c][q] - 4 * h + 16 * e)) & 1
        for q in range(4)
        for h in range(2)
        for e in range(2)
    ]
    bits = jnp.stack(parts).reshape(4, 2, 2, 4, 8, 4, 2)  # q, h, e, warp, r, j, i
    bits = bits.transpose(3, 1, 4, 6, 0, 5, 2).reshape(ROWS, 64)
    return jnp.where(bits == 1, magnitude[:, None], -magnitude[:, None])
