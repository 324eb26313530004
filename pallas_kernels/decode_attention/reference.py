"""What a decode step does between its products, in plain jax.numpy: the specification.

Letters: B rows, J pages of a row, P positions of a page, S = J P, K kv heads, G query heads a kv
head, H head size, D any size.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import gathered
from pallas_kernels.paged_attention import pages as paging
from pallas_kernels.paged_attention.gathered import Library
from pallas_kernels.paged_attention.pages import Pages

_MASKED = -1e30


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) times a weight (arXiv:1910.07467).

    Args:
      x: float[B, ..., D].
      weight: float32[B or 1, D], each row's own or one for all.
      eps: added to the mean square.

    Returns:
      x's shape and dtype; inside float32.
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    between = (1,) * (x.ndim - 2)
    return (wide * weight.reshape(weight.shape[0], *between, x.shape[-1])).astype(x.dtype)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns heads by the angles of their positions (arXiv:2104.09864).

    Args:
      x: float[*lead, ..., H]; pairs are (i, i + H / 2).
      angles: cosine and sine, float32[*lead, H / 2].

    Returns:
      x's shape and dtype; inside float32.
    """
    between = x.ndim - angles[0].ndim
    cos, sin = (a.reshape(*a.shape[:-1], *(1,) * between, a.shape[-1]) for a in angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def prepare(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, K, G, H] and the key [B, K, H], normed and turned, and the value [B, K, H]."""
    q, key, value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if norms is not None:
        q, key = rms_norm(q, norms[0], eps), rms_norm(key, norms[1], eps)
    return rotate(q, angles), rotate(key, angles), value


def decode_attention(
    qkv: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    window: int | None = None,
    library: Library | None = None,
) -> tuple[jax.Array, Pages]:
    """One token a row: its key and value go into the cache, its queries look at what is there.

    Queries and the key are normed where `norms` are given, then turned. A row sees positions 0 to
    its own, of these the last `window` when given; what lies elsewhere, be it NaN, has no effect. A
    row whose position is outside 0..S-1, or that lacks a page of those that it sees, sees nothing:
    it writes nothing and its result is zero.

    Args:
      qkv: float[B, K, G + 2, H]: a kv head's queries, its key, its value.
      pages: the cache; its keys are turned already.
      table: int32[B, J], each row's pages. Where rows share one, none of them writes to it.
      positions: int32[B], the token's own.
      angles: cosine and sine of `positions`, float32[B, H / 2].
      norms: weights of the RMSNorm of each query and key, float32[B or 1, H].
      eps: of that norm.
      window: how many positions are seen, the token's own counted; None: all.
      library: whose attention it is, see `paged_attention.gathered`; None: plain jax.numpy.

    Returns:
      [B, K, G, H] in qkv's dtype, and the cache with the token. Scores and sums are float32.
    """
    q, key, value = prepare(qkv, angles, norms, eps)
    count, size = pages.k.shape[:2]
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions + 1 - window, 0)
    live = paging.there(table, count, size, first, positions)
    pages = paging.write(
        pages, table, key[:, None], value[:, None], positions[:, None], live[:, None]
    )
    at = jnp.arange(table.shape[1] * size)
    seen = live[:, None] & (at >= first[:, None]) & (at <= positions[:, None])
    if library is None:
        y = _weighted(q, *paging.gather(pages, table, q.dtype), seen)
    else:
        y = gathered.attend(q[:, None], pages, table, seen[:, None], library)[:, 0]
    return jnp.where(live[:, None, None, None], y, 0.0).astype(qkv.dtype), pages


def _weighted(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Softmax attention of q[B, K, G, H] to k and v[B, S, K, H] where seen[B, S] -> float32."""
    scores = jnp.einsum(
        "bkgh,bskh->bkgs",
        q,
        k,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(seen[:, None, None], scores * q.shape[-1] ** -0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    v = jnp.where(seen[..., None, None], v, 0.0)  # 0 times NaN is NaN
    return jnp.einsum(
        "bkgs,bskh->bkgh",
        weights.astype(v.dtype),
        v,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
