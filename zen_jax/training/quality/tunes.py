"""Full fine-tunes of SmolLM2-135M for the table: code, mathematics, a language, a style.

Each is trained on 8 x 256 tokens a step of a text that is fetched by package name, a tenth of its
documents held out, and rounded to bfloat16. A run that was interrupted is gone on with.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from zen_jax.layout import unfuse
from zen_jax.training import corpora, residual
from zen_jax.training.batches import Batch
from zen_jax.training.finetune import (
    TrainConfig,
    TrainState,
    load_checkpoint,
    make_optimizer,
    train,
)
from zen_jax.training.format_study.smollm2 import LENGTH, Windows, batches, cut

PEAK = 1e-4
# Of the cosine, whatever part of it is gone through.
SCHEDULE = 60
_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Tune:
    """A fine-tune.

    Attributes:
      name: of its folder.
      title: in the table.
      corpus: in `corpora.SOURCES`.
    """

    name: str
    title: str
    corpus: str


TUNES: Mapping[str, Tune] = {
    tune.name: tune
    for tune in (
        Tune("german", "German manual pages", "german"),
        Tune("maths", "Maxima's manual", "algebra"),
        Tune("style", "Shakespeare's plays", "plays"),
        Tune("code", "Python's standard library", "python"),
    )
}


class _Enough(Exception):
    """As many steps as were asked for are done."""


def read_windows(base: Path, corpus: str, texts: Path) -> Windows:
    """A corpus in the tokens of a base's folder, both sides.

    Raises:
      ValueError: the text cannot be fetched, or the tokenizer has no end of text.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is None:
        raise ValueError(f"{base} has no token <|endoftext|>; is it SmolLM2?")
    text = corpora.load(corpus, texts)

    def windows(documents: Sequence[bytes]) -> np.ndarray:
        decoded = [document.decode(errors="replace") for document in documents]
        encoded = tokenizer.encode_batch(decoded, add_special_tokens=False)
        return cut((e.ids for e in encoded), end, LENGTH)

    return Windows(windows(text.train), windows(text.held_out))


def fine_tune(
    base: Path, work: Path, tune: Tune, texts: Path, steps: int, progress: bool = True
) -> Path:
    """Fine-tunes a base unless it is done, and writes WORK/NAME-STEPS as a Hugging Face folder.

    Args:
      base: SmolLM2-135M-Instruct in bfloat16, a Hugging Face folder.
      work: gets the result, and a checkpoint that more steps go on from.
      tune: which one.
      texts: a cache of texts.
      steps: of 2,048 tokens, a multiple of 10 and at most `SCHEDULE`.
      progress: whether to show a bar.

    Raises:
      ValueError: the base is damaged, the text cannot be fetched, the checkpoint is another run's,
        or there are no such steps.
    """
    if steps not in range(_EVERY, SCHEDULE + 1, _EVERY):
        raise ValueError(f"steps is {steps}; expected a multiple of {_EVERY} up to {SCHEDULE}")
    out = work / f"{tune.name}-{steps}"
    if (out / residual.WEIGHTS).exists():
        return out
    config, start = residual.read_folder(base)
    settings = TrainConfig(
        steps=SCHEDULE,
        learning_rate=PEAK,
        warmup=5,
        held_out_every=SCHEDULE,
        checkpoint_every=_EVERY,
    )
    each = batches(read_windows(base, tune.corpus, texts).train)

    def until(step: int) -> tuple[Batch, ...]:
        if step >= steps:
            raise _Enough
        return each(step)

    params = residual.float32_params(config, start)
    checkpoint = work / f"{tune.name}.checkpoint.safetensors"
    with contextlib.suppress(_Enough):
        train(
            config,
            params,
            until,
            settings,
            checkpoint=checkpoint,
            title=tune.name,
            progress=progress,
        )
    like = TrainState(params, make_optimizer(config, settings).init(params), 0)
    done = load_checkpoint(checkpoint, like, settings.identity)
    if done.step != steps:
        raise ValueError(f"{checkpoint} is {done.step} steps on; remove it for {steps}")
    tuned = {name: np.asarray(value) for name, value in unfuse(config, done.params).items()}
    residual.write_folder(out, residual.round_tensors(tuned), base)
    return out
