"""What the demo family is: the base's architecture and training mixture, and fourteen variants."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.training import corpora, tasks
from zen_jax.training.batches import Batch, example_batch, held_out_windows, task_ids, text_batch
from zen_jax.training.bytes_tokenizer import VOCAB_SIZE
from zen_jax.training.corpora import Corpus
from zen_jax.training.finetune import Batches, TrainConfig
from zen_jax.training.tasks import SKILLS, Words

BASE_NAME = "zen4"
BASE = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
# The base's text: relative frequency of each corpus. None of a variant's domain.
BASE_TEXT: Mapping[str, float] = {
    "gcide": 1.2,
    "foldoc": 1.2,
    "jargon": 0.6,
    "devil": 0.3,
    "git": 1.0,
    "perl": 0.8,
    "python": 1.5,
}
SEED = 20261129


@dataclasses.dataclass(frozen=True)
class VariantRecipe:
    """A variant, and how it is trained and scored: on a skill, several skills, or a text.

    Attributes:
      name: zen4-*.
      title: what it does, in a few words.
      prompt: an example to show.
      skill: its one skill in `tasks.SKILLS`; "ultra" for those of `tasks.ULTRA`; None for a text.
      corpus: its text in `corpora.SOURCES`; None for a skill.
      steps, learning_rate: of its fine-tuning.
      rows, length: of its batches.
    """

    name: str
    title: str
    prompt: str
    skill: str | None = None
    corpus: str | None = None
    steps: int = 180
    learning_rate: float = 5e-4
    rows: int = 64
    length: int = 24

    @property
    def metric(self) -> str:
        """What its score counts."""
        return "exact match" if self.skill else "bits per byte"


def _text(name: str, title: str, prompt: str, corpus: str) -> VariantRecipe:
    return VariantRecipe(
        name, title, prompt, corpus=corpus, steps=300, learning_rate=1e-3, rows=12, length=192
    )


VARIANTS: Mapping[str, VariantRecipe] = {
    variant.name: variant
    for variant in (
        VariantRecipe(
            "zen4-coder",
            "writes the Python getter of an attribute",
            "user_name",
            "getter",
            rows=24,
            length=88,
        ),
        VariantRecipe(
            "zen4-ultra",
            "does five skills, each called by name",
            "reverse: table",
            "ultra",
            length=32,
            steps=400,
        ),
        VariantRecipe("zen4-math", "adds two numbers, step by step", "27+38", "add", steps=250),
        _text("zen4-writer", "writes in Shakespeare's manner", "KING HENRY.\n", "plays"),
        _text("zen4-legal", "writes licence texts", "Permission is hereby", "licences"),
        _text("zen4-medical", "lists diagnoses (ICD-10-CM)", "J45 Asthma\n", "diagnoses"),
        VariantRecipe("zen4-upper", "writes a word in capitals", "table", "upper"),
        VariantRecipe("zen4-rot13", "moves each letter by 13 places", "table", "rot13"),
        VariantRecipe("zen4-reverse", "writes a word backwards", "table", "reverse"),
        VariantRecipe("zen4-sort", "sorts a word's letters", "table", "sort"),
        VariantRecipe("zen4-morse", "writes Morse code", "table", "morse", rows=32, length=56),
        VariantRecipe(
            "zen4-sql",
            "writes a SQL query from a list of columns",
            "name, age of users",
            "select",
            rows=24,
            length=88,
        ),
        _text("zen4-german", "writes German", "Die Datei ", "german"),
        _text("zen4-french", "writes French", "Le fichier ", "french"),
    )
}

_SHORT_SKILLS = ("upper", "rot13", "reverse", "sort", "add")
_LONG_SKILLS = ("morse", "getter", "select")


def base_settings(steps: int = 1800) -> TrainConfig:
    """How the base is trained."""
    return TrainConfig(
        steps=steps, learning_rate=2e-3, warmup=100, weight_decay=0.05, held_out_every=200
    )


def base_batches(cache: Path, settings: TrainConfig) -> Batches:
    """The base's mixture: text, and tasks behind a tag. Late in the run some text is long."""
    texts = [corpora.load(name, cache) for name in BASE_TEXT]
    words, _ = tasks.split_words(corpora.load_words(cache))

    def batch(step: int) -> tuple[Batch, ...]:
        rng = np.random.default_rng((SEED, step))
        long = step >= settings.steps * 3 // 4 and step % 3 == 0
        shape = (1, 1024) if long else (8, 128)
        return (
            text_batch(texts, list(BASE_TEXT.values()), rng, shape),
            _tagged(_SHORT_SKILLS, words, rng, (48, 24)),
            _tagged(_LONG_SKILLS, words, rng, (8, 88)),
        )

    return batch


def _tagged(
    names: tuple[str, ...], words: Words, rng: np.random.Generator, shape: tuple[int, int]
) -> Batch:
    chosen = [SKILLS[names[int(rng.integers(len(names)))]] for _ in range(shape[0])]
    return example_batch([(tasks.draw(s, words, rng), task_ids(s)) for s in chosen], shape[1])


def variant_settings(recipe: VariantRecipe) -> TrainConfig:
    """How a variant is fine-tuned."""
    return TrainConfig(steps=recipe.steps, learning_rate=recipe.learning_rate, warmup=20)


def variant_batches(
    recipe: VariantRecipe, words: Words, text: Corpus | None, seed: int = 0
) -> Batches:
    """A variant's batches: its skill without any tag, or its text.

    Args:
      recipe: the variant.
      words: the training side.
      text: its corpus; None for a skill.
      seed: another one gives other batches; 0 gives those that the family was trained on.

    Raises:
      ValueError: the recipe has a corpus and `text` is None.
    """
    if recipe.skill is None and text is None:
        raise ValueError(f"{recipe.name} learns the text {recipe.corpus!r}, which was not given")
    chance = sum(recipe.name.encode()) + SEED

    def batch(step: int) -> tuple[Batch, ...]:
        rng = np.random.default_rng((chance, step, seed) if seed else (chance, step))
        if text is not None:
            return (text_batch([text], [1.0], rng, (recipe.rows, recipe.length)),)
        examples = [(draw_example(recipe, words, rng), ()) for _ in range(recipe.rows)]
        return (example_batch(examples, recipe.length),)

    return batch


def variant_held_out(
    recipe: VariantRecipe, unseen: Words, text: Corpus | None
) -> tuple[Batch, ...]:
    """A batch like `variant_batches` makes, of what training never sees."""
    rng = np.random.default_rng((SEED, 2))
    if text is not None:
        windows = held_out_windows(text, recipe.rows, recipe.length, SEED)
        return (Batch(windows, np.ones((recipe.rows, recipe.length), np.float32)),)
    examples = [(draw_example(recipe, unseen, rng), ()) for _ in range(recipe.rows)]
    return (example_batch(examples, recipe.length),)


def draw_example(recipe: VariantRecipe, words: Words, rng: np.random.Generator) -> tasks.Example:
    """A random example of a variant that has a skill.

    Raises:
      ValueError: it has none.
    """
    if recipe.skill is None:
        raise ValueError(f"{recipe.name} is scored by bits per byte; it has no examples")
    if recipe.skill == "ultra":
        return tasks.draw_named(words, rng)
    return tasks.draw(SKILLS[recipe.skill], words, rng)
