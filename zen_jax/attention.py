"""Rotary embedding and grouped-query attention, in float32 sums.

Letters: B batch, T query, S cache, K kv heads, G query heads a kv head, H head size.
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary embedding (arXiv:2104.09864, halves layout).

    Args:
      positions: int32[B, T].
      head_dim: H.
      theta: base of the frequencies theta**(-2 i / H).

    Returns:
      Two float32[B, T, 1, H / 2].
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns [B, T, heads, H] by the angles of its positions; pairs are (i, i + H / 2)."""
    cos, sin = angles
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of grouped queries.

    Args:
      q: [B, T, K, G, H].
      k: [B, S, K, H].
      v: [B, S, K, H].
      mask: bool[B, T, S], true where a query may look.

    Returns:
      [B, T, K, G, H] in q's dtype; scores and sums in float32.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    y = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return y.astype(q.dtype)
