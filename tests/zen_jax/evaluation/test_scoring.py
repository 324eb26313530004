"""Scores by row are those of the plainest arithmetic, wherever a fine-tune's predictions lie."""

from pathlib import Path

import jax
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.evaluation import scoring
from zen_jax.evaluation.scoring import Predictions, predict, score
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import Params
from zen_jax.model import init_params, make_forward

CONFIG = ModelConfig(40, 32, 64, 1, 2, 1, 16, 64, 1e-5, 1e4, True)
VOCAB = 32


@pytest.fixture(scope="module")
def models() -> tuple[Params, Params]:
    keys = jax.random.key(3), jax.random.key(4)
    # A head ten times as large: predictions that are worth comparing.
    return tuple(
        jax.tree.map(lambda w: w * 10 if w.ndim > 1 else w, init_params(CONFIG, k)) for k in keys
    )


@pytest.fixture(scope="module")
def sheet() -> Sheet:
    rng = np.random.default_rng(0)
    examples = [
        (rng.integers(0, VOCAB, 3 + i).tolist(), rng.integers(0, VOCAB, 1 + i % 3).tolist())
        for i in range(5)
    ]
    return Sheet.of_examples(examples, 2)


def _log_softmax(params: Params, tokens: np.ndarray) -> np.ndarray:
    """float64[n, T, VOCAB], of the first VOCAB logits."""
    logits = np.asarray(make_forward(CONFIG)(params, tokens[:, :-1]), np.float64)[..., :VOCAB]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("in_memory", [scoring.IN_MEMORY, 0])
def test_scores_are_the_plain_ones(models, sheet, tmp_path: Path, monkeypatch, in_memory) -> None:
    monkeypatch.setattr(scoring, "IN_MEMORY", in_memory)
    tuned, model = models
    kept = Predictions(sheet, VOCAB, tmp_path)
    predict(CONFIG, tuned, sheet, kept)
    assert isinstance(kept._kept, np.memmap) == (in_memory == 0)
    assert not list(tmp_path.iterdir()), "a process that is killed leaves no file"
    found = score(CONFIG, model, sheet, VOCAB, kept)
    p, q = _log_softmax(tuned, sheet.tokens), _log_softmax(model, sheet.tokens)
    targets, counted = sheet.tokens[:, 1:], sheet.counted
    nll = -np.take_along_axis(q, targets[..., None], -1)[..., 0]
    kl = (np.exp(p) * (p - q)).sum(-1)
    same, hit = p.argmax(-1) == q.argmax(-1), q.argmax(-1) == targets
    np.testing.assert_allclose(found.tokens, counted.sum(1))
    np.testing.assert_allclose(found.nll, (nll * counted).sum(1), rtol=1e-4)
    np.testing.assert_allclose(found.kl, (kl * counted).sum(1), rtol=1e-3)
    np.testing.assert_array_equal(found.agreed, (same & counted).sum(1))
    np.testing.assert_array_equal(found.right, (hit | ~counted).all(1))
    assert (found.kl > 0.01).all() and found.agreed.sum() < found.tokens.sum()


def test_a_model_is_not_apart_from_itself(models, sheet, tmp_path: Path) -> None:
    kept = Predictions(sheet, VOCAB, tmp_path)
    predict(CONFIG, models[0], sheet, kept)
    found = score(CONFIG, models[0], sheet, VOCAB, kept)
    np.testing.assert_allclose(found.kl, 0, atol=1e-6)
    np.testing.assert_array_equal(found.agreed, found.tokens)
    alone = score(CONFIG, models[0], sheet, VOCAB)
    np.testing.assert_array_equal(alone.nll, found.nll)


def test_a_sheet_has_to_fit(models, sheet) -> None:
    with pytest.raises(ValueError, match="outside 0..7"):
        score(CONFIG, models[0], sheet, 8)
    long = Sheet.of_windows(np.zeros((1, 70), np.int32), 1)
    with pytest.raises(ValueError, match="longer than 64"):
        score(CONFIG, models[0], long)
