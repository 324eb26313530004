"""Texts and tasks from files, as sheets: what models are asked.

Where something is wrong with a file, its name and the line are said, never what stands there.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.evaluate import Example
from zen_jax.evaluation.sheet import Sheet
from zen_jax.tokenizer import Tokenizer

# Logits of one forward pass take at most about this many bytes.
_LOGITS = 128 << 20
_MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is asked, and of whom.

    Attributes:
      vocab: tokens that all models have.
      positions: of the model with the fewest.
      length: tokens of a window of text.
      windows: of a text at most, spread evenly over it.
      examples: of a file of tasks at most, spread evenly; of a generated set exactly.
    """

    vocab: int
    positions: int
    length: int = 256
    windows: int = 64
    examples: int = 200

    def batch(self, rows: int, length: int) -> int:
        """Rows of a forward pass over `length` tokens."""
        return max(1, min(rows, _MOST_ROWS, _LOGITS // (4 * length * self.vocab)))


@dataclasses.dataclass(frozen=True)
class TestSet:
    """One set of questions.

    Attributes:
      name: of the file, or of the generator.
      edge: whether it lies at the edge of what the fine-tune was made for; such sets are reported
        apart.
      sheet: the questions as tokens.
      row_bytes: float64[n], bytes of text that each row's counted tokens stand for; None for tasks.
    """

    __test__ = False  # pytest takes the name for a test's

    name: str
    edge: bool
    sheet: Sheet
    row_bytes: np.ndarray | None = None


def read_text(path: Path, tokenizer: Tokenizer, limits: Limits, edge: bool = False) -> TestSet:
    """A file of UTF-8 text as windows, each begun as the tokenizer begins a text.

    A text that is shorter than a window is one short window; else what is left at the end is not
    asked.

    Raises:
      ValueError: the file is empty or no UTF-8, or has tokens that not all models have.
      OSError: it cannot be read.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: byte {error.start} is wrong") from None
    start = tokenizer.encode("a")[: -len(tokenizer.encode("a", add_bos=False))]
    ids = tokenizer.encode(text, add_bos=False) if text.strip() else []
    if len(ids) + len(start) < 2:
        raise ValueError(f"{path} is empty; expected text")
    _check_ids(str(path), ids, limits.vocab)
    length = min(limits.length, limits.positions)
    windows = _windows(start, ids, length, limits.windows)
    counted = np.zeros((len(windows), length), bool)
    tokens = np.zeros((len(windows), length + 1), np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window)] = window
        counted[row, max(len(start), 1) - 1 : len(window) - 1] = True
    sizes = [[len(tokenizer.token_bytes(int(i)) or b"") for i in row] for row in tokens[:, 1:]]
    row_bytes = np.sum(np.asarray(sizes, np.float64) * counted, axis=1)
    sheet = Sheet(tokens, counted, False, limits.batch(len(windows), length))
    return TestSet(path.stem, edge, sheet, row_bytes)


def _windows(start: list[int], ids: list[int], length: int, most: int) -> list[list[int]]:
    """At most `most` windows of length + 1 tokens; without a start, each one's first token is the
    last one of the window before."""
    step = length + 1 - len(start) if start else length
    count = (len(ids) - (0 if start else 1)) // step
    if count < 1:
        return [[*start, *ids]]
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))
    return [[*start, *ids[i * step : (i + 1) * step + (0 if start else 1)]] for i in chosen]


def read_tasks(
    path: Path, tokenizer: Tokenizer, limits: Limits, edge: bool = False, chat: bool = False
) -> TestSet:
    """A file of tasks with exact answers: a line of JSON each, {"prompt": ..., "answer": ...}.

    An answer is right if greedy decoding gives all of its tokens and then ends, where the model has
    an end. Prompt and answer are made tokens apart, as they meet when a server answers.

    Args:
      path: the file.
      tokenizer: of the fine-tune.
      limits: how many, and how long at most.
      edge: see `TestSet`.
      chat: each prompt is a user's message, put into the chat template.

    Raises:
      ValueError: there is no task, or one is malformed, too long, or has tokens that not all models
        have; the line is named.
      OSError: the file cannot be read.
    """
    tasks: list[tuple[int, str, str]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            prompt, answer = _task(f"{path} line {number}", line)
            tasks.append((number, prompt, answer))
    if not tasks:
        raise ValueError(f'{path} is empty; expected lines of {{"prompt": ..., "answer": ...}}')
    chosen = np.linspace(0, len(tasks) - 1, min(limits.examples, len(tasks))).astype(int)
    examples = []
    for number, prompt, answer in (tasks[i] for i in chosen):
        example = task_tokens(tokenizer, prompt, answer, chat)
        _check_example(f"{path} line {number}", example, limits)
        examples.append(example)
    return of_examples(path.stem, examples, limits, edge)


def of_examples(name: str, examples: Sequence[Example], limits: Limits, edge: bool) -> TestSet:
    """A set of tasks that are tokens already."""
    length = max(len(prompt) + len(answer) for prompt, answer in examples)
    return TestSet(name, edge, Sheet.of_examples(examples, limits.batch(len(examples), length)))


def task_tokens(tokenizer: Tokenizer, prompt: str, answer: str, chat: bool = False) -> Example:
    """A task's prompt and answer as tokens; the answer ends with the model's end, if it has one.

    Raises:
      ValueError: the text is no valid Unicode, or there is no chat template.
    """
    ids = (
        tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    )
    ends = sorted(tokenizer.eos_ids)[:1]
    return ids, [*tokenizer.encode(answer, add_bos=False), *ends]


def _task(where: str, line: bytes) -> tuple[str, str]:
    try:
        fields: Any = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is no UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{where} is no JSON; expected an object with prompt and answer") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is no JSON object; expected one with prompt and answer")
    for name in ("prompt", "answer"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise ValueError(f"{where} has no text called {name!r}")
    return fields["prompt"], fields["answer"]


def _check_example(where: str, example: Example, limits: Limits) -> None:
    prompt, answer = example
    if not prompt or not answer:
        raise ValueError(f"{where}: prompt or answer has no tokens")
    room = limits.positions // 16 * 16  # rows are padded to multiples of 16
    if len(prompt) + len(answer) > room:
        raise ValueError(f"{where} has {len(prompt) + len(answer)} tokens; at most {room}")
    _check_ids(where, [*prompt, *answer], limits.vocab)


def _check_ids(where: str, ids: Sequence[int], vocab: int) -> None:
    if max(ids, default=0) >= vocab:
        raise ValueError(f"{where} has the token {max(ids)}; not all models have more than {vocab}")
