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


def write_token(cache: LayerCache, k: jax.Array, v: jax.Array, at: jax.Array) -> LayerCache:
    """Writes one token a row.

    Args:
      cache: [B, S, K, H].
      k: [B, 1, K, H].
      v: [B, 1, K, H].
      at: int32[B], each row's position; one outside 0..S-1 writes nothing.
    """
    rows = jnp.arange(at.shape[0])

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows, at].set(new[:, 0].astype(old.dtype), mode="drop")

    return LayerCache(put(cache.k, k), put(cache.v, v))


def write_row(cache: LayerCache, fresh: LayerCache, row: jax.Array) -> LayerCache:
    """Writes a prompt's keys and values, [1, T, K, H] with T <= S, at the start of one row."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (row, 0, 0, 0))

    return LayerCache(put(cache.k, fresh.k), put(cache.v, fresh.v))
