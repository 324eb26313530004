"""One fine-tune of a real model as a subject: SmolLM2-135M-Instruct, a little German.

The base is dequantised from Q4_1 and rounded to bfloat16; what that lost is lost on both sides.
Fine-tuning is full, over German manual pages; a tenth of the pages is held out.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from zen_jax.checkpoint.source import Source, open_source
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import unfuse
from zen_jax.training import corpora, residual, scoring
from zen_jax.training.batches import Batch
from zen_jax.training.finetune import TrainConfig, train
from zen_jax.training.format_study.formats import FORMATS, LEVELS, REFERENCE, ZEROS, Format
from zen_jax.training.format_study.measure import tensors_digest
from zen_jax.training.format_study.study import Subject, write_json
from zen_jax.training.residual import Tensors

BASE = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
STEPS = 20
LEARNING_RATE = 1e-4
CORPUS = "german"
ROWS, LENGTH = 8, 256
HELD_OUT_WINDOWS = 16
SERVED_ROWS = 8  # windows of each fine-tune that go through decode steps
SEED = 20261130
# The same update, made smaller: in bfloat16 most of it is rounded away, as in a short fine-tune.
SMALLER = 0.1
TITLES = {"german": "German, 20 steps", "german-tenth": "German, a tenth of the update"}
# The fine-tune whose delta lies in the repository.
KEPT = "german"
DELTA = "smollm2-german.safetensors"
_ZERO_FORMATS = tuple(f for f in FORMATS.values() if f.group in (REFERENCE, ZEROS, LEVELS))


@dataclasses.dataclass(frozen=True)
class Windows:
    """Text as tokens, cut into windows int32[n, T + 1] that overlap by one token."""

    train: np.ndarray
    held_out: np.ndarray


def cut(documents: Iterable[Sequence[int]], end: int, length: int) -> np.ndarray:
    """Documents one after the other, `end` after each, as windows int32[n, length + 1]; the first
    token of a window is the last of the one before.

    Raises:
      ValueError: there is less than one window.
    """
    stream = [token for document in documents for token in (*document, end)]
    count = (len(stream) - 1) // length
    if count < 1:
        raise ValueError(f"the text has {len(stream)} tokens; expected more than {length}")
    tokens = np.asarray(stream[: count * length + 1], np.int32)
    starts = np.arange(count)[:, None] * length
    return tokens[starts + np.arange(length + 1)]


def read_windows(folder: Path, texts: Path) -> Windows:
    """The corpus in a folder's tokens.

    Raises:
      ValueError: the text cannot be fetched, or the tokenizer has no end of text.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is None:
        raise ValueError(f"{folder} has no token <|endoftext|>; is it SmolLM2?")
    corpus = corpora.load(CORPUS, texts)

    def windows(documents: Sequence[bytes]) -> np.ndarray:
        decoded = [document.decode(errors="replace") for document in documents]
        encoded = tokenizer.encode_batch(decoded, add_special_tokens=False)
        return cut((e.ids for e in encoded), end, LENGTH)

    return Windows(windows(corpus.train), windows(corpus.held_out))


def write_base(source: Source, folder: Path) -> None:
    """Writes a checkpoint as a Hugging Face folder in bfloat16, once."""
    if (folder / residual.WEIGHTS).exists():
        return
    files = folder.with_name(folder.name + "-files")
    files.mkdir(parents=True, exist_ok=True)
    for name, content in source.tokenizer_files().items():
        (files / name).write_bytes(content)
    settings = json.dumps(source.config.to_hf() | {"torch_dtype": "bfloat16"}, indent=2)
    (files / "config.json").write_text(settings + "\n", encoding="utf-8")
    tensors = residual.round_tensors({name: source.read(name) for name in source.tensors})
    residual.write_folder(folder, tensors, files)


def batches(windows: np.ndarray) -> Callable[[int], tuple[Batch, ...]]:
    """Step -> the windows it sees: all of them in a random order, over and over."""
    order = np.random.default_rng(SEED).permutation(len(windows))

    def batch(step: int) -> tuple[Batch, ...]:
        chosen = order[np.arange(step * ROWS, (step + 1) * ROWS) % len(order)]
        tokens = windows[chosen]
        return (Batch(tokens, np.ones((ROWS, tokens.shape[1] - 1), np.float32)),)

    return batch


def held_out_sheet(windows: np.ndarray) -> Sheet:
    """Windows spread evenly over the held-out text."""
    at = np.linspace(0, len(windows) - 1, min(HELD_OUT_WINDOWS, len(windows))).astype(int)
    return Sheet.of_windows(windows[at], batch=2)


def settings(steps: int) -> TrainConfig:
    """How SmolLM2 is fine-tuned."""
    return TrainConfig(
        steps=steps,
        learning_rate=LEARNING_RATE,
        warmup=2,
        held_out_every=steps,
        checkpoint_every=5,
    )


