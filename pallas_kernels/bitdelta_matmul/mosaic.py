"""The fused products on Hopper, over a bank in the kernels' order.

Up to 64 rows go through the decode kernel (`mosaic_rows`), more through the prefill kernel
(`mosaic_tiles`). x is multiplied in bfloat16; sums are float32. Every call that is sharded has to
sit inside `shard_map`, with the bank sharded like its weight: `to_kernel_order` runs there too, so
that each shard is padded by itself.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.bitdelta_matmul import mosaic_plan, mosaic_rows, mosaic_tiles
from pallas_kernels.bitdelta_matmul.bank import KernelBank
from pallas_kernels.bitdelta_matmul.mosaic_plan import MOST_ROWS, Plan

__all__ = ["KernelBank", "Plan", "from_kernel_order", "to_kernel_order"]

# A scale of so many spacings of the weight survives being added to it in bfloat16.
SPACINGS = 4
# Rows of a tile when several prompts share a call: what is lost at their ends is half a tile each.
SEGMENT_ROWS = 128


def to_kernel_order(bits: jax.Array, scale: jax.Array, w: jax.Array) -> KernelBank:
    """Makes a bank, or a single variant of one, on the device. Run once, at load, per shard.

    Args:
      bits: uint8[M, levels, O, ceil(I / 8)], in the order of `packing`.
      scale: float32[M, levels, O].
      w: bfloat16[O, I], the shard's weight without padding.
    """
    words = layout.to_kernel_order(bits, w.shape[1])
    return KernelBank(words, scale, may_reconstruct(scale, w))


def from_kernel_order(bank: KernelBank, size: int) -> jax.Array:
    """The signs of a bank in the order of `packing`: uint8[M, levels, O, ceil(I / 8)]."""
    return layout.from_kernel_order(bank.words, bank.scale.shape[-1], size)


def may_reconstruct(scale: jax.Array, w: jax.Array) -> jax.Array:
    """Whether a variant's scales are all large enough beside the weight: bool[M].

    Large enough are 4 spacings of bfloat16 at the root mean square of the weight's row. A row whose
    scale is 0 has nothing to lose.

    Args:
      scale: float32[M, levels, O].
      w: bfloat16[O, I].
    """
    size = jnp.sqrt(jnp.mean(jnp.square(w.astype(jnp.float32)), axis=1))
    _, exponent = jnp.frexp(size)
    spacing = jnp.ldexp(jnp.float32(1), exponent - 8)
    return jnp.all((scale >= SPACINGS * spacing) | (scale == 0), axis=(1, 2))


def bitdelta_matmul(
    x: jax.Array, w: jax.Array, bank: KernelBank, slot: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """x W^T + alpha (x S^T) for rows of one variant: float32[T, O].

    Args:
      x: float[T, I].
      w: bfloat16[O, I].
      bank: from `to_kernel_order`.
      slot: int32[]; one outside 0..M-1 reads as the base.
      interpret: parameters of the interpreter; compiled when not given.
    """
    if x.shape[0] <= MOST_ROWS:
        slots = jnp.broadcast_to(slot, (x.shape[0],))
        planned = plan(slots, bank, one=True)
        return mosaic_rows.rows_matmul(
            x, w, bank.words, bank.scale, planned, one=True, interpret=interpret
        )
    tuning = mosaic_tiles.tiles_tuning(x.shape[0], bank.scale.shape[-1])
    tiles = -(-x.shape[0] // tuning.rows)
    slots = jnp.broadcast_to(jnp.asarray(slot, jnp.int32), (tiles,))
    rows = jnp.pad(x, ((0, tiles * tuning.rows - x.shape[0]), (0, 0)))
    return _tiles(rows, w, bank, slots, tuning, interpret)[: x.shape[0]]


def plan(slots: jax.Array, bank: KernelBank, one: bool = False) -> Plan:
    """Sorts a decode batch of up to 64 rows, once for all weights that have as many levels.

    Args:
      slots: int32[B]; one outside 0..M-1 reads as the base.
      bank: any weight's.
      one: whether all rows have one slot.
    """
    return mosaic_plan.plan(slots, bank.words.shape[0], bank.words.shape[1], one)


def bitdelta_matmul_mixed(
    x: jax.Array,
    w: jax.Array,
    bank: KernelBank,
    slots: jax.Array,
    *,
    planned: Plan | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x W^T plus each row's own alpha (x S^T), rows in any order: float32[B, O].

    Args:
      x: float[B, I].
      w: bfloat16[O, I].
      bank: from `to_kernel_order`.
      slots: int32[B]; one outside 0..M-1 reads as the base.
      planned: `plan` of the slots, for up to 64 rows; made here when not given.
      interpret: parameters of the interpreter; compiled when not given.
    """
    # Sorted first, so that a variant's rows fall into few of the calls.
    order = jnp.argsort(slots) if x.shape[0] > MOST_ROWS else None
    parts = []
    for at in range(0, x.shape[0], MOST_ROWS):
        own = slice(at, at + MOST_ROWS) if order is None else order[at : at + MOST_ROWS]
        of_part = plan(slots[own], bank) if planned is None else planned
        parts.append(
            mosaic_rows.rows_matmul(x[own], w, bank.words, bank.scale, of_part, interpret=interpret)
        )
    return parts[0] if order is None else jnp.concatenate(parts)[jnp.argsort(order)]


