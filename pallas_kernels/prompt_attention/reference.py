"""What a prompt's attention means, in plain jax.numpy: all scores of a chunk at once.

Letters: C chunks, T tokens, K kv heads, G query heads a kv head, H head size, J pages of a row, P
positions of a page, S = J P.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import gathered
from pallas_kernels.paged_attention import pages as paging
from pallas_kernels.paged_attention.gathered import Library
from pallas_kernels.paged_attention.pages import Pages

# Below every score, and finite: a query without visible positions gives no NaN.
_MASKED = -1e30


def put(
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """Writes chunks into their rows.

    Returns:
      bool[C, T], which tokens exist: none of a chunk that lacks a page; and the cache with them.
    """
    count, size = pages.k.shape[:2]
    at = starts[:, None] + jnp.arange(k.shape[1])
    ends = jnp.minimum(starts + jnp.minimum(lengths, k.shape[1]), table.shape[1] * size)
    first = jnp.zeros_like(starts) if window is None else jnp.maximum(starts + 1 - window, 0)
    whole = (starts >= 0) & (ends > starts)
    whole &= paging.there(table, count, size, first, ends - 1)
    exist = whole[:, None] & (at < ends[:, None])
    return exist, paging.write(pages, table, k, v, at, exist)


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
    library: Library | None = None,
) -> tuple[jax.Array, Pages]:
    """Chunks of keys and values go into the cache, chunks of queries look at what is there, causal.

    Token t of chunk c stands at position starts[c] + t of its row. Its query sees that position and
    those before it, as they are kept in the cache.

    Args:
      q: float[C, T, K, G, H].
      k: float[C, T, K, H], turned already.
      v: likewise.
      pages: the cache.
      table: int32[C, J], the pages of each chunk's row; a chunk that lacks one writes nothing and
        gives zeros. Where rows share one, none of them writes to it.
      starts: int32[C], the position of its first token.
      lengths: int32[C], tokens that exist; those behind them are not written and give zeros.
      window: positions that a query sees, its own counted; None: all.
      library: whose attention it is, see `paged_attention.gathered`; None: plain jax.numpy.

    Returns:
      [C, T, K, G, H] in q's dtype, scores and sums in float32; and the cache.
    """
    exist, pages = put(k, v, pages, table, starts, lengths, window)
    at = starts[:, None] + jnp.arange(q.shape[1])
    distance = at[:, :, None] - jnp.arange(table.shape[1] * pages.k.shape[1])
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if library is not None:
        y = gathered.attend(q, pages, table, seen & exist[..., None], library)
        return jnp.where(exist[..., None, None, None], y, 0.0).astype(q.dtype), pages
    keys, values = paging.gather(pages, table, jnp.float32)
    wide = q.astype(jnp.float32)
    scores = jnp.einsum("ctkgh,cskh->ckgts", wide, keys, precision="highest")
    scores = jnp.where(seen[:, None, None], scores * q.shape[-1] ** -0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    # What a query does not see may be anything, not a number even: it is left out, not weighted 0.
    some = jnp.any(seen & exist[..., None], axis=1)
    values = jnp.where(some[..., None, None], values, 0.0)
    y = jnp.einsum("ckgts,cskh->ctkgh", weights, values, precision="highest")
    return jnp.where(exist[..., None, None, None], y, 0.0).astype(q.dtype), pages
