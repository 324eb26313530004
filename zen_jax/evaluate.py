"""Scores of a model: exact answers to tasks, and bits per byte of texts.

Knows tokens only, neither tasks nor texts. Weights are taken as they are given (a variant's
materialised, or base and delta bound together); activations and sums are float32.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.layout import Params
from zen_jax.model import make_forward

Example = tuple[Sequence[int], Sequence[int]]


@functools.lru_cache(maxsize=8)
def _scorer(config: ModelConfig) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Jitted (params, int32[B, T + 1]) -> the best next token int32[B, T] and the negative
    log-likelihood of the true one float32[B, T], nats."""
    forward = make_forward(config)

    def score(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = forward(params, tokens[:, :-1])
        true = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        nats = jax.nn.logsumexp(logits, axis=-1) - true
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), nats

    return jax.jit(score)


def exact_matches(
    config: ModelConfig, params: Params, examples: Sequence[Example], batch: int = 64
) -> np.ndarray:
    """Which examples are answered exactly by greedy decoding.

    Greedy decoding gives the answer if and only if, with the answer fed in, the best next token is
    the answer's at every position: so one forward pass a batch decides, and nothing is decoded.

    Args:
      config: the model.
      params: its weights.
      examples: (prompt, answer) token ids; put the end token last in the answer to score that the
        model stops.
      batch: rows of a forward pass.

    Returns:
      bool[len(examples)].

    Raises:
      ValueError: there are no examples, a prompt or an answer is empty, or an example is longer
        than the model's positions or has ids outside its vocabulary.
    """
    _check_examples(config, examples)
    length = max(len(prompt) + len(answer) for prompt, answer in examples)
    length = -(-length // 16) * 16
    matches = []
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        tokens = np.zeros((batch, length), np.int32)
        wanted = np.zeros((batch, length), bool)
        for row, (prompt, answer) in enumerate(part):
            end = len(prompt) + len(answer)
            tokens[row, :end] = [*prompt, *answer]
            wanted[row, len(prompt) : end] = True
        best, _ = _scorer(config)(params, tokens)
        right = (np.asarray(best) == tokens[:, 1:]) | ~wanted[:, 1:]
        matches.append(right.all(axis=1)[: len(part)])
    return np.concatenate(matches)


def exact_match(
    config: ModelConfig, params: Params, examples: Sequence[Example], batch: int = 64
) -> float:
    """The share of examples that greedy decoding answers exactly; see `exact_matches`."""
    return float(exact_matches(config, params, examples, batch).mean())


def bits_per_byte(
    config: ModelConfig,
    params: Params,
    windows: np.ndarray,
    bytes_per_token: float = 1.0,
    batch: int = 16,
) -> float:
    """Mean negative log2-likelihood of windows of text, per byte.

    Args:
      config: the model.
      params: its weights.
      windows: int32[n, T + 1]; the first token of each is context only.
      bytes_per_token: of this text under this tokenizer; 1 for a byte-level one.
      batch: windows of a forward pass.

    Raises:
      ValueError: windows are no such array, are empty, or too long for the model.
    """
    if windows.ndim != 2 or windows.shape[0] < 1 or not 2 <= windows.shape[1]:
        raise ValueError(f"windows have shape {windows.shape}; expected [n, T + 1] with n, T >= 1")
    if windows.shape[1] - 1 > config.max_position:
        raise ValueError(f"windows of {windows.shape[1] - 1} tokens; at most {config.max_position}")
    if not bytes_per_token > 0:
        raise ValueError(f"bytes_per_token is {bytes_per_token}; expected it above 0")
    total = 0.0
    for start in range(0, len(windows), batch):
        part = windows[start : start + batch]
        padded = np.concatenate([part, np.zeros((batch - len(part), part.shape[1]), part.dtype)])
        _, nats = _scorer(config)(params, padded)
        total += float(np.asarray(nats, np.float64)[: len(part)].sum())
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    return total / math.log(2) / tokens / bytes_per_token


def greedy(
    config: ModelConfig, params: Params, prompt: Sequence[int], end: int, max_tokens: int
) -> list[int]:
    """A greedy continuation, without a cache: for notebooks and checks of small models.

    Args:
      config: the model.
      params: its weights.
      prompt: token ids.
      end: the token to stop at; it is not returned.
      max_tokens: the most tokens to make.

    Raises:
      ValueError: the prompt is empty or prompt and continuation do not fit the model.
    """
    if not prompt or len(prompt) + max_tokens > config.max_position:
        raise ValueError(
            f"prompt of {len(prompt)} and {max_tokens} new tokens; expected at least 1 and "
            f"at most {config.max_position} together"
        )
    length = min(config.max_position, -(-(len(prompt) + max_tokens) // 32) * 32)
    tokens = np.zeros((1, length + 1), np.int32)
    tokens[0, : len(prompt)] = prompt
    made: list[int] = []
    for at in range(len(prompt) - 1, len(prompt) - 1 + max_tokens):
        best, _ = _scorer(config)(params, tokens)
        token = int(best[0, at])
        if token == end:
            break
        made.append(token)
        tokens[0, at + 1] = token
    return made


def _check_examples(config: ModelConfig, examples: Sequence[Example]) -> None:
    if not examples:
        raise ValueError("there are no examples to score")
    for prompt, answer in examples:
        if not prompt or not answer:
            raise ValueError("an example has an empty prompt or answer")
        if len(prompt) + len(answer) > config.max_position:
            raise ValueError(
                f"an example has {len(prompt) + len(answer)} tokens; at most {config.max_position}"
            )
        if not all(0 <= i < config.vocab_size for i in [*prompt, *answer]):
            raise ValueError(f"an example has token ids outside 0..{config.vocab_size - 1}")
