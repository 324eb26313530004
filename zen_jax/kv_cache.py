"""Keys and values of the tokens seen so far: one fixed row a request.

Letters: B rows, S positions, K kv heads, H head size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zen_jax.config import ModelConfig
from zen_jax.sharding import Placement

# An array, or where one lies.
Array = Any

KV_AXES = (None, None, "kv_heads", None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys (already turned by rope) and values, [B, S, K, H] each."""

    k: Array
    v: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """Where the chunks of a call belong.

    Attributes:
      rows: int32[C], each chunk's row of the cache; one outside 0..B-1 with length 0 is nobody's.
      lengths: int32[C], true tokens of each chunk.
    """

    rows: Array
    lengths: Array


def make_cache(
    config: ModelConfig,
    rows: int,
    positions: int,
    dtype: jax.typing.DTypeLike,
    placement: Placement | None = None,
) -> list[LayerCache]:
    """An empty cache for every layer.

    Args:
      config: the model.
      rows: B.
      positions: S, the most tokens of a row.
      dtype: of keys and values.
      placement: the mesh, or None for one device; sharded along K where that divides.
    """
    shape = (rows, positions, config.num_kv_heads, config.head_dim)

    def empty() -> jax.Array:
        zeros = jnp.zeros(shape, dtype)
        return zeros if placement is None else jax.device_put(zeros, placement.sharding(KV_AXES))

    return [LayerCache(empty(), empty()) for _ in range(config.num_layers)]


def write_chunks(
    cache: LayerCache, k: jax.Array, v: jax.Array, starts: jax.Array, where: ChunkRows
) -> LayerCache:
    """Writes chunks into their rows, and nothing beside their true tokens.

    Args:
      cache: [B, S, K, H].
      k: [C, T, K, H] with T <= S.
      v: [C, T, K, H].
      starts: int32[C], each chunk's first position.
      where: the rows, no two chunks in one, and the chunks' lengths.
    """
    size, positions = k.shape[1], cache.k.shape[1]
    # What would reach over the end is written as much further ahead, behind what stands there.
    at = jnp.minimum(starts, positions - size)
    behind = starts - at
    place = jnp.arange(size)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        for c in range(new.shape[0]):
            corner = (where.rows[c], at[c], 0, 0)
            there = jax.lax.dynamic_slice(old, corner, (1, *new.shape[1:]))
            moved = jnp.roll(new[c].astype(old.dtype), behind[c], axis=0)
            mine = (place >= behind[c]) & (place < behind[c] + where.lengths[c])
            whole = jnp.where(mine[:, None, None], moved, there)
            old = jax.lax.dynamic_update_slice(old, whole, corner)
        return old

    return LayerCache(put(cache.k, k), put(cache.v, v))