def fine_tune(work: Path, windows: np.ndarray, steps: int, progress: bool = True) -> Path:
    """Fine-tunes WORK/base and writes the result and its smaller twin, each a Hugging Face folder;
    goes on from the last checkpoint, and does nothing when both are there.

    Args:
      work: holds base/; gets N-steps/german and N-steps/german-tenth.
      windows: int32[n, T + 1] of training text.
      steps: updates.
      progress: whether to show a bar.

    Returns:
      WORK/N-steps.

    Raises:
      ValueError: what is there was made from another base.
    """
    out = work / f"{steps}-steps"
    digest = {"base_sha256": residual.file_digest(work / "base" / residual.WEIGHTS)}
    marker = out / "base.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) != digest:
        raise ValueError(f"{out} was made from another base; remove it")
    write_json(marker, digest)
    if all((out / name / residual.WEIGHTS).exists() for name in TITLES):
        return out
    config, base = residual.read_folder(work / "base")
    start = residual.float32_params(config, base)
    done = train(
        config,
        start,
        batches(windows),
        settings(steps),
        checkpoint=out / "checkpoint.safetensors",
        title="SmolLM2",
        progress=progress,
    )
    tuned = {name: np.asarray(value) for name, value in unfuse(config, done.params).items()}
    smaller = {n: b.astype(np.float32) for n, b in base.items()}
    smaller = {n: b + np.float32(SMALLER) * (tuned[n] - b) for n, b in smaller.items()}
    for name, tensors in (("german", tuned), ("german-tenth", smaller)):
        residual.write_folder(out / name, residual.round_tensors(tensors), work / "base")
    return out


def delta_parts(base: Tensors, tuned: Tensors) -> Tensors:
    """A fine-tune's delta in the default format: NAME.bits uint8[1, O, ceil(I / 8)] and NAME.scale
    float32[1, O] of each matrix, NAME float32[D] of each vector that changed."""
    parts: Tensors = {}
    for name, delta in scoring.one_bit_deltas(base, tuned).items():
        if delta.bits is not None:
            parts[f"{name}.bits"] = np.asarray(delta.bits)
            parts[f"{name}.scale"] = np.asarray(delta.scale)
        elif delta.dense is not None:
            parts[name] = np.asarray(delta.dense)
    return parts


def delta_digest(parts: Tensors) -> str:
    """SHA-256 of a delta as `delta_parts` gives it, vectors left out, in hex."""
    return tensors_digest({n: v for n, v in parts.items() if n.endswith((".bits", ".scale"))})


def write_delta(work: Path, steps: int, path: Path) -> None:
    """Writes the first fine-tune's delta, with how it was made under "about" in the metadata; whole
    or not at all. Equal deltas make equal files.

    Args:
      work: as `fine_tune` left it.
      steps: of fine-tuning.
      path: of the safetensors file.

    Raises:
      ValueError: a folder of weights is missing or damaged.
    """
    _, base = residual.read_folder(work / "base")
    _, tuned = residual.read_folder(work / f"{steps}-steps" / KEPT)
    parts = delta_parts(base, tuned)
    told = about(steps) | {
        "title": TITLES[KEPT],
        "delta": "W_base + scale sign: NAME.bits, packed along the input, bit k of byte j is input "
        "8 j + k, 1 is +1; NAME.scale of each row; NAME is added to a vector",
        "made_by": "make format-study-smollm2",
        "base_sha256": residual.file_digest(work / "base" / residual.WEIGHTS),
        "delta_sha256": delta_digest(parts),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    # One entry: safetensors writes several in any order.
    save_file(parts, temporary, metadata={"about": json.dumps(told)})
    temporary.replace(path)


def subjects(
    base: Path, work: Path, texts: Path, steps: int = STEPS, progress: bool = True
) -> Mapping[str, Callable[[], Subject]]:
    """Variant -> what makes its subject. Fine-tunes first, if need be.

    Args:
      base: SmolLM2-135M-Instruct, a GGUF file or a Hugging Face folder.
      work: gets the base in bfloat16, checkpoints and fine-tunes.
      texts: a cache of texts.
      steps: of fine-tuning.
      progress: whether to show a bar while that runs.

    Raises:
      ValueError: the base is missing or damaged, texts cannot be fetched, or what was fine-tuned
        before started from another base.
    """
    write_base(open_source(base), work / "base")
    windows = read_windows(work / "base", texts)
    out = fine_tune(work, windows.train, steps, progress)
    sheet = held_out_sheet(windows.held_out)

    def make(name: str, formats: Sequence[Format]) -> Subject:
        config, start = residual.read_folder(work / "base")
        _, tuned = residual.read_folder(out / name)
        digests = {
            "tuned_sha256": tensors_digest(tuned),
            "delta_sha256": delta_digest(delta_parts(start, tuned)),
        }
        return Subject(name, TITLES[name], config, start, tuned, sheet, formats, digests)

    return {
        "german": partial(make, "german", tuple(FORMATS.values())),
        "german-tenth": partial(make, "german-tenth", _ZERO_FORMATS),
    }


def about(steps: int) -> dict[str, Any]:
    """What docs/format.json says of the whole study."""
    return {
        "base": "SmolLM2-135M-Instruct from Q4_1",
        "text": corpora.SOURCES[CORPUS].package,
        "steps": steps,
        "tokens_per_step": ROWS * LENGTH,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
    }
