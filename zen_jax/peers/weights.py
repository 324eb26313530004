"""A store's base in the forms that other programs read."""

from pathlib import Path

from zen_jax.checkpoint.gguf_write import write_gguf
from zen_jax.checkpoint.store import Store
from zen_jax.training.residual import WEIGHTS, round_tensors, write_folder


def gguf_file(store: Store, folder: Path) -> Path:
    """The base as a GGUF file in bfloat16, written into `folder` unless it is there.

    Raises:
      ValueError: the base is damaged, or its architecture is none that is written.
    """
    path = folder / "model.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_gguf(path, store.base().config, dict(store.base_tensors()))
    return path


def hugging_face_folder(store: Store, folder: Path) -> Path:
    """The base as a Hugging Face folder in bfloat16, written into `folder` unless it is there.

    Raises:
      ValueError: the base is damaged.
    """
    path = folder / "hugging-face"
    if not (path / WEIGHTS).is_file():
        tensors = round_tensors(dict(store.base_tensors()))
        write_folder(path, tensors, store.tokenizer_folder(None))
    return path
