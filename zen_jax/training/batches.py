"""Batches of tokens with weights: examples of tasks, and windows of text.

A batch is a pure function of a random generator, so that a run which is resumed at a step sees what
an uninterrupted one does.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from zen_jax.training.bytes_tokenizer import BOS, EOS, PAD, TASK
from zen_jax.training.corpora import Corpus
from zen_jax.training.tasks import Example, Skill

Rng = np.random.Generator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What one forward pass sees; a pytree.

    Attributes:
      tokens: int32[B, T + 1]; inputs are all but the last, targets all but the first.
      weights: float32[B, T], what each target counts in the loss; 0 leaves it out.
    """

    tokens: np.ndarray
    weights: np.ndarray


def task_ids(skill: Skill) -> tuple[int, int]:
    """The two tokens in front of a task in the base's training; no typed text makes them."""
    return TASK, ord(skill.tag)


def prompt_ids(prompt: str, tag: Sequence[int] = ()) -> list[int]:
    """<|bos|>, a tag if any, the prompt's bytes and a line's end: what the answer follows."""
    return [BOS, *tag, *prompt.encode(), 10]


def example_batch(
    examples: Sequence[tuple[Example, Sequence[int]]], length: int, weight: float = 1.0
) -> Batch:
    """One example (and its tag) a row, padded to `length` tokens; only answers and their end count.

    Raises:
      ValueError: an example is longer than that.
    """
    tokens = np.full((len(examples), length + 1), PAD, np.int32)
    weights = np.zeros((len(examples), length), np.float32)
    for row, (example, tag) in enumerate(examples):
        start = prompt_ids(example.prompt, tag)
        ids = [*start, *example.answer.encode(), EOS]
        if len(ids) > length + 1:
            raise ValueError(f"an example has {len(ids)} tokens; there is room for {length + 1}")
        tokens[row, : len(ids)] = ids
        weights[row, len(start) - 1 : len(ids) - 1] = weight
    return Batch(tokens, weights)


def text_batch(
    corpora: Sequence[Corpus], shares: Sequence[float], rng: Rng, shape: tuple[int, int]
) -> Batch:
    """Windows of training text, each after <|bos|> and from the start of a line.

    Args:
      corpora: where to draw from.
      shares: relative frequency of each corpus.
      rng: the source of chance.
      shape: (B, T).
    """
    rows, length = shape
    probabilities = np.asarray(shares, float) / np.sum(shares)
    tokens = np.full((rows, length + 1), PAD, np.int32)
    for row in range(rows):
        corpus = corpora[int(rng.choice(len(corpora), p=probabilities))]
        tokens[row] = _window(corpus.train, rng, length + 1)
    return Batch(tokens, np.where(tokens[:, 1:] == PAD, 0.0, 1.0).astype(np.float32))


def _window(documents: Sequence[bytes], rng: Rng, length: int) -> np.ndarray:
    """<|bos|> and length - 1 bytes; documents are drawn by how long they are, in passing."""
    result = np.full(length, PAD, np.int32)
    result[0] = BOS
    document = b""
    for _ in range(4):  # prefer documents that fill the window
        document = documents[int(rng.integers(len(documents)))]
        if len(document) >= length * 2:
            break
    start = int(rng.integers(max(1, len(document) - length + 2)))
    start = document.rfind(b"\n", 0, start) + 1
    piece = np.frombuffer(document[start : start + length - 1], np.uint8)
    result[1 : 1 + len(piece)] = piece
    if 1 + len(piece) < length:
        result[1 + len(piece)] = EOS
    return result


def held_out_windows(corpus: Corpus, count: int, length: int, seed: int) -> np.ndarray:
    """int32[count, length + 1] windows of held-out text, all filled, from starts of lines.

    Raises:
      ValueError: no held-out document is long enough.
    """
    rng = np.random.default_rng(seed)
    documents = [d for d in corpus.held_out if len(d) > length + 1]
    if not documents:
        raise ValueError(f"{corpus.name} has no held-out document of more than {length} bytes")
    sizes = np.asarray([len(d) for d in documents], float)
    windows = []
    while len(windows) < count:
        document = documents[int(rng.choice(len(documents), p=sizes / sizes.sum()))]
        start = document.rfind(b"\n", 0, int(rng.integers(len(document) - length))) + 1
        windows.append([BOS, *document[start : start + length]])
    return np.asarray(windows, np.int32)
