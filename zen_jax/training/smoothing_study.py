"""What merging while training does to the held-out loss: methods as shadows of the same runs."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.checkpoint.source import open_source
from zen_jax.training import corpora, recipe, residual, smoothing_report, tasks
from zen_jax.training.batches import Batch, held_out_windows
from zen_jax.training.checkpoints import RunFolder
from zen_jax.training.finetune import Batches, TrainConfig, make_loss
from zen_jax.training.format_study import smollm2
from zen_jax.training.format_study.study import write_json
from zen_jax.training.smoothing import SmoothingConfig, train_smoothed

METHODS = ("none", "mean", "truncated-soup", "monosoup")
VARIANT, SEEDS = "zen4-german", (1, 2, 3)
STEPS, EVERY, RANK = 40, 5, 16
ROWS, WARMUP, HELD_OUT_ROWS = 4, 5, 12
SMOLLM2 = smollm2.BASE
SMOLLM2_STEPS, SMOLLM2_EVERY, SMOLLM2_RANK = 40, 10, 32
SMOLLM2_ROWS, SMOLLM2_LENGTH, SMOLLM2_HELD_OUT = 2, 128, 6
# (in a run's name, share of the peak that the learning rate ends with)
SCHEDULES = (("cosine", 0.01), ("constant", 1.0))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A fine-tune to be.

    Attributes:
      name: of the run.
      base: a Hugging Face folder.
      batches: see `zen_jax.training.finetune.train`.
      settings: of training.
      held_out: batches whose loss is measured.
      smoothing: what is merged in the study.
    """

    name: str
    base: Path
    batches: Batches
    settings: TrainConfig
    held_out: tuple[Batch, ...]
    smoothing: SmoothingConfig


def family_subject(
    family: Path,
    texts: Path,
    name: str,
    seed: int,
    steps: int | None = None,
    floor: float = 0.01,
    label: str = "",
) -> Subject:
    """A variant of the demo family, fine-tuned on other batches for every seed.

    Args:
      family: its folder.
      texts: a cache of texts.
      name: of the variant.
      seed: of the batches; 0 gives the recipe's.
      steps: of training; else the recipe's.
      floor: share of the peak that the learning rate ends with.
      label: in the run's name.

    Raises:
      ValueError: there is no such variant, or texts cannot be fetched.
    """
    if name not in recipe.VARIANTS:
        raise ValueError(f"no variant is called {name!r}; see {', '.join(recipe.VARIANTS)}")
    variant = recipe.VARIANTS[name]
    words, unseen = tasks.split_words(corpora.load_words(texts))
    text = None if variant.corpus is None else corpora.load(variant.corpus, texts)
    settings = dataclasses.replace(recipe.variant_settings(variant), floor=floor)
    settings = dataclasses.replace(
        settings, steps=steps or settings.steps, checkpoint_every=2 * EVERY
    )
    held_out = recipe.variant_held_out(variant, unseen, text)
    if text is not None:
        windows = held_out_windows(text, HELD_OUT_ROWS, variant.length, recipe.SEED)
        ones = np.ones((HELD_OUT_ROWS, variant.length), np.float32)
        held_out = (Batch(windows, ones),)
    return Subject(
        f"{name}-{label}{seed}",
        family / "base",
        recipe.variant_batches(variant, words, text, seed),
        settings,
        held_out,
        SmoothingConfig(METHODS, EVERY, RANK),
    )


def smollm2_subject(base: Path, work: Path, texts: Path) -> Subject:
    """SmolLM2-135M on German manual pages, a few tokens a step.

    Args:
      base: SmolLM2-135M-Instruct, a GGUF file or a Hugging Face folder.
      work: gets the base in bfloat16.
      texts: a cache of texts.

    Raises:
      ValueError: the base is missing or damaged, or texts cannot be fetched.
    """
    folder = work / "smollm2-base"
    smollm2.write_base(open_source(base), folder)
    windows = smollm2.read_windows(folder, texts)
    held_out = windows.held_out[:, : SMOLLM2_LENGTH + 1]
    at = np.linspace(0, len(held_out) - 1, SMOLLM2_HELD_OUT).astype(int)
    ones = np.ones((SMOLLM2_HELD_OUT, SMOLLM2_LENGTH), np.float32)
    order = np.random.default_rng(smollm2.SEED).permutation(len(windows.train))

    def batches(step: int) -> tuple[Batch, ...]:
        chosen = order[np.arange(step * SMOLLM2_ROWS, (step + 1) * SMOLLM2_ROWS) % len(order)]
        tokens = windows.train[chosen, : SMOLLM2_LENGTH + 1]
        return (Batch(tokens, np.ones((SMOLLM2_ROWS, SMOLLM2_LENGTH), np.float32)),)

    settings = TrainConfig(
        steps=SMOLLM2_STEPS,
        learning_rate=smollm2.LEARNING_RATE,
        warmup=2,
        floor=1.0,
        checkpoint_every=SMOLLM2_EVERY,
    )
    smoothing = SmoothingConfig(METHODS, SMOLLM2_EVERY, SMOLLM2_RANK)
    return Subject("smollm2", folder, batches, settings, (Batch(held_out[at], ones),), smoothing)


