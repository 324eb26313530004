"""How far a model is from a fine-tune: loss, divergence and exact answers on held-out tokens."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.layout import Params
from zen_jax.model import make_forward


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Held-out tokens that models are examined on.

    Attributes:
      tokens: int32[n, T + 1]; inputs are all but the last, targets all but the first.
      counted: bool[n, T], the targets that count.
      answers: whether the counted targets of a row are an answer to be given exactly.
      batch: rows of a forward pass.
    """

    tokens: np.ndarray
    counted: np.ndarray
    answers: bool
    batch: int

    @classmethod
    def of_examples(cls, examples: Sequence[evaluate.Example], batch: int) -> "Sheet":
        """From (prompt, answer) token ids; the answers count.

        Raises:
          ValueError: there are none, or one has an empty prompt.
        """
        if not examples or not all(prompt for prompt, _ in examples):
            raise ValueError("expected at least one example, each with a prompt")
        length = max(len(prompt) + len(answer) for prompt, answer in examples)
        tokens = np.zeros((len(examples), -(-length // 16) * 16), np.int32)
        counted = np.zeros((len(examples), tokens.shape[1] - 1), bool)
        for row, (prompt, answer) in enumerate(examples):
            end = len(prompt) + len(answer)
            tokens[row, :end] = [*prompt, *answer]
            counted[row, len(prompt) - 1 : end - 1] = True
        return cls(tokens, counted, True, batch)

    @classmethod
    def of_windows(cls, windows: np.ndarray, batch: int) -> "Sheet":
        """From windows of text int32[n, T + 1]; all but each one's first token count."""
        counted = np.ones((windows.shape[0], windows.shape[1] - 1), bool)
        return cls(windows.astype(np.int32), counted, False, batch)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens int32[batch, T + 1], counted bool[batch, T]); the last one is padded with rows
        in which nothing counts."""
        for start in range(0, len(self.tokens), self.batch):
            tokens = self.tokens[start : start + self.batch]
            missing = ((0, self.batch - len(tokens)), (0, 0))
            counted = self.counted[start : start + self.batch]
            yield np.pad(tokens, missing), np.pad(counted, missing)

    def part(self, rows: int, batch: int) -> "Sheet":
        """At most `rows` of its rows, spread evenly, at most `batch` in a forward pass."""
        count = len(self.tokens)
        at = np.linspace(0, count - 1, min(rows, count)).astype(int)
        return Sheet(self.tokens[at], self.counted[at], self.answers, min(batch, len(at)))

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked, in hex."""
        hashed = hashlib.sha256(repr((self.tokens.shape, self.answers)).encode())
        hashed.update(self.tokens.tobytes())
        hashed.update(self.counted.tobytes())
        return hashed.hexdigest()


@dataclasses.dataclass(frozen=True)
class Marks:
    """What a model scores on a sheet.

    Attributes:
      nll: mean negative log-likelihood of the counted tokens, nats.
      kl: mean over them of KL(fine-tune || model) of the next token, nats.
      exact: share of answers that greedy decoding gives exactly; None for texts.
    """

    nll: float
    kl: float
    exact: float | None


# Sum of NLL, sum of KL, bool[B] of rows answered.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


@jax.jit
def _judge(found: jax.Array, tokens: jax.Array, counted: jax.Array, wanted: jax.Array) -> _Sums:
    """Log-probabilities float32[B, T, V], a model's and the fine-tune's, at tokens [B, T + 1]."""
    targets = tokens[:, 1:]
    true = jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    right = (jnp.argmax(found, axis=-1) == targets) | ~counted
    return (
        jnp.sum(jnp.where(counted, -true, 0)),
        jnp.sum(jnp.where(counted, divergence, 0)),
        jnp.all(right, axis=1),
    )


@functools.lru_cache(maxsize=4)
def _programs(config: ModelConfig) -> tuple[Callable[..., jax.Array], Callable[..., _Sums]]:
    """Jitted (params, tokens) -> log-probabilities float32[B, T, V]; and `_judge` of them, (params,
    tokens, counted, the fine-tune's)."""
    forward = make_forward(config)

    def predict(params: Params, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(forward(params, tokens[:, :-1]), axis=-1)

    def mark(params: Params, tokens: jax.Array, counted: jax.Array, wanted: jax.Array) -> _Sums:
        return _judge(predict(params, tokens), tokens, counted, wanted)

    return jax.jit(predict), jax.jit(mark)


class Examiner:
    """Examines models of one shape against one fine-tune, whose predictions it keeps."""

    def __init__(self, config: ModelConfig, sheet: Sheet, tuned: Params) -> None:
        """Takes the fine-tune's weights; its predictions take 4 n T V bytes.

        Raises:
          ValueError: tokens of the sheet are outside the vocabulary, or it is too long.
        """
        if sheet.tokens.min() < 0 or sheet.tokens.max() >= config.vocab_size:
            raise ValueError(f"the sheet has tokens outside 0..{config.vocab_size - 1}")
        if sheet.tokens.shape[1] - 1 > config.max_position:
            raise ValueError(f"the sheet is longer than {config.max_position} tokens")
        predict, self._mark = _programs(config)
        self._sheet = sheet
        self._wanted = [predict(tuned, tokens) for tokens, _ in sheet.batches()]

    def __call__(self, params: Params) -> Marks:
        """The marks of a model."""
        return self._marks(lambda *batch: self._mark(params, *batch))

    def judge(self, predictions: Iterable[jax.typing.ArrayLike]) -> Marks:
        """The marks of predictions that were made elsewhere.

        Args:
          predictions: log-probabilities float32[batch, T, V] for each of the sheet's batches.
        """
        found = iter(predictions)
        return self._marks(lambda *batch: _judge(next(found), *batch))

    def _marks(self, sums: Callable[..., _Sums]) -> Marks:
        nll, kl, right = 0.0, 0.0, []
        for (tokens, counted), wanted in zip(self._sheet.batches(), self._wanted, strict=True):
            loss, divergence, answered = sums(tokens, counted, wanted)
            nll, kl = nll + float(loss), kl + float(divergence)
            right.append(np.asarray(answered))
        rows, count = len(self._sheet.tokens), int(self._sheet.counted.sum())
        exact = float(np.concatenate(right)[:rows].mean()) if self._sheet.answers else None
        return Marks(nll / count, kl / count, exact)


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and values, in hex."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        hashed.update(f"{name} {value.dtype} {value.shape}\n".encode())
        hashed.update(value.tobytes())
    return hashed.hexdigest()
