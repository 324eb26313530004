"""Rotary embedding and grouped-query attention, in float32 sums.

Letters: B batch, C chunks, T query, S cache, K kv heads, G query heads a kv head, H head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels.prompt_attention.ops import prompt_attention
from zen_jax.config import Llama3Rope, ModelConfig
from zen_jax.kv_cache import ChunkRows, LayerCache
from zen_jax.sharding import Placement

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


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns [B, T, ..., H] by the angles of its positions; pairs are (i, i + H / 2)."""
    cos, sin = (a.reshape(*a.shape[:2], *(1,) * (x.ndim - 3), a.shape[-1]) for a in angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


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
    q: jax.Array,
    cache: LayerCache,
    where: ChunkRows,
    starts: jax.Array,
    window: int | None,
    placement: Placement | None = None,
) -> jax.Array:
    """Softmax attention of chunks of prompts, each to its own row of a cache that holds it already.

    Args:
      q: [C, T, K, G, H].
      cache: [B, S, K, H].
      where: the chunks' rows and lengths.
      starts: int32[C], the position of each chunk's first query.
      window: as in `visible`.
      placement: the mesh, or None for one device.

    Returns:
      [C, T, K, G, H] in q's dtype; scores and sums in float32. It depends neither on how a prompt
      is cut nor on the other chunks.
    """

    def attend(q: Any, k: Any, v: Any, where: ChunkRows, starts: Any) -> jax.Array:
        return prompt_attention(q, k, v, where.rows, starts, where.lengths, window)

    if placement is None:
        return attend(q, cache.k, cache.v, where, starts)
    heads = placement.mesh_axis("kv_heads")
    lines, rest = PartitionSpec(None, None, heads), PartitionSpec()
    return jax.shard_map(
        attend,
        mesh=placement.mesh,
        in_specs=(lines, lines, lines, rest, rest),
        out_specs=lines,
        check_vma=False,
    )(q, cache.k, cache.v, where, starts)
