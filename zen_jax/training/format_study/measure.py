"""How far a model is from a fine-tune: loss, divergence and exact answers on held-out tokens."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.evaluation.scoring import RowScores, check_sheet, judge, predictor
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import Params


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


class Examiner:
    """Examines models of one shape against one fine-tune, whose predictions it keeps."""

    def __init__(self, config: ModelConfig, sheet: Sheet, tuned: Params) -> None:
        """Takes the fine-tune's weights; its predictions take 4 n T V bytes.

        Raises:
          ValueError: tokens of the sheet are outside the vocabulary, or it is too long.
        """
        check_sheet(config, sheet)
        self._predict = predictor(config, config.vocab_size)
        self._sheet = sheet
        self._wanted = [self._predict(tuned, tokens) for tokens, _ in sheet.batches()]

    def __call__(self, params: Params) -> Marks:
        """The marks of a model."""
        return self.judge(self._predict(params, tokens) for tokens, _ in self._sheet.batches())

    def judge(self, predictions: Iterable[jax.typing.ArrayLike]) -> Marks:
        """The marks of predictions that were made elsewhere.

        Args:
          predictions: log-probabilities float32[batch, T, V] for each of the sheet's batches.
        """
        judged = [
            judge(found, tokens, counted, wanted)
            for found, (tokens, counted), wanted in zip(
                predictions, self._sheet.batches(), self._wanted, strict=True
            )
        ]
        rows = RowScores.of(self._sheet, judged)
        count = rows.tokens.sum()
        exact = float(rows.right.mean()) if self._sheet.answers else None
        return Marks(float(rows.nll.sum() / count), float(rows.kl.sum() / count), exact)


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and values, in hex."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        hashed.update(f"{name} {value.dtype} {value.shape}\n".encode())
        hashed.update(value.tobytes())
    return hashed.hexdigest()
