"""Keys and values of the tokens seen so far, in pages that rows hold.

Letters: B rows, J pages of a row at most, P positions of a page, C chunks, K kv heads, H head size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.pages import Pages, scaled
from zen_jax.config import ModelConfig
from zen_jax.sharding import Placement

# An array, or where one lies.
Array = Any

# Of keys and values, and without the last of their scales.
KV_AXES = (None, None, "kv_heads")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InPages:
    """Where the tokens of a call belong.

    Attributes:
      table: int32[B, J], each row's pages, or each chunk's; one that is not in the cache is none.
      lengths: int32[C], true tokens of each chunk; None where there is one token a row.
    """

    table: Array
    lengths: Array | None = None


def pages_for(positions: int, size: int) -> int:
    """Pages of `size` positions that hold so many."""
    return -(-positions // size)


def page_bytes(config: ModelConfig, size: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of a page, in all layers together.

    Args:
      config: the model.
      size: P.
      dtype: of keys and values.
    """
    one = config.head_dim * jnp.dtype(dtype).itemsize + (4 if scaled(dtype) else 0)
    return 2 * config.num_layers * size * config.num_kv_heads * one


def own_pages(rows: int, columns: int) -> np.ndarray:
    """A table in which each row has pages of its own, one after the other: int32[B, J]."""
    return np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)


def reach(config: ModelConfig) -> int | None:
    """How many of its last positions a row needs, its newest counted; None: all of them."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None


def make_cache(
    config: ModelConfig,
    pages: int,
    size: int,
    dtype: jax.typing.DTypeLike,
    placement: Placement | None = None,
) -> list[Pages]:
    """An empty cache for every layer.

    Args:
      config: the model.
      pages: N; with as many as rows, and P the most tokens of a row, rows are fixed.
      size: P.
      dtype: of keys and values.
      placement: the mesh, or None for one device; sharded along K where that divides.
    """

    def empty() -> Pages:
        own = Pages.empty(pages, size, config.num_kv_heads, config.head_dim, dtype)
        return own if placement is None else jax.device_put(own, placement.sharding(KV_AXES))

    return [empty() for _ in range(config.num_layers)]
