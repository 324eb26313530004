"""Angles of the rotary embedding, and grouped-query attention, in float32 sums.

Letters: B batch, C chunks, T query, S cache, J pages of a row, K kv heads, G query heads a kv head,
H head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels.decode_attention.ops import decode_attention
from pallas_kernels.paged_attention.pages import Pages
from pallas_kernels.prompt_attention.ops import prompt_attention
from zen_jax.config import Llama3Rope, ModelConfig
from zen_jax.kv_cache import InPages
from zen_jax.sharding import Placement, on_shards

_MASKED = -1e30


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of a head, float32[H / 2], worked out in float64.

    theta**(-2 i / H) (arXiv:2104.09864), stretched where the configuration says so: linear scaling
    divides all; Llama 3's rule divides waves longer than original / low_freq_factor by `factor`,
    leaves those shorter than original / high_freq_factor, and blends between.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-exponent
    rule = config.rope_scaling
    if isinstance(rule, Llama3Rope):
        turns = rule.original_max_position * frequency / (2 * np.pi)
        blend = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        frequency = frequency * (blend + (1 - blend) / rule.factor)
    elif rule is not None:
        frequency = frequency / rule
    return frequency.astype(np.float32)


def rotary_angles(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary embedding's angles.

    Args:
      positions: int32[B, T].
      frequencies: float32[H / 2], of `rotary_frequencies`.

    Returns:
      Two float32[B, T, H / 2].
    """
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def visible(queries: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
    """Which positions a query sees: none after its own, and only the last `window` when given.

    Args:
      queries: int32[B, T], positions.
      keys: int32[B, S] or int32[1, S], positions.
      window: how many positions are seen, the query's own counted; None: all.

    Returns:
      bool[B, T, S].
    """
    distance = queries[:, :, None] - keys[:, None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


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


def attend_rows(
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    cache: Pages,
    where: InPages,
    starts: jax.Array,
    window: int | None,
    placement: Placement | None = None,
) -> tuple[jax.Array, Pages]:
    """Chunks of prompts go into their rows of the cache; each token attends to what is before it.

    Args:
      qkv: [C, T, K, G, H], [C, T, K, H], [C, T, K, H]; queries and keys are turned.
      cache: without the chunks.
      where: the chunks' pages and lengths.
      starts: int32[C], the position of each chunk's first token.
      window: as in `visible`.
      placement: the mesh, or None for one device.

    Returns:
      [C, T, K, G, H] in q's dtype, scores and sums in float32, which depends neither on how a
      prompt is cut nor on the other chunks; and the cache.
    """

    def attend(qkv: Any, cache: Any, where: InPages, starts: Any) -> tuple[jax.Array, Pages]:
        (q, k, v), lengths = qkv, where.lengths
        assert lengths is not None, "chunks have lengths"
        return prompt_attention(q, k, v, cache, where.table, starts, lengths, window)

    heads = None if placement is None else placement.mesh_axis("kv_heads")
    lines, rest = PartitionSpec(None, None, heads), PartitionSpec()
    split = on_shards(attend, placement, (lines, lines, rest, rest), (lines, lines))
    return split(qkv, cache, where, starts)


def attend_token(
    qkv: jax.Array,
    cache: Pages,
    table: jax.Array,
    positions: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    eps: float,
    window: int | None,
    placement: Placement | None = None,
) -> tuple[jax.Array, Pages]:
    """One token a row: normed, turned and written to the cache, to which its queries then attend.

    Args:
      qkv: [B, K, G + 2, H], neither normed nor turned.
      cache: without the token.
      table: int32[B, J], each row's pages.
      positions: int32[B]; a row whose position is outside its pages writes nothing and gives zeros.
      angles: of `rotary_angles`, float32[B, H / 2] each.
      norms: weights of the norms of queries and keys, float32[B or 1, H] each, or None.
      eps: of these norms.
      window: as in `visible`.
      placement: the mesh, or None for one device.

    Returns:
      [B, K, G, H] in qkv's dtype, and the cache with the token. A row does not depend on others.
    """

    def attend(qkv: Any, cache: Any, *rest: Any) -> tuple[jax.Array, Pages]:
        return decode_attention(qkv, cache, *rest, eps=eps, window=window)

    heads = None if placement is None else placement.mesh_axis("kv_heads")
    token, held, rest = (
        PartitionSpec(None, heads),
        PartitionSpec(None, None, heads),
        PartitionSpec(),
    )
    split = on_shards(attend, placement, (token, held, *(rest,) * 4), (token, held))
    return split(qkv, cache, table, positions, angles, norms)
