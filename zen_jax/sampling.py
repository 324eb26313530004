"""How the next token is chosen: what a request asks for, and the choice itself, on the device.

Order as in vLLM: temperature, then top_k, then top_p, then one draw (by Gumbel noise). A row's
noise depends on its seed and position alone, so a request gives the same tokens in any batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# An array on host or device, or where one lies.
Array = Any

_OFF = -jnp.inf


class InvalidSampling(ValueError):
    """A sampling field is out of range; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request asks for.

    Attributes:
      max_tokens: the most tokens to generate, at least 1.
      temperature: 0 is greedy; at most 100.
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the least set of likeliest tokens whose probability reaches this, in (0, 1].
      seed: 0 to 2**64 - 1; None lets the server choose one.
      stop_token_ids: end after one of these, beside the model's own end tokens.
      ignore_eos: go on after the model's own end tokens.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self, vocab_size: int | None = None) -> None:
        """Checks every field.

        Args:
          vocab_size: V, to check stop tokens against.

        Raises:
          InvalidSampling: naming the field, its value and what was expected.
        """
        checks = (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 (greedy) and 100"),
            ("top_k", self.top_k >= -1, "1 or more, or 0 or -1 to keep all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1"),
            (
                "stop_token_ids",
                all(0 <= t < (vocab_size or 2**31) for t in self.stop_token_ids),
                f"token ids between 0 and {(vocab_size or 2**31) - 1}",
            ),
        )
        for field, good, expected in checks:
            if not good:
                raise InvalidSampling(field, f"is {getattr(self, field)}; expected {expected}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """Sampling settings of B rows on the device.

    Attributes:
      temperature: float32[B], 0 is greedy.
      top_k: int32[B], 0 keeps all.
      top_p: float32[B], 1 keeps all.
      key: uint32[B, 2], key data made of the seed (threefry).
    """

    temperature: Array
    top_k: Array
    top_p: Array
    key: Array

    @classmethod
    def empty(cls, rows: int) -> "RowSampling":
        """Greedy settings for B rows."""
        return cls(
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows,), jnp.int32),
            jnp.ones((rows,), jnp.float32),
            jnp.zeros((rows, 2), jnp.uint32),
        )

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> "RowSampling":
        """One row's settings as NumPy arrays.

        Args:
          params: validated.
          seed: 0 to 2**64 - 1.
        """
        return cls(
            np.array([params.temperature], np.float32),
            np.array([max(params.top_k, 0)], np.int32),
            np.array([params.top_p], np.float32),
            np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32),
        )

    def for_sample(self, index: jax.Array) -> "RowSampling":
        """The settings of one of several samples of a request: its index folded into the key.

        Args:
          index: int32 scalar.
        """

        def fold(data: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(data, impl="threefry2x32")
            return jax.random.key_data(jax.random.fold_in(key, index))

        return dataclasses.replace(self, key=jax.vmap(fold)(self.key))


def _keep_likely(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """One row's logits float32[V] with all but the tokens of top_k and top_p at -inf."""
    size = logits.shape[0]
    order = jnp.argsort(-logits, stable=True)
    ranked = logits[order]
    rank = jnp.arange(size)
    keep = (top_k <= 0) | (rank < top_k)
    probability = jax.nn.softmax(jnp.where(keep, ranked, _OFF))
    before = jnp.cumsum(probability) - probability
    keep &= (before < top_p) | (rank == 0) | (top_p >= 1.0)
    return jnp.full_like(logits, _OFF).at[order].set(jnp.where(keep, ranked, _OFF))


def sample(logits: jax.Array, rows: RowSampling, positions: jax.Array) -> jax.Array:
    """Chooses each row's next token.

    Args:
      logits: float32[B, V].
      rows: settings of the B rows.
      positions: int32[B], the position that the token will take in its sequence.

    Returns:
      int32[B]. A row of temperature 0 takes the likeliest token, the first of equals.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        warm = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        likely = jax.lax.cond(
            jnp.any((rows.top_k > 0) | (rows.top_p < 1.0)),
            lambda: jax.vmap(_keep_likely)(warm, rows.top_k, rows.top_p),
            lambda: warm,
        )
        return jnp.argmax(likely + jax.vmap(noise)(rows.key, positions), axis=-1).astype(jnp.int32)

    def noise(data: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[1:])

    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy)
    return jnp.where(rows.temperature > 0, drawn, greedy)
