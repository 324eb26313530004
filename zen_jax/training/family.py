"""The demo family: trains the base and its fourteen fine-tunes again, scores them, writes them out.

    python -m zen_jax.training.family train [--out DIR] [--only NAME ...]
    python -m zen_jax.training.family score [--family DIR] [--work DIR]
    python -m zen_jax.training.family full OUT [NAME ...]

`train` is resumable: it goes on from the last checkpoint, and nothing finished is trained again.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zen_jax.layout import unfuse
from zen_jax.model import init_params
from zen_jax.training import corpora, recipe, residual, tasks
from zen_jax.training.bytes_tokenizer import BOS, EOS, PAD, write_tokenizer
from zen_jax.training.finetune import TrainConfig, train
from zen_jax.training.recipe import VARIANTS, VariantRecipe
from zen_jax.training.residual import write_full
from zen_jax.training.scoring import score_family

__all__ = ["main", "train_family", "write_full"]

FAMILY = Path(__file__).resolve().parents[2] / "family"
FULL_EXAMPLE = "zen4-math"


def train_family(
    out: Path, work: Path, names: Sequence[str] | None = None, progress: bool = True
) -> None:
    """Trains whatever is not finished yet.

    Args:
      out: gets base/, residuals/ and full/zen4-math/.
      work: texts, checkpoints and compiled programs.
      names: variants to train; all by default.
      progress: whether to show bars.

    Raises:
      ValueError: there is no variant of a name, or texts cannot be fetched.
    """
    unknown = sorted(set(names or ()) - set(VARIANTS))
    if unknown:
        raise ValueError(f"no variant is called {', '.join(unknown)}; see {', '.join(VARIANTS)}")
    work.mkdir(parents=True, exist_ok=True)
    remember_compilations(work / "compiled")
    base = out / "base"
    if not (base / residual.WEIGHTS).exists():
        train_base(base, work, progress)
    for name in names or VARIANTS:
        if not _finished(out, name):
            train_variant(VARIANTS[name], out, work, progress)
    example = out / "full" / FULL_EXAMPLE
    if _finished(out, FULL_EXAMPLE) and not example.exists():
        write_full(out, out / "full", [FULL_EXAMPLE])


def remember_compilations(folder: Path) -> None:
    """Keeps compiled programs in a folder, as variants of one shape run the same one."""
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _finished(out: Path, name: str) -> bool:
    """Whether a variant's residual is there and belongs to the base that is there."""
    path = out / "residuals" / f"{name}.safetensors"
    if not path.exists():
        return False
    _, metadata = residual.read_safetensors(path)
    return metadata.get("base_sha256") == residual.file_digest(out / "base" / residual.WEIGHTS)


def train_base(
    folder: Path, work: Path, progress: bool = True, settings: TrainConfig | None = None
) -> None:
    """Trains the base and writes it as a Hugging Face folder in bfloat16.

    Args:
      folder: where to.
      work: texts and checkpoints.
      progress: whether to show a bar.
      settings: instead of the recipe's.
    """
    settings = settings or recipe.base_settings()
    start = init_params(recipe.BASE, jax.random.key(recipe.SEED))
    done = train(
        recipe.BASE,
        start,
        recipe.base_batches(work / "texts", settings),
        settings,
        checkpoint=work / f"{recipe.BASE_NAME}.safetensors",
        title=recipe.BASE_NAME,
        progress=progress,
    )
    like = work / "base-files"
    like.mkdir(parents=True, exist_ok=True)
    config = recipe.BASE.to_hf() | {
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }
    (like / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(like, recipe.BASE.max_position)
    tensors = residual.round_tensors(_numpy(unfuse(recipe.BASE, done.params)))
    residual.write_folder(folder, tensors, like)


def train_variant(
    variant: VariantRecipe, out: Path, work: Path, progress: bool = True
) -> tuple[float, ...]:
    """Fine-tunes the base that lies in OUT/base and writes OUT/residuals/NAME.safetensors.

    Args:
      variant: which.
      out: the family's folder.
      work: texts and checkpoints.
      progress: whether to show a bar.

    Returns:
      The loss of each step done.
    """
    began = time.monotonic()
    config, base = residual.read_folder(out / "base")
    digest = residual.file_digest(out / "base" / residual.WEIGHTS)
    words, unseen = tasks.split_words(corpora.load_words(work / "texts"))
    text = None if variant.corpus is None else corpora.load(variant.corpus, work / "texts")
    settings = recipe.variant_settings(variant)
    done = train(
        config,
        residual.float32_params(config, base),
        recipe.variant_batches(variant, words, text),
        settings,
        held_out=recipe.variant_held_out(variant, unseen, text),
        checkpoint=work / f"{variant.name}-of-{digest[:12]}.safetensors",
        title=variant.name,
        progress=progress,
    )
    encoded = residual.encode(base, _numpy(unfuse(config, done.params)))
    about = {
        "name": variant.name,
        "steps": str(settings.steps),
        "learning_rate": str(settings.learning_rate),
        "seconds": f"{time.monotonic() - began:.0f}",
    }
    residual.save_residual(
        out / "residuals" / f"{variant.name}.safetensors", out / "base", encoded, about
    )
    return done.losses


def _numpy(tensors: dict[str, Any]) -> residual.Tensors:
    return {name: np.asarray(value) for name, value in tensors.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zen_jax.training.family", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = FAMILY.parent / "build" / "family"
    again = commands.add_parser(
        "train", help="train what is not finished, then score; fetches texts by package name"
    )
    again.add_argument("--out", type=Path, default=build, help=f"the new family ({build})")
    again.add_argument("--work", type=Path, help="texts and checkpoints (OUT/work)")
    again.add_argument("--only", nargs="+", metavar="NAME", help="these variants; no scores then")
    again.add_argument("--quiet", action="store_true", help="no progress bars")
    score = commands.add_parser("score", help="score a family and write its scores.json")
    score.add_argument("--family", type=Path, default=FAMILY)
    score.add_argument("--work", type=Path, default=build / "work", help="texts")
    full = commands.add_parser("full", help="write fine-tunes as full Hugging Face folders")
    full.add_argument("out", type=Path)
    full.add_argument("names", nargs="*", metavar="NAME", help="which; all by default")
    full.add_argument("--family", type=Path, default=FAMILY)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "train":
            work = given.work or given.out / "work"
            began = time.monotonic()
            train_family(given.out, work, given.only, not given.quiet)
            if not given.only:
                score_family(given.out, work / "texts")
            print(f"{given.out}: done in {(time.monotonic() - began) / 60:.0f} minutes")
        elif given.command == "score":
            scores = score_family(given.family, given.work / "texts")
            print(json.dumps(scores, indent=2))
        else:
            for folder in write_full(given.family, given.out, given.names or None):
                print(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
