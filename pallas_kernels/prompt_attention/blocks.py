"""A prompt's attention in plain XLA, by blocks of positions, for devices that have no kernel here.

The scores of a chunk are never there all at once, and positions behind its end are not looked at.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.pages import Pages
from pallas_kernels.prompt_attention import reference

# Positions of a block. One that a query does not see changes no bit of its result.
BLOCK = 128
_MASKED = -1e30


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
) -> tuple[jax.Array, Pages]:
    """As `reference.prompt_attention`; the softmax is carried along (arXiv:2205.14135).

    Args:
      q: float[C, T, K, G, H].
      k: float[C, T, K, H].
      v: likewise.
      pages: the cache; products are of q's dtype, sums and scores float32.
      table: int32[C, J].
      starts: int32[C].
      lengths: int32[C].
      window: positions seen, or None.
    """
    exist, pages = reference.put(k, v, pages, table, starts, lengths, window)
    chunks, size, kv_heads, groups, head = q.shape
    # A block is whole pages, or a part of the one page that a row has.
    page = pages.k.shape[1]
    several = max(1, min(BLOCK // page, table.shape[1]))
    block = min(BLOCK, page) if table.shape[1] == 1 else several * page
    # [C, K, G * T, H]: one product for the queries that share a key.
    wide = jnp.moveaxis(q, 1, 3).reshape(chunks, kv_heads, groups * size, head)
    at = starts[:, None] + jnp.arange(size)
    ends = jnp.max(jnp.where(exist, at + 1, 0), axis=1)

    def add(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, y = carry
        keys = i * block + jnp.arange(block)
        distance = at[:, :, None] - keys
        seen = distance >= 0
        seen = seen if window is None else seen & (distance < window)
        some = jnp.any(seen & exist[..., None], axis=1)
        seen = jnp.tile(seen, (1, groups, 1))[:, None]
        near, values = _block(pages, table, keys, q.dtype)
        scores = jnp.einsum(
            "ckth,cskh->ckts",
            wide,
            near,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(seen, scores * head**-0.5, _MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        # What no query sees may be anything, not a number even.
        added = jnp.einsum(
            "ckts,cskh->ckth",
            weights.astype(q.dtype),
            jnp.where(some[..., None, None], values, 0),
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        fade = jnp.exp(top - higher)
        total = total * fade + jnp.sum(weights, axis=-1)
        return higher, total, y * fade[..., None] + added

    lines = jnp.zeros(wide.shape[:-1], jnp.float32)
    first = (lines + _MASKED, lines, jnp.zeros(wide.shape, jnp.float32))
    _, total, y = jax.lax.fori_loop(0, -(-jnp.max(ends) // block), add, first)
    y = y / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    y = jnp.moveaxis(y.reshape(chunks, kv_heads, groups, size, head), 3, 1)
    return jnp.where(exist[..., None, None, None], y, 0.0).astype(q.dtype), pages


def _block(
    pages: Pages, table: jax.Array, positions: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of some positions of every row, [C, S, K, H] each."""
    count, size = pages.k.shape[:2]
    column = jnp.minimum(positions // size, table.shape[1] - 1)
    page = jnp.clip(table[:, column], 0, count - 1)

    def rows(values: jax.Array, scale: jax.Array | None) -> jax.Array:
        found = values[page, positions % size]
        if scale is not None:
            found = found.astype(jnp.float32) * scale[page, positions % size][..., None]
        return found.astype(dtype)

    return rows(pages.k, pages.k_scale), rows(pages.v, pages.v_scale)
