"""What a prompt's attention means, in plain jax.numpy: all scores of a chunk at once.

Letters: C chunks, T queries, K kv heads, G query heads a kv head, H head size, B rows of the cache,
S positions.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Below every score, and finite: a query without visible positions gives no NaN.
_MASKED = -1e30


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention of chunks of queries, causal.

    Query t of chunk c stands at position starts[c] + t of row rows[c] and sees that position and
    those before it, whose keys and values are in the cache already.

    Args:
      q: float[C, T, K, G, H].
      k: float[B, S, K, H].
      v: likewise.
      rows: int32[C], each chunk's row of the cache; a chunk of another row gives zeros.
      starts: int32[C], the position of its first query.
      lengths: int32[C], queries that exist; those behind them give zeros.
      window: positions that a query sees, its own counted; None: all.

    Returns:
      [C, T, K, G, H] in q's dtype; scores and sums in float32.
    """
    count, tokens = q.shape[:2]
    own = jnp.clip(rows, 0, k.shape[0] - 1)
    at = starts[:, None] + jnp.arange(tokens)
    distance = at[:, :, None] - jnp.arange(k.shape[1])
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    there = (rows >= 0) & (rows < k.shape[0]) & (starts >= 0)
    there = there[:, None] & (jnp.arange(tokens) < lengths[:, None]) & (at < k.shape[1])
    wide = q.astype(jnp.float32)
    scores = jnp.einsum("ctkgh,cskh->ckgts", wide, k[own].astype(jnp.float32), precision="highest")
    scores = jnp.where(seen[:, None, None], scores * q.shape[-1] ** -0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    # What a query does not see may be anything, not a number even: it is left out, not weighted 0.
    last = jnp.max(jnp.where(there, at, -1), axis=1)
    values = jnp.where(
        (jnp.arange(k.shape[1]) <= last[:, None])[..., None, None], v[own].astype(jnp.float32), 0.0
    )
    y = jnp.einsum("ckgts,cskh->ctkgh", weights, values, precision="highest")
    return (
        jnp.where(there[..., None, None, None], y, 0.0).astype(q.dtype).reshape(count, *q.shape[1:])
    )


def backward(case: tuple, window: int | None, g: jax.Array) -> tuple:
    """Cotangents of what `prompt_attention` was called with, from that of its result.

    Args:
      case: q, k, v, rows, starts, lengths.
      window: positions seen, or None.
      g: of the result.
    """
    q, k, v, *where = case

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return prompt_attention(q, k, v, where[0], where[1], where[2], window)

    _, pull = jax.vjp(attend, q, k, v)
    return (*pull(g), *(np.zeros(a.shape, jax.dtypes.float0) for a in where))