def bitdelta_matmul_segments(
    x: jax.Array,
    w: jax.Array,
    bank: KernelBank,
    slots: jax.Array,
    ends: jax.Array,
    *,
    interpret: Any = None,
) -> jax.Array:
    """The product of several prompts' rows, one after the other: float32[T, O].

    Each segment is moved to where a tile begins, so at most one tile a segment is partly empty.

    Args:
      x: float[T, I].
      w: bfloat16[O, I].
      bank: from `to_kernel_order`.
      slots: int32[S]; one outside 0..M-1 reads as the base.
      ends: int32[S], ascending; rows from one end to the next are the next segment's. Rows beyond
        the last end read as the base.
      interpret: parameters of the interpreter; compiled when not given.
    """
    rows, segments = x.shape[0], slots.shape[0]
    tile = SEGMENT_ROWS if rows > SEGMENT_ROWS // 2 else SEGMENT_ROWS // 2
    # The rows beyond the last end are one segment more.
    slots = jnp.append(slots.astype(jnp.int32), -1)
    ends = jnp.append(jnp.minimum(ends, rows), rows).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tiles = -(-(ends - starts) // tile)
    last_tile = jnp.cumsum(tiles)
    count = -(-rows // tile) + segments
    of_row = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    at = (last_tile - tiles)[of_row] * tile + jnp.arange(rows) - starts[of_row]
    of_tile = jnp.searchsorted(last_tile, jnp.arange(count), side="right")
    # Gathered: the empty array of a scatter would be kept for all layers of a model at once.
    place = jnp.arange(count * tile)
    own = jnp.minimum(of_tile, segments)[place // tile]
    source = starts[own] + place - (last_tile - tiles)[own] * tile
    inside = (of_tile[place // tile] <= segments) & (source < ends[own])
    moved = x.astype(jnp.bfloat16)[jnp.where(inside, source, 0)]
    moved = jnp.where(inside[:, None], moved, 0)
    tile_slots = jnp.where(of_tile <= segments, slots[jnp.minimum(of_tile, segments)], -1)
    tuning = mosaic_tiles.TilesTuning(tile, stages=3)
    return _tiles(moved, w, bank, tile_slots, tuning, interpret)[at]


def bitdelta_embed(ids: jax.Array, w: jax.Array, bank: KernelBank, slots: jax.Array) -> jax.Array:
    """Rows of an embedding with each batch row's variant added: float32[B, T, D].

    A gather of a few kB; XLA does it.

    Args:
      ids: int32[B, T], rows of w.
      w: bfloat16[V, D].
      bank: from `to_kernel_order`.
      slots: int32[B]; one outside 0..M-1 reads as the base.
    """
    size = w.shape[1]
    valid = (slots >= 0) & (slots < bank.words.shape[0])
    index = jnp.where(valid, slots, 0)[:, None]
    y = w[ids].astype(jnp.float32)
    for level in range(bank.words.shape[1]):
        signs = layout.row_signs(bank.words[:, level], index, ids)[..., :size]
        alpha = jnp.where(valid[:, None], bank.scale[index, level, ids], 0.0)
        y += alpha[..., None] * signs
    return y


def _tiles(
    x: jax.Array,
    w: jax.Array,
    bank: KernelBank,
    slots: jax.Array,
    tuning: mosaic_tiles.TilesTuning,
    interpret: Any,
) -> jax.Array:
    """The prefill product; reconstructs when every tile's variant allows it."""
    valid = (slots >= 0) & (slots < bank.reconstruct.shape[0])
    allowed = jnp.all(~valid | bank.reconstruct[jnp.where(valid, slots, 0)])

    def product(reconstruct: bool) -> Any:
        return lambda: mosaic_tiles.tiles_matmul(
            x,
            w,
            bank.words,
            bank.scale,
            slots,
            reconstruct=reconstruct,
            tuning=tuning,
            interpret=interpret,
        )

    return jax.lax.cond(allowed, product(True), product(False))
