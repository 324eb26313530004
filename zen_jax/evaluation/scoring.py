"""Loss, divergence and exact answers of one model on one sheet, row by row.

Logits are float32, their log-softmax and the sums over a row too; whatever is added up over rows is
float64, on the host.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import Params
from zen_jax.model import make_forward

# Of each row: the sum of NLL, the sum of KL, counted tokens whose likeliest is the other's too,
# and whether all counted tokens are the likeliest.
Judged = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

# Predictions of a fine-tune beyond this many bytes lie in a file, not in memory.
IN_MEMORY = 256 << 20


@jax.jit
def judge(found: jax.Array, tokens: jax.Array, counted: jax.Array, wanted: jax.Array) -> Judged:
    """What a model's predictions are worth beside a fine-tune's.

    NLL is -log q(t) of the true token t; KL is sum_v p(v) (log p(v) - log q(v)) (Kullback and
    Leibler, 1951), p the fine-tune's distribution and q the model's, both of the next token.

    Args:
      found, wanted: log-probabilities float32[B, T, V], a model's and the fine-tune's.
      tokens: int32[B, T + 1].
      counted: bool[B, T].

    Returns:
      NLL and KL, float32[B], nats, sums over what counts; tokens whose likeliest one is the
      fine-tune's too, int32[B]; and bool[B], whether every counted token is the likeliest.
    """
    targets = tokens[:, 1:]
    true = jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    best = jnp.argmax(found, axis=-1)
    agreed = (best == jnp.argmax(wanted, axis=-1)) & counted
    return (
        jnp.sum(jnp.where(counted, -true, 0), axis=1),
        jnp.sum(jnp.where(counted, divergence, 0), axis=1),
        jnp.sum(agreed, axis=1),
        jnp.all((best == targets) | ~counted, axis=1),
    )


@functools.lru_cache(maxsize=8)
def predictor(config: ModelConfig, vocab: int) -> Callable[..., jax.Array]:
    """Jitted (params, tokens int32[B, T + 1]) -> log-probabilities float32[B, T, vocab] of the next
    token among the first `vocab` ones."""
    forward = make_forward(config)

    def predict(params: Params, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(forward(params, tokens[:, :-1])[..., :vocab], axis=-1)

    return jax.jit(predict)


@dataclasses.dataclass(frozen=True)
class RowScores:
    """What a model scores on each row of a sheet.

    Attributes:
      tokens: float64[n], how many count.
      nll, kl: float64[n], nats, sums over them.
      agreed: float64[n], how many have the fine-tune's likeliest token.
      right: float64[n], 1 where every counted token is the likeliest, else 0.
    """

    tokens: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    agreed: np.ndarray
    right: np.ndarray

    @classmethod
    def of(cls, sheet: Sheet, judged: Sequence[Judged]) -> "RowScores":
        """From what was found of each batch of a sheet."""
        rows = len(sheet.tokens)
        parts = [
            np.concatenate([np.asarray(part, np.float64) for part in kind])[:rows]
            for kind in zip(*judged, strict=True)
        ]
        return cls(sheet.counted.sum(axis=1).astype(np.float64), *parts)


class Predictions:
    """A fine-tune's log-probabilities at the counted tokens of a sheet, in memory or in a file."""

    def __init__(self, sheet: Sheet, vocab: int, folder: Path) -> None:
        """Makes room: 4 bytes for each counted token and vocabulary entry.

        Args:
          sheet: what is predicted.
          vocab: V.
          folder: where a file may lie, without a name, as long as this object lives.
        """
        self.vocab, self._sheet = vocab, sheet
        shape = (int(sheet.counted.sum()), vocab)
        if 4 * shape[0] * shape[1] <= IN_MEMORY:
            self._kept = np.empty(shape, np.float32)
        else:
            path = folder / f"{sheet.digest}.float32"
            self._kept = np.memmap(path, np.float32, "w+", shape=shape)
            path.unlink()  # the space is given back even if this process is killed

    def fill(self, found: Iterator[np.ndarray]) -> None:
        """Keeps log-probabilities float32[batch, T, V] of every batch."""
        at = 0
        for (_, counted), values in zip(self._sheet.batches(), found, strict=True):
            end = at + int(counted.sum())
            self._kept[at:end] = values[counted]
            at = end

    def batches(self) -> Iterator[np.ndarray]:
        """float32[batch, T, V] of every batch; 0 where nothing counts."""
        at = 0
        for _, counted in self._sheet.batches():
            values = np.zeros((*counted.shape, self._kept.shape[1]), np.float32)
            end = at + int(counted.sum())
            values[counted] = self._kept[at:end]
            at = end
            yield values


def score(
    config: ModelConfig,
    params: Params,
    sheet: Sheet,
    vocab: int | None = None,
    wanted: Predictions | None = None,
) -> RowScores:
    """A model's scores on every row of a sheet.

    Args:
      config: the model.
      params: its weights, of any float dtype, on the device.
      sheet: what it is asked.
      vocab: how many tokens of the vocabulary take part; None for all.
      wanted: the fine-tune's predictions; None for the model's own, whose KL is 0.

    Raises:
      ValueError: the sheet does not fit the model.
    """
    check_sheet(config, sheet, vocab)
    predict = predictor(config, vocab or config.vocab_size)
    judged = []
    kept = None if wanted is None else wanted.batches()
    for tokens, counted in sheet.batches():
        found = predict(params, tokens)
        judged.append(judge(found, tokens, counted, found if kept is None else next(kept)))
    return RowScores.of(sheet, judged)


def predict(config: ModelConfig, params: Params, sheet: Sheet, into: Predictions) -> None:
    """Keeps a fine-tune's predictions of a sheet.

    Raises:
      ValueError: the sheet does not fit the model.
    """
    check_sheet(config, sheet, into.vocab)
    program = predictor(config, into.vocab)
    into.fill(np.asarray(program(params, tokens)) for tokens, _ in sheet.batches())


def check_sheet(config: ModelConfig, sheet: Sheet, vocab: int | None = None) -> None:
    """Makes sure that a model can be asked a sheet.

    Raises:
      ValueError: tokens are outside the vocabulary, or a row is longer than the model's positions.
    """
    size = vocab or config.vocab_size
    if sheet.tokens.min() < 0 or sheet.tokens.max() >= size:
        raise ValueError(f"the sheet has tokens outside 0..{size - 1}, the vocabulary")
    if sheet.tokens.shape[1] - 1 > config.max_position:
        raise ValueError(f"the sheet is longer than {config.max_position} tokens")
