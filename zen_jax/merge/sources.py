"""What can be merged: a Hugging Face folder, a GGUF file, a store's base, or a variant in a store.

A store's base is named by the store's folder, a variant by STORE:NAME or STORE:NAME:VERSION. All
are read by Hugging Face tensor, one at a time, like the sources of a conversion.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from zen_jax.checkpoint.manifest import BASE, MANIFEST, Manifest, Variant
from zen_jax.checkpoint.publish import VARIANTS
from zen_jax.checkpoint.raw import folded
from zen_jax.checkpoint.safetensors import DTYPES, SourceError
from zen_jax.checkpoint.source import Source, open_source
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import effective_weight
from zen_jax.delta.format import WeightDelta

_CODES: Mapping[np.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a store before it is read; see `zen_jax.checkpoint.source.Described`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes once it is read."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


class StoreSource:
    """A store's base, or a variant added up with it; see `zen_jax.checkpoint.source.Source`.

    A variant is read in float32: the base's bfloat16 would round its 1-bit difference away.
    """

    def __init__(self, store: Store, variant: Variant | None):
        """Takes a member of a store.

        Raises:
          Corrupt: a manifest is damaged.
          WrongBase: the variant was made against another base.
        """
        self._store, self._variant = store, variant
        self._manifest: Manifest = store.base() if variant is None else store.manifest(variant)
        if variant is not None:
            store.check_base(self._manifest)
        config = self._manifest.config
        self.config: ModelConfig = config
        tensors = self._manifest.tensors
        if variant is None:
            described = {
                name: StoredTensor(_CODES[_dtype(t.parts["weight"].dtype)], t.shape)
                for name, t in tensors.items()
            }
        else:
            described = {name: StoredTensor("F32", t.shape) for name, t in tensors.items()}
        self.tensors: Mapping[str, StoredTensor] = described

    @property
    def name(self) -> str:
        """The store's own name and the variant's, without the path."""
        folder = self._store.path.resolve().name
        return folder if self._variant is None else f"{folder}:{self._variant.name}"

    @property
    def bytes_on_disk(self) -> int:
        """Of its part of the store: a variant's without the base's."""
        return self._manifest.bytes_on_disk

    @property
    def coding(self) -> str:
        """What it was made from."""
        return str(self._manifest.made.get("coding", "F32"))

    @property
    def files(self) -> tuple[Path, ...]:
        """The manifests, which bind every byte that is read."""
        path = self._store.path
        base = path / BASE / MANIFEST
        return (base,) if self._variant is None else (base, self._variant.path / MANIFEST)

    def read(self, name: str) -> np.ndarray:
        """One tensor, checked; float32 for a variant's.

        Raises:
          Corrupt: a file of it is damaged.
        """
        if self._variant is None:
            return self._store.base_tensor(name)
        parts = self._store.variant_parts(self._variant, name)
        if "whole" in parts:
            return parts["whole"].astype(np.float32)
        base = self._store.base_tensor(self._manifest.tensors[name].against or name)
        low_rank = folded(parts) if "lora_a" in parts else None
        delta = WeightDelta(parts.get("bits"), parts.get("scale"), low_rank, parts.get("dense"))
        whole = np.asarray(effective_weight(jnp.asarray(base, jnp.float32), delta))
        if "rows" not in parts:
            return whole
        return np.concatenate([whole, parts["rows"].astype(np.float32)])

    def check_spare_head(self) -> None:
        """Nothing to check: a store keeps no head that tying would lose."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """The member's own tokenizer files, or the base's.

        Raises:
          Corrupt: one is damaged.
        """
        own = self._variant if self._variant is not None and self._manifest.tokenizer else None
        return self._store.tokenizer_files(own)


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def open_member(text: str) -> Source:
    """Opens what a user names: a folder, a GGUF file, a store, or STORE:NAME[:VERSION].

    Raises:
      SourceError: there is nothing of the kind, or it is damaged; all problems are named.
      NotAStore, VariantNotFound, NameRefused, Corrupt, WrongBase: of a store.
    """
    path = Path(text)
    if path.exists() or ":" not in text:
        if _is_store(path):
            return StoreSource(Store(path), None)
        if not path.exists():
            raise SourceError(
                text, "does not exist; expected a folder, a GGUF file, a store or STORE:NAME"
            )
        source = open_source(path)
        source.check_spare_head()
        return source
    folder, _, name = text.partition(":")
    name, _, version = name.partition(":")
    if version and not (version.isascii() and version.isdecimal()):
        raise SourceError(text, f"has the version {version!r}; expected a number")
    store = Store(Path(folder))
    if name == BASE:
        return StoreSource(store, None)
    return StoreSource(store, store.variant(name, int(version) if version else None))


def _is_store(path: Path) -> bool:
    return (path / BASE / MANIFEST).is_file() or (path / VARIANTS).is_dir()
