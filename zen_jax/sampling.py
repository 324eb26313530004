"""How the next token is chosen: what a request asks for, and the choice itself, on the device.

Order as in vLLM: temperature, then top_k, then top_p, then one draw (by Gumbel noise). A row's
noise depends on its seed and position alone, so a request gives the same tokens in any batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# An array on host or device, or where one lies.
Array = Any

_OFF = -jnp.inf

# The most of each that a request may ask for.
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64


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
      temperature: divides the logits; below 1e-5 greedy; at most 100.
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the least set of likeliest tokens whose probability reaches this, in (0, 1].
      seed: 0 to 2**64 - 1; None lets the server choose one.
      stop_token_ids: end after one of these, beside the model's own end tokens.
      ignore_eos: go on after the model's own end tokens.
      min_p: keep tokens of at least this share of the likeliest one's probability, in [0, 1].
      repetition_penalty: of tokens that stand in prompt or answer, divides positive logits and
        multiplies others, in [0.01, 100]; 1 is none.
      presence_penalty: taken off the logits of tokens in the answer, in [-2, 2].
      frequency_penalty: the same, times how often they stand there.
      logit_bias: token -> what is added to its logit, in [-100, 100].
      min_tokens: no stop token is chosen, and no stop string counts, in the first so many tokens.
      stop: texts that end the answer in front of them.
      n: samples of the answer, each with random numbers of its own.
      logprobs: log-probabilities of each token, and of so many likeliest ones; None for neither.
      prompt_logprobs: the same of the prompt's tokens.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def validate(self, vocab_size: int | None = None) -> None:
        """Checks every field.

        Args:
          vocab_size: V, to check token ids against.

        Raises:
          InvalidSampling: naming the first field at fault, its value and what was expected.
        """
        for error in self.problems(vocab_size):
            raise error

    def problems(self, vocab_size: int | None = None) -> Iterator[InvalidSampling]:
        """What `validate` would say of every field.

        Args:
          vocab_size: V, to check token ids against.
        """
        most = (vocab_size or 2**31) - 1
        checks = (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 (greedy) to 100"),
            ("top_k", self.top_k >= -1, "1 or more, or 0 or -1 to keep all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "0 to 2**64 - 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "0.01 to 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            (
                "min_tokens",
                0 <= self.min_tokens <= max(self.max_tokens, 0),
                f"0 to max_tokens, {self.max_tokens}",
            ),
            ("n", 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
            *(
                (name, value is None or 0 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
                for name, value in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                )
            ),
        )
        for field, good, expected in checks:
            if not good:
                yield InvalidSampling(field, f"is {getattr(self, field)}; expected {expected}")
        yield from _of_stops(self.stop_token_ids, self.stop, most)
        yield from _of_biases(self.logit_bias, most)


def _of_stops(ids: Sequence[int], texts: Sequence[str], most: int) -> Iterator[InvalidSampling]:
    """What is wrong with stop tokens and stop strings; `most` is the highest token id."""
    if len(ids) > MAX_STOP_IDS:
        yield InvalidSampling("stop_token_ids", f"are {len(ids)}; expected {MAX_STOP_IDS} at most")
        ids = ()
    for i, token in enumerate(ids):
        if not 0 <= token <= most:
            text = f"is {token}; expected token ids, 0 to {most}"
            yield InvalidSampling(f"stop_token_ids[{i}]", text)
            break
    if len(texts) > MAX_STOPS:
        yield InvalidSampling("stop", f"has {len(texts)} strings; expected {MAX_STOPS} at most")
        texts = ()
    for i, text in enumerate(texts):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            yield InvalidSampling(f"stop[{i}]", "has a lone surrogate; expected valid Unicode")
            continue
        if not 1 <= size <= MAX_STOP_BYTES:
            expected = f"expected 1 to {MAX_STOP_BYTES}"
            yield InvalidSampling(f"stop[{i}]", f"has {size} bytes in UTF-8; {expected}")


def _of_biases(biases: Mapping[int, float], most: int) -> Iterator[InvalidSampling]:
    """What is wrong with logit_bias; `most` is the highest token id."""
    if len(biases) > MAX_BIASES:
        text = f"has {len(biases)} entries; expected {MAX_BIASES} at most"
        yield InvalidSampling("logit_bias", text)
        return
    for token, bias in biases.items():
        if not 0 <= token <= most:
            text = f"has the key {token}; expected token ids, 0 to {most}"
            yield InvalidSampling("logit_bias", text)
            return
        if not -100.0 <= bias <= 100.0:
            yield InvalidSampling(f"logit_bias[{token}]", f"is {bias}; expected -100 to 100")
            return


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
