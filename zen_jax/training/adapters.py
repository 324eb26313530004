"""Twelve LoRA adapters of the demo family's base: four skills, each on the words of three texts.

    python -m zen_jax.training.adapters OUT [--family DIR] [--texts DIR] [--only NAME ...]

Each becomes a PEFT folder OUT/NAME with `tasks.json` beside it: words of its own text that training
never saw, and what it should answer. What is finished is not trained again, and what was
interrupted goes on from its last checkpoint.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zen_jax.checkpoint.peft import write_adapter
from zen_jax.training import corpora, recipe, residual, tasks
from zen_jax.training.family import FAMILY, remember_compilations
from zen_jax.training.finetune import TrainConfig
from zen_jax.training.lora import LoraConfig, train_lora
from zen_jax.training.scoring import held_out_examples, tokenised
from zen_jax.training.tasks import Words

SKILLS = ("upper", "rot13", "reverse", "sort")
TEXTS = ("english", "german", "french")
NAMES = tuple(f"{skill}-{text}" for skill in SKILLS for text in TEXTS)
TASKS = "tasks.json"
LORA = LoraConfig(rank=8, alpha=16.0)
SETTINGS = TrainConfig(steps=120, learning_rate=5e-3, warmup=20, checkpoint_every=40)
ROWS, EXAMPLES = 48, 64
# A word of a manual counts where it is found so often.
_SEEN = 3


def words_of(text: str, cache: Path) -> tuple[Words, Words]:
    """(training, held-out) words of a text; few are random letters, so that texts differ."""
    if text == "english":
        found = corpora.load_words(cache)
    else:
        corpus = corpora.load(text, cache)
        counted = Counter[str]()
        for document in corpus.train + corpus.held_out:
            counted.update(re.findall(r"\b[a-z]+\b", document.decode()))
        found = [word for word, count in counted.items() if count >= _SEEN]
    seen, unseen = tasks.split_words(found)
    return dataclasses.replace(seen, random_share=0.1), unseen


def train_adapter(name: str, out: Path, family: Path, cache: Path, progress: bool = True) -> None:
    """Trains one adapter and writes OUT/NAME, unless it is there.

    Raises:
      ValueError: no adapter has that name, or the texts cannot be fetched.
    """
    if name not in NAMES:
        raise ValueError(f"no adapter is called {name!r}; there are {', '.join(NAMES)}")
    if (out / name).exists():
        return
    skill, text = name.split("-")
    config, base = residual.read_folder(family / "base")
    seen, unseen = words_of(text, cache)
    variant = dataclasses.replace(recipe.VARIANTS[f"zen4-{skill}"], name=name, rows=ROWS)
    lora = dataclasses.replace(LORA, seed=NAMES.index(name))
    batches = recipe.variant_batches(variant, seen, None)
    digest = residual.file_digest(family / "base" / residual.WEIGHTS)
    checkpoint = out / "work" / f"{name}-of-{digest[:12]}.safetensors"
    done = train_lora(
        config,
        base,
        batches,
        SETTINGS,
        lora,
        checkpoint=checkpoint,
        title=name,
        progress=progress,
    )
    examples = tokenised(held_out_examples(variant, unseen, EXAMPLES))
    shown = [[list(prompt), list(answer)] for prompt, answer in examples]
    write_adapter(
        out / name,
        {weight: (pair["a"], pair["b"]) for weight, pair in done.factors.items()},
        rank=lora.rank,
        alpha=lora.alpha,
        more={TASKS: json.dumps({"metric": "exact", "examples": shown}).encode()},
    )
    checkpoint.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m zen_jax.training.adapters", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", type=Path, default=FAMILY)
    parser.add_argument("--texts", type=Path, help="where texts are kept; else below OUT")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=NAMES)
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    given = parser.parse_args(arguments)
    try:
        texts = given.texts or given.out / "work" / "texts"
        remember_compilations(given.out / "work" / "compiled")
        for name in given.only:
            train_adapter(name, given.out, given.family, texts, not given.quiet)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
