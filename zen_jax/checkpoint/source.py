"""What conversion reads from, whatever its format: an architecture, tensors by Hugging Face name,
and files that say how text becomes tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from zen_jax.checkpoint.gguf import SUFFIX, open_gguf
from zen_jax.checkpoint.hf import open_folder
from zen_jax.config import ModelConfig


class Described(Protocol):
    """A tensor of a source before it is read."""

    @property
    def dtype(self) -> str:
        """As it is read: a key of `zen_jax.checkpoint.safetensors.DTYPES`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its true shape."""
        ...

    @property
    def size(self) -> int:
        """Bytes once it is read."""
        ...


class Source(Protocol):
    """An opened checkpoint whose tensors are exactly those its configuration calls for."""

    @property
    def name(self) -> str:
        """What it is called, without the path to it."""
        ...

    @property
    def coding(self) -> str:
        """What most of its weights are coded in: "BF16", or "Q4_1" and such if quantised."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that decide what is read."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        ...

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor, by Hugging Face name; a head only where it is untied."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor; its values are not checked.

        Raises:
          SourceError: the file has become shorter.
        """
        ...

    def check_spare_head(self) -> None:
        """Makes sure that tying loses no head.

        Raises:
          SourceError: it would.
        """
        ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """Tokenizer, template and generation settings, by the file names of Hugging Face.

        Raises:
          SourceError: they are damaged, or of a kind that is not read.
        """
        ...


def open_source(path: Path) -> Source:
    """Opens a Hugging Face folder, or a GGUF file; no tensor is read.

    Raises:
      SourceError: it is neither, or is damaged; all problems are named together.
    """
    return open_gguf(path) if path.suffix == SUFFIX and not path.is_dir() else open_folder(path)
