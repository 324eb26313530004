"""Base model, 1-bit deltas, engine and conversion: everything below the server."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zen_jax.generate import Family


def load(store: str | Path, *, rows: int = 8, max_length: int | None = None) -> "Family":
    """Opens a store and reads its base into memory; see `zen_jax.generate.load`.

    Args:
      store: its folder.
      rows: prompts that are answered at once.
      max_length: tokens of a prompt and its answer together; 1,024 or the model's limit if None.

    Raises:
      ValueError: the folder is no store, or the base is damaged.
    """
    from zen_jax.generate import load as open_store  # JAX is imported by those who need it

    return open_store(store, rows=rows, max_length=max_length)
