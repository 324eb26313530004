"""A prompt's attention in plain XLA, by blocks of positions, for devices that have no kernel here.

The scores of a chunk are never there all at once, and positions behind its end are not looked at.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.prompt_attention import reference

# Positions of a block. One that a query does not see changes no bit of its result.
BLOCK = 128
_MASKED = -1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """As `reference.prompt_attention`; the softmax is carried along (arXiv:2205.14135).

    Args:
      q: float[C, T, K, G, H].
      k: float[B, S, K, H]; products are of q's dtype, sums and scores float32.
      v: likewise.
      rows: int32[C].
      starts: int32[C].
      lengths: int32[C].
      window: positions seen, or None.
    """
    chunks, size, kv_heads, groups, head = q.shape
    positions = k.shape[1]
    block = min(BLOCK, positions)
    # [C, K, G * T, H]: one product for the queries that share a key.
    wide = jnp.moveaxis(q, 1, 3).reshape(chunks, kv_heads, groups * size, head)
    at = starts[:, None] + jnp.arange(size)
    exists = (rows >= 0) & (rows < k.shape[0]) & (starts >= 0)
    ends = jnp.where(exists, jnp.minimum(starts + lengths, positions), 0)

    def add(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, y = carry
        # The last block may overlap the one before it, and leaves out what that had.
        start = jnp.minimum(i * block, positions - block)
        keys = start + jnp.arange(block)
        distance = at[:, :, None] - keys
        seen = (distance >= 0) & (keys >= i * block)
        seen = seen if window is None else seen & (distance < window)
        seen = jnp.tile(seen, (1, groups, 1))[:, None]
        scores = jnp.einsum(
            "ckth,cskh->ckts",
            wide,
            _rows(k, rows, start, block).astype(q.dtype),
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(seen, scores * head**-0.5, _MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        # What no query sees may be anything, not a number even.
        values = _rows(v, rows, start, block).astype(q.dtype)
        values = jnp.where((keys < ends[:, None])[..., None, None], values, 0)
        added = jnp.einsum(
            "ckts,cskh->ckth",
            weights.astype(q.dtype),
            values,
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
    there = exists[:, None] & (jnp.arange(size) < lengths[:, None])
    return jnp.where(there[..., None, None, None], y, 0.0).astype(q.dtype)


def _rows(values: jax.Array, rows: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """[B, S, K, H] -> so many positions from `start` on of each of the rows, [C, size, K, H]."""
    shape = (1, size, *values.shape[2:])
    corners = [(rows[c], start, 0, 0) for c in range(rows.shape[0])]
    return jnp.concatenate([jax.lax.dynamic_slice(values, c, shape) for c in corners])


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None,
) -> tuple[jax.Array, tuple]:
    saved = (q, k, v, rows, starts, lengths)
    return prompt_attention(*saved, window), saved


def _backward(window: int | None, saved: tuple, g: jax.Array) -> tuple:
    return reference.backward(saved, window, g)


prompt_attention.defvjp(_forward, _backward)
