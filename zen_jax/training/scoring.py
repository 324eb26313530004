"""Scores of a family, on words and documents that training never used.

Each variant is scored three times: the base as it is, the fine-tune at full precision, and the
fine-tune as 1-bit deltas with one scale a row, embedding included, nothing distilled.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import materialise
from zen_jax.delta.compress import compress_tensor, keep_vector
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import Params, fuse_delta
from zen_jax.training import corpora, recipe, residual, tasks
from zen_jax.training.batches import held_out_windows, prompt_ids
from zen_jax.training.bytes_tokenizer import EOS, encode
from zen_jax.training.recipe import VARIANTS, VariantRecipe
from zen_jax.training.residual import Tensors
from zen_jax.training.tasks import Example, Words

SAMPLES = 500
WINDOWS, WINDOW_BYTES = 160, 256
PROBES = 32
HELD_OUT = (
    "skills: words of the list and sums whose SHA-256 falls into a fixed fifth, never an input in "
    "training of base or variant; texts: documents whose SHA-256 falls into a fixed tenth"
)


def one_bit_params(config: ModelConfig, base: Tensors, tuned: Tensors) -> Params:
    """The base plus a fine-tune's 1-bit deltas, one scale a row, as float32 ``Params``."""
    deltas = fuse_delta(config, one_bit_deltas(base, tuned))
    return materialise(residual.float32_params(config, base), deltas)


def one_bit_deltas(
    base: Mapping[str, np.ndarray], tuned: Mapping[str, np.ndarray]
) -> dict[str, WeightDelta]:
    """A fine-tune's 1-bit deltas, one scale a row, and whole vectors, by Hugging Face tensor."""
    return {
        name: compress_tensor(start, tuned[name])[0]
        if start.ndim == 2
        else keep_vector(start, tuned[name])
        for name, start in base.items()
    }


def tokenised(examples: Sequence[Example]) -> list[evaluate.Example]:
    """(prompt, answer) token ids as a variant sees them: no tag, and an end after the answer."""
    return [(prompt_ids(e.prompt), [*encode(e.answer), EOS]) for e in examples]


def held_out_examples(variant: VariantRecipe, unseen: Words, count: int) -> list[Example]:
    """Examples for scoring; the same for the same words and count, without repetition.

    Raises:
      ValueError: the variant has no skill.
    """
    rng = np.random.default_rng((recipe.SEED, 1))
    found: dict[Example, None] = {}
    while len(found) < count:
        found[recipe.draw_example(variant, unseen, rng)] = None
    return list(found)


@dataclasses.dataclass(frozen=True)
class Exam:
    """What a variant is scored on: examples, or windows of text; the other one is None."""

    examples: list[evaluate.Example] | None
    windows: np.ndarray | None

    def score(self, config: ModelConfig, params: Params) -> float:
        """The share of exact answers, or bits per byte."""
        if self.examples is not None:
            return round(evaluate.exact_match(config, params, self.examples, batch=125), 4)
        if self.windows is None:
            raise ValueError("the exam has neither examples nor windows")
        return round(evaluate.bits_per_byte(config, params, self.windows), 4)


def make_exam(variant: VariantRecipe, texts: Path) -> Exam:
    """The exam of a variant; texts are fetched into a folder if need be."""
    if variant.corpus is not None:
        corpus = corpora.load(variant.corpus, texts)
        return Exam(None, held_out_windows(corpus, WINDOWS, WINDOW_BYTES, recipe.SEED))
    _, unseen = tasks.split_words(corpora.load_words(texts))
    return Exam(tokenised(held_out_examples(variant, unseen, SAMPLES)), None)


def score_variant(family: Path, variant: VariantRecipe, texts: Path) -> dict[str, Any]:
    """A variant's entry in scores.json: how it is called, scored, and what it scores.

    For a skill it also holds some of the exam's examples with their own counts of right answers,
    so that scores can be checked where no text is at hand.
    """
    config, base = residual.read_folder(family / "base")
    path = family / "residuals" / f"{variant.name}.safetensors"
    tuned = residual.load_residual(path, family / "base", base)
    models = {
        "base": residual.float32_params(config, base),
        "full": residual.float32_params(config, tuned),
        "one_bit_per_row": one_bit_params(config, base, tuned),
    }
    exam = make_exam(variant, texts)
    entry: dict[str, Any] = {
        "title": variant.title,
        "metric": variant.metric,
        "better": "higher" if variant.skill else "lower",
        **{name: exam.score(config, params) for name, params in models.items()},
        "prompt": variant.prompt + ("\n" if variant.skill else ""),
    }
    if variant.skill is None:
        return entry | {"samples": f"{WINDOWS} windows of {WINDOW_BYTES} bytes"}
    _, unseen = tasks.split_words(corpora.load_words(texts))
    probes = held_out_examples(variant, unseen, PROBES)
    right = {
        name: int(evaluate.exact_matches(config, params, tokenised(probes), PROBES).sum())
        for name, params in models.items()
    }
    return entry | {
        "samples": SAMPLES,
        "probes_right": right,
        "probes": [{"prompt": e.prompt + "\n", "answer": e.answer} for e in probes],
    }


def _texts_used(texts: Path) -> dict[str, Any]:
    """Package, licence and digest of every text of the recipe, as it was found."""
    names = [*recipe.BASE_TEXT, *(v.corpus for v in VARIANTS.values() if v.corpus)]
    used = {}
    for name in names:
        corpus, source = corpora.load(name, texts), corpora.SOURCES[name]
        used[name] = {
            "package": f"{source.client}: {source.package}",
            "licence": source.licence,
            "bytes": sum(map(len, corpus.train + corpus.held_out)),
            "sha256": corpus.sha256,
        }
    return used


def score_family(family: Path, texts: Path) -> dict[str, Any]:
    """Scores all variants and writes FAMILY/scores.json.

    Raises:
      ValueError: a variant is missing or does not fit the base, or texts cannot be fetched.
    """
    scores: dict[str, Any] = {
        "format": 1,
        "seed": recipe.SEED,
        "held_out": HELD_OUT,
        "one_bit": "1 bit per weight, embedding included, float32 scale per row, not distilled",
        "base_sha256": residual.file_digest(family / "base" / residual.WEIGHTS),
        "texts": _texts_used(texts),
        "variants": {name: score_variant(family, v, texts) for name, v in VARIANTS.items()},
    }
    temporary = family / ".scores.json.part"
    temporary.write_text(json.dumps(scores, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(family / "scores.json")
    return scores
