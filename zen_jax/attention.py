"""Rotary embedding and grouped-query attention, in float32 sums.

Letters: B batch, T query, S cache, K kv heads, G query heads a kv head, H head size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.config import Llama3Rope, ModelConfig

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