def subjects(
    what: str, family: Path, base: Path, work: Path, texts: Path
) -> Sequence[Callable[[], Subject]]:
    """What makes the subjects of a study: "family" or "smollm2"."""
    if what == "smollm2":
        return [lambda: smollm2_subject(base, work, texts)]

    def make(seed: int, label: str, floor: float) -> Callable[[], Subject]:
        return lambda: _short(
            family_subject(family, texts, VARIANT, seed, STEPS, floor, f"{label}-")
        )

    return [make(seed, label, floor) for label, floor in SCHEDULES for seed in SEEDS]


def _short(subject: Subject) -> Subject:
    """A subject with fewer rows a step and a shorter warm-up than the recipe's."""

    def batches(step: int) -> tuple[Batch, ...]:
        return tuple(Batch(b.tokens[:ROWS], b.weights[:ROWS]) for b in subject.batches(step))

    settings = dataclasses.replace(subject.settings, warmup=WARMUP)
    return dataclasses.replace(subject, batches=batches, settings=settings)


def run(
    subjects: Sequence[Callable[[], Subject]], work: Path, progress: bool = True
) -> dict[str, Any]:
    """Trains every subject that is not done yet.

    Returns:
      Run -> what there is to tell of it.

    Raises:
      ValueError: a run's folder is of other settings.
    """
    found: dict[str, Any] = {}
    for i, make in enumerate(subjects):
        subject = make()
        path = work / f"{subject.name}.json"
        identity = f"{subject.settings.identity}; {subject.smoothing}"
        if not path.exists():
            title = f"{subject.name} ({i + 1} of {len(subjects)})"
            measured = _measure(subject, work, title, progress)
            write_json(path, {"identity": identity, **measured})
        told = json.loads(path.read_text())
        if told["identity"] != identity:
            raise ValueError(f"{path} is of a run with other settings; remove it")
        found[subject.name] = {key: value for key, value in told.items() if key != "identity"}
    return found


def so_far(subjects: Sequence[Callable[[], Subject]], work: Path) -> dict[str, Any]:
    """What there is to tell of runs, also of those under way; nothing is trained."""
    found: dict[str, Any] = {}
    for make in subjects:
        subject = make()
        path = work / f"{subject.name}.json"
        record = RunFolder(work / f"{subject.name}.run").record()
        if path.exists():
            told = json.loads(path.read_text())
            found[subject.name] = {key: value for key, value in told.items() if key != "identity"}
        elif record is not None:
            curves = {name: shadow["curve"] for name, shadow in record["shadows"].items()}
            found[subject.name] = _facts(subject) | {"reached": record["step"], "curves": curves}
    return found


def _facts(subject: Subject) -> dict[str, Any]:
    (batch,) = subject.batches(0)
    return {
        "base": subject.base.name,
        "steps": subject.settings.steps,
        "every": subject.smoothing.every,
        "rank": subject.smoothing.rank,
        "floor": subject.settings.floor,
        "tokens_per_step": int(batch.weights.size),
        "held_out_tokens": int(sum(b.weights.size for b in subject.held_out)),
    }


def _measure(subject: Subject, work: Path, title: str, progress: bool) -> dict[str, Any]:
    began = time.process_time()
    config, base = residual.read_folder(subject.base)
    params = residual.float32_params(config, base)
    start = float(jax.jit(make_loss(config, jnp.float32))(params, subject.held_out))
    done = train_smoothed(
        config,
        params,
        subject.batches,
        subject.settings,
        subject.smoothing,
        subject.held_out,
        work / f"{subject.name}.run",
        title=title,
        progress=progress,
    )
    return {
        **_facts(subject),
        "start": start,
        "curves": {name: shadow.curve for name, shadow in done.shadows.items()},
        "cpu_seconds": round(time.process_time() - began),
    }


def publish(docs: Path, found: Mapping[str, Any]) -> None:
    """Adds studies to docs/smoothing.json, and writes docs/smoothing.md's tables and plot again."""
    path = docs / "smoothing.json"
    studies = json.loads(path.read_text()) if path.exists() else {}
    studies |= found
    write_json(path, studies)
    smoothing_report.write(docs, studies)
