"""What the fused product means, in plain jax.numpy, tile by tile over output rows.

The two products x W^T and x S^T are kept apart in float32 and only then added, since W + alpha S
rounded to bfloat16 loses a small alpha. Nothing of the size of a weight is made: a tile of
output rows is converted or unpacked at a time.

Letters: B rows, T tokens, I in, O out, M resident variants; a weight is W[O, I], a bank's signs
uint8[M, levels, O, ceil(I / 8)] with scales float32[M, levels, O].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.packing import unpack_signs

# A tile's unpacked signs, or its converted weights, take at most about this many bytes.
TILE_BYTES = 1 << 20


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[..., I] . w[O, I] -> float32[..., O], the weight converted to x's dtype."""
    return jax.lax.dot_general(
        x,
        w.astype(x.dtype),
        (((x.ndim - 1,), (w.ndim - 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def over_tiles(
    tile: Callable[[Callable[[jax.Array, int], jax.Array]], jax.Array],
    outputs: int,
    row_bytes: int,
    shape: tuple[int, ...],
) -> jax.Array:
    """Fills float32[*shape, outputs] tile by tile over its last axis.

    Args:
      tile: called with ``rows(array, axis)``, which cuts the tile's output rows out of an array;
        returns float32[*shape, tile].
      outputs: O.
      row_bytes: temporary bytes that one output row costs.
      shape: leading dimensions of the result.
    """
    size = max(1, min(outputs, TILE_BYTES // max(1, row_bytes)))
    if size == outputs:
        return tile(lambda array, axis: array)

    def step(i: jax.Array, result: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, outputs - size)  # the last tile overlaps its neighbour
        part = tile(lambda a, axis: jax.lax.dynamic_slice_in_dim(a, start, size, axis))
        return jax.lax.dynamic_update_slice_in_dim(result, part, start, result.ndim - 1)

    return jax.lax.fori_loop(
        0, -(-outputs // size), step, jnp.zeros((*shape, outputs), jnp.float32)
    )


def base_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[..., I] W[O, I]^T -> float32[..., O]; a weight of another dtype is converted by tiles."""
    if x.dtype == w.dtype:
        return dot(x, w)
    size = w.shape[-1]
    return over_tiles(
        lambda rows: dot(x, rows(w, 0)), w.shape[0], size * x.dtype.itemsize, x.shape[:-1]
    )


def bitdelta_matmul(x: jax.Array, w: jax.Array, bits: jax.Array, scale: jax.Array) -> jax.Array:
    """Product of rows that all belong to one variant.

    Args:
      x: float[..., I].
      w: float[O, I].
      bits: uint8[levels, O, ceil(I / 8)].
      scale: float32[levels, O].

    Returns:
      float32[..., O].
    """
    outputs, size = w.shape

    def tile(rows: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        y = dot(x, rows(w, 0))
        tile_bits, tile_scale = rows(bits, 1), rows(scale, 1)
        for level in range(bits.shape[0]):
            signs = unpack_signs(tile_bits[level], size, x.dtype)
            y += tile_scale[level] * dot(x, signs)
        return y

    return over_tiles(tile, outputs, 2 * size * x.dtype.itemsize, x.shape[:-1])


def bitdelta_matmul_mixed(
    x: jax.Array, w: jax.Array, bits: jax.Array, scale: jax.Array, slots: jax.Array
) -> jax.Array:
    """Product of rows that each belong to a variant of their own.

    A row's result does not depend on the other rows' values or slots.

    Args:
      x: float[B, T, I].
      w: float[O, I].
      bits: uint8[M, levels, O, ceil(I / 8)].
      scale: float32[M, levels, O].
      slots: int32[B], a row's variant; one outside 0..M-1 reads as the base.

    Returns:
      float32[B, T, O].
    """
    (outputs, size), batch = w.shape, x.shape[0]
    valid = (slots >= 0) & (slots < bits.shape[0])
    index = jnp.where(valid, slots, 0)

    def tile(rows: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        y = dot(x, rows(w, 0))
        tile_bits, tile_scale = rows(bits, 2), rows(scale, 2)
        for level in range(bits.shape[1]):
            signs = unpack_signs(tile_bits[index, level], size, x.dtype)
            alpha = jnp.where(valid[:, None], tile_scale[index, level], 0.0)
            y += alpha[:, None, :] * jnp.einsum(
                "bti,boi->bto",
                x,
                signs,
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
        return y

    row_bytes = (batch + 1) * size * x.dtype.itemsize
    return over_tiles(tile, outputs, row_bytes, x.shape[:-1])


def bitdelta_embed(
    ids: jax.Array, w: jax.Array, bits: jax.Array, scale: jax.Array, slots: jax.Array
) -> jax.Array:
    """Rows of an embedding with each batch row's variant added.

    Args:
      ids: int32[B, T], rows of w.
      w: float[V, D].
      bits: uint8[M, levels, V, ceil(D / 8)].
      scale: float32[M, levels, V].
      slots: int32[B]; one outside 0..M-1 reads as the base.

    Returns:
      float32[B, T, D].
    """
    valid = (slots >= 0) & (slots < bits.shape[0])
    index = jnp.where(valid, slots, 0)[:, None]
    y = w[ids].astype(jnp.float32)
    for level in range(bits.shape[1]):
        signs = unpack_signs(bits[index, level, ids], w.shape[1], jnp.float32)
        alpha = jnp.where(valid[:, None], scale[index, level, ids], 0.0)
        y += alpha[..., None] * signs
    return y
