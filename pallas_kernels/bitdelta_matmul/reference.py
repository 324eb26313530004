"""What the fused products mean, in plain jax.numpy, tile by tile over output rows.

The two products x W^T and x S^T are kept apart in float32 and only then added, since W + alpha S
rounded to bfloat16 loses a small alpha. Nothing of the size of a weight is made: a tile of
output rows is converted or unpacked at a time, backwards too.

Letters: B rows, T tokens, I in, O out, M resident variants; a weight is W[O, I].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.bitdelta_matmul.bank import SignBank
from pallas_kernels.packing import unpack_signs

# A tile's unpacked signs, or its converted weights, take at most about this many bytes.
TILE_BYTES = 1 << 20

# Cuts a tile's output rows out of an array, along the axis that counts them.
Cut = Callable[[jax.Array, int], jax.Array]


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[..., I] . w[O, I] -> float32[..., O], the weight converted to x's dtype."""
    return jax.lax.dot_general(
        x,
        w.astype(x.dtype),
        (((x.ndim - 1,), (w.ndim - 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _tile_size(outputs: int, row_bytes: int) -> int:
    return max(1, min(outputs, TILE_BYTES // max(1, row_bytes)))


def over_tiles(
    tile: Callable[[Cut], jax.Array], outputs: int, row_bytes: int, shape: tuple[int, ...]
) -> jax.Array:
    """Fills float32[*shape, outputs] tile by tile over its last axis.

    Args:
      tile: called with ``rows(array, axis)``, which cuts the tile's output rows out of an array;
        returns float32[*shape, tile].
      outputs: O.
      row_bytes: temporary bytes that one output row costs.
      shape: leading dimensions of the result.
    """
    size = _tile_size(outputs, row_bytes)
    if size >= outputs:
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


def _resident(slots: jax.Array, bank: SignBank) -> tuple[jax.Array, jax.Array]:
    """Which rows have a variant, and a slot that exists for every row."""
    valid = (slots >= 0) & (slots < bank.bits.shape[0])
    return valid, jnp.where(valid, slots, 0)


def bitdelta_matmul(x: jax.Array, w: jax.Array, bank: SignBank, slot: jax.Array) -> jax.Array:
    """Product of rows that all belong to one variant, whose signs are unpacked once for all.

    Args:
      x: float[T, I].
      w: float[O, I].
      bank: signs and scales.
      slot: int32[], the rows' variant; one outside 0..M-1 reads as the base.

    Returns:
      float32[T, O].
    """
    outputs, size = w.shape
    valid, index = _resident(slot, bank)
    bits, scale = bank.bits[index], jnp.where(valid, bank.scale[index], 0.0)

    def tile(rows: Cut) -> jax.Array:
        y = dot(x, rows(w, 0))
        tile_bits, tile_scale = rows(bits, 1), rows(scale, 1)
        for level in range(bits.shape[0]):
            signs = unpack_signs(tile_bits[level], size, x.dtype)
            y += tile_scale[level] * dot(x, signs)
        return y

    return over_tiles(tile, outputs, 2 * size * x.dtype.itemsize, x.shape[:-1])


def bitdelta_matmul_mixed(
    x: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array
) -> jax.Array:
    """Product of rows that each belong to a variant of their own.

    A row's result does not depend on the other rows' values or slots.

    Args:
      x: float[B, I].
      w: float[O, I].
      bank: signs and scales.
      slots: int32[B], a row's variant; one outside 0..M-1 reads as the base.

    Returns:
      float32[B, O].
    """
    (outputs, size), batch = w.shape, x.shape[0]
    valid, index = _resident(slots, bank)

    def tile(rows: Cut) -> jax.Array:
        y = dot(x, rows(w, 0))
        tile_bits, tile_scale = rows(bank.bits, 2), rows(bank.scale, 2)
        for level in range(bank.bits.shape[1]):
            signs = unpack_signs(tile_bits[index, level], size, x.dtype)
            alpha = jnp.where(valid[:, None], tile_scale[index, level], 0.0)
            y += alpha * jnp.einsum(
                "bi,boi->bo",
                x,
                signs,
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
        return y

    row_bytes = (batch + 1) * size * x.dtype.itemsize
    return over_tiles(tile, outputs, row_bytes, x.shape[:-1])


def row_slots(slots: jax.Array, ends: jax.Array, rows: int) -> jax.Array:
    """The slot of each row of segments that lie one after the other.

    Args:
      slots: int32[S], a segment's variant.
      ends: int32[S], the row after a segment's last one; rising.
      rows: T; rows behind the last segment belong to the base.

    Returns:
      int32[T].
    """
    segment = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    return jnp.append(slots, -1)[jnp.minimum(segment, slots.shape[0])]


def bitdelta_matmul_segments(
    x: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array, ends: jax.Array
) -> jax.Array:
    """Product of several prompts' rows, each segment of them of one variant.

    Args:
      x: float[T, I].
      w: float[O, I].
      bank: signs and scales.
      slots: int32[S], a segment's variant; one outside 0..M-1 reads as the base.
      ends: int32[S], see `row_slots`.

    Returns:
      float32[T, O].
    """
    (outputs, size), rows = w.shape, x.shape[0]
    valid, index = _resident(slots, bank)
    segment = jnp.searchsorted(ends, jnp.arange(rows), side="right")

    def tile(cut: Cut) -> jax.Array:
        tile_bits, tile_scale = cut(bank.bits, 2), cut(bank.scale, 2)

        def add(s: jax.Array, y: jax.Array) -> jax.Array:
            mine = ((segment == s) & valid[s])[:, None]
            for level in range(bank.bits.shape[1]):
                signs = unpack_signs(tile_bits[index[s], level], size, x.dtype)
                y += jnp.where(mine, tile_scale[index[s], level] * dot(x, signs), 0.0)
            return y

        return jax.lax.fori_loop(0, slots.shape[0], add, dot(x, cut(w, 0)))

    return over_tiles(tile, outputs, 2 * size * x.dtype.itemsize, x.shape[:-1])


def base_backward(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of `base_matmul`'s x[R, I] and w[O, I], in their dtypes, from g float32[R, O]."""
    dx = jnp.zeros(x.shape, jnp.float32)
    size = _tile_size(w.shape[0], w.shape[1] * 4)
    for start in range(0, w.shape[0], size):
        dx += dot(g[:, start : start + size], w[start : start + size].astype(jnp.float32).T)
    return dx.astype(x.dtype), dot(g.T, x.astype(jnp.float32).T).astype(w.dtype)


def bitdelta_backward(
    x: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of x, w and the scales, variant by variant and a tile of signs at a time.

    Args:
      x: float[R, I].
      w: float[O, I].
      bank: signs and scales.
      slots: int32[R], each row's.
      g: float32[R, O].

    Returns:
      of x's and w's shapes and dtypes, and float32[M, levels, O].
    """
    dx, dw = base_backward(x, w, g)
    wide, inputs = x.astype(jnp.float32), w.shape[1]
    outputs, size = w.shape[0], _tile_size(w.shape[0], w.shape[1] * 4)
    parts = -(-outputs // size)
    fill = parts * size - outputs
    bits = jnp.pad(bank.bits, ((0, 0), (0, 0), (0, fill), (0, 0)))
    scale, g = jnp.pad(bank.scale, ((0, 0), (0, 0), (0, fill))), jnp.pad(g, ((0, 0), (0, fill)))

    def step(dx: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        m, level, start = at // parts // bits.shape[1], at // parts % bits.shape[1], at % parts
        start *= size
        signs = unpack_signs(
            jax.lax.dynamic_slice_in_dim(bits[m, level], start, size), inputs, jnp.float32
        )
        mine = jnp.where(
            (slots == m)[:, None], jax.lax.dynamic_slice_in_dim(g, start, size, 1), 0.0
        )
        alpha = jax.lax.dynamic_slice_in_dim(scale[m, level], start, size)
        # Rows of other variants may not be finite: what they are is left out, not multiplied.
        rows = jnp.where((slots == m)[:, None], wide, 0.0)
        return dx + dot(mine * alpha, signs.T), jnp.sum(mine * dot(rows, signs), axis=0)

    count = bits.shape[0] * bits.shape[1] * parts
    dx, dscale = jax.lax.scan(step, dx.astype(jnp.float32), jnp.arange(count))
    dscale = dscale.reshape(*bits.shape[:2], parts * size)[..., :outputs]
    return dx.astype(x.dtype), dw, dscale


def bitdelta_embed(ids: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array) -> jax.Array:
    """Rows of an embedding with each batch row's variant added.

    Args:
      ids: int32[B, T], rows of w, 0..V-1.
      w: float[V, D].
      bank: signs and scales.
      slots: int32[B]; one outside 0..M-1 reads as the base.

    Returns:
      float32[B, T, D].
    """
    valid, index = _resident(slots, bank)
    index = index[:, None]
    y = w[ids].astype(jnp.float32)
    for level in range(bank.bits.shape[1]):
        signs = unpack_signs(bank.bits[index, level, ids], w.shape[1], jnp.float32)
        alpha = jnp.where(valid[:, None], bank.scale[index, level, ids], 0.0)
        y += alpha[..., None] * signs
    return y
