"""Held-out tokens that models are examined on."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from zen_jax.evaluate import Example


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Held-out tokens that models are examined on.

    Attributes:
      tokens: int32[n, T + 1]; inputs are all but the last, targets all but the first.
      counted: bool[n, T], the targets that count.
      answers: whether the counted targets of a row are an answer to be given exactly.
      batch: rows of a forward pass.
    """

    tokens: np.ndarray
    counted: np.ndarray
    answers: bool
    batch: int

    @classmethod
    def of_examples(cls, examples: Sequence[Example], batch: int, length: int = 16) -> "Sheet":
        """From (prompt, answer) token ids; the answers count. Rows are padded to a multiple of 16,
        and to `length` at least.

        Raises:
          ValueError: there are none, or one has an empty prompt.
        """
        if not examples or not all(prompt for prompt, _ in examples):
            raise ValueError("expected at least one example, each with a prompt")
        length = max(length, *(len(prompt) + len(answer) for prompt, answer in examples))
        tokens = np.zeros((len(examples), -(-length // 16) * 16), np.int32)
        counted = np.zeros((len(examples), tokens.shape[1] - 1), bool)
        for row, (prompt, answer) in enumerate(examples):
            end = len(prompt) + len(answer)
            tokens[row, :end] = [*prompt, *answer]
            counted[row, len(prompt) - 1 : end - 1] = True
        return cls(tokens, counted, True, batch)

    @classmethod
    def of_windows(cls, windows: np.ndarray, batch: int) -> "Sheet":
        """From windows of text int32[n, T + 1]; all but each one's first token count."""
        counted = np.ones((windows.shape[0], windows.shape[1] - 1), bool)
        return cls(windows.astype(np.int32), counted, False, batch)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens int32[batch, T + 1], counted bool[batch, T]); the last one is padded with rows
        in which nothing counts."""
        for start in range(0, len(self.tokens), self.batch):
            tokens = self.tokens[start : start + self.batch]
            missing = ((0, self.batch - len(tokens)), (0, 0))
            counted = self.counted[start : start + self.batch]
            yield np.pad(tokens, missing), np.pad(counted, missing)

    def part(self, rows: int, batch: int) -> "Sheet":
        """At most `rows` of its rows, spread evenly, at most `batch` in a forward pass."""
        count = len(self.tokens)
        at = np.linspace(0, count - 1, min(rows, count)).astype(int)
        return Sheet(self.tokens[at], self.counted[at], self.answers, min(batch, len(at)))

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked, in hex."""
        hashed = hashlib.sha256(repr((self.tokens.shape, self.answers)).encode())
        hashed.update(self.tokens.tobytes())
        hashed.update(self.counted.tobytes())
        return hashed.hexdigest()
