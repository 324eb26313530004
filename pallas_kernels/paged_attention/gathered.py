"""Attention to pages by a library: they are gathered, jax.nn.dot_product_attention does the rest.

On a GPU that is cuDNN's fused attention, for bfloat16. Without cuDNN at hand, as where programs for
Hopper are compiled on a machine that has none, XLA's own form has the same meaning.

Letters: B rows, T queries, S positions, K kv heads, G query heads a kv head, H head size.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import pages as paging
from pallas_kernels.paged_attention.pages import Pages

Library = Literal["cudnn", "xla"]


def attend(
    q: jax.Array,
    pages: Pages,
    table: jax.Array,
    seen: jax.Array,
    library: Library,
) -> jax.Array:
    """Softmax attention of queries to their rows' pages.

    Args:
      q: float[B, T, K, G, H]; for cuDNN bfloat16.
      pages: the cache, which holds the queries' own positions.
      table: int32[B, J].
      seen: bool[B, T, S], what each query looks at; one that looks at nothing gives anything.
      library: who computes it.

    Returns:
      [B, T, K, G, H] in q's dtype.
    """
    rows, tokens, kv_heads, groups, size = q.shape
    k, v = paging.gather(pages, table, q.dtype)
    # What nobody looks at may be anything, not a number even.
    some = jnp.any(seen, axis=1)[..., None, None]
    k, v = jnp.where(some, k, 0), jnp.where(some, v, 0)
    y = jax.nn.dot_product_attention(
        q.reshape(rows, tokens, kv_heads * groups, size),
        k,
        v,
        mask=seen[:, None],
        implementation=library,
    )
    return y.reshape(q.shape)
