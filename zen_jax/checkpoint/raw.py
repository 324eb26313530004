"""A variant's files in host memory: each read once, then checked where it lies."""

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.checkpoint.chunks import (
    FileDamaged,
    empty_stored,
    join,
    list_files,
    read_ahead,
    read_file,
)
from zen_jax.checkpoint.manifest import MANIFEST, Manifest, VariantCorrupt
from zen_jax.host_memory import adjacent

# Threads that read a variant: they hash and bring into shape too, so more than processors wait for
# one another.
READERS = min(8, os.cpu_count() or 1)


class RawVariant:
    """A variant's files in host memory, read and not all checked yet.

    Attributes:
      where: "name/version".
      manifest: what they should be.
      stored: its arrays as `zen_jax.checkpoint.chunks.cut` stores them, by leaf.
      digests: xxh3_128 of each file as it was read, by path.
      done: what was made of it while other files were still being read.
    """

    def __init__(
        self, where: str, manifest: Manifest, together: Iterable[Sequence[str]] = ()
    ) -> None:
        """Makes room for all arrays.

        Args:
          where: "name/version".
          manifest: what they are.
          together: leaves of bytes, in one file each, that are kept as they are read; those of a
            group are to lie one right after the other.
        """
        self.where, self.manifest = where, manifest
        parts = {part.leaf: part for t in manifest.tensors.values() for part in t.parts.values()}
        groups = list(together)
        shapes = [[parts[leaf].shape for leaf in leaves] for leaves in groups]
        self.stored: dict[str, np.ndarray] = {}
        for leaves, rooms in zip(groups, adjacent(shapes, np.uint8), strict=True):
            self.stored |= dict(zip(leaves, rooms, strict=True))
        for leaf in parts.keys() - self.stored.keys():
            self.stored[leaf] = empty_stored(parts[leaf])
        self.digests: dict[str, str] = {}
        self.done: dict[Any, Any] = {}
        self._joined: dict[str, np.ndarray] = {}

    def check(self, files: Iterable[str]) -> None:
        """Compares files with what was published.

        Raises:
          VariantCorrupt: one does not match its checksum, or was not read; it is named.
        """
        for file in files:
            if self.digests.get(file) != self.manifest.files[file].xxh3:
                raise VariantCorrupt(self.where, file, "does not match its checksum")

    def arrays(self, tensor: str) -> dict[str, np.ndarray]:
        """A tensor's arrays by kind; its files are read."""
        parts = self.manifest.tensors[tensor].parts
        for part in parts.values():
            if part.leaf not in self._joined:
                self._joined[part.leaf] = join(self.stored[part.leaf], part)
        return {kind: self._joined[part.leaf] for kind, part in parts.items()}


def listing_problems(folder: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Files that are missing, too much, or no plain files: (path, problem)."""
    found = list_files(folder)
    expected = {*manifest.files, MANIFEST}
    return [
        *((path, "is missing") for path in sorted(expected - set(found))),
        *((path, "does not belong here") for path in sorted(set(found) - expected)),
        *((path, "is not a plain file") for path, plain in sorted(found.items()) if not plain),
    ]


def read_all(
    folder: Path,
    raw: RawVariant,
    hear: Callable[[RawVariant, str], None] = lambda raw, file: None,
) -> RawVariant:
    """Reads every file of a variant, several at a time, the large ones first.

    Args:
      folder: of the variant.
      raw: room for them.
      hear: called after each file, by the thread that has read it, while others read on.

    Raises:
      VariantCorrupt: a file is missing, too much, of another size, or cannot be read.
    """
    manifest, where = raw.manifest, raw.where
    into: dict[str, np.ndarray] = {}
    for tensor in manifest.tensors.values():
        for part in tensor.parts.values():
            stored = raw.stored[part.leaf]
            pieces = [stored] if part.shards == 1 else list(stored)
            into |= dict(zip(part.files(), pieces, strict=True))
    files = sorted(manifest.files, key=lambda file: -manifest.files[file].size)
    # Handed out one by one: who meets a slow file does not hold up the rest.
    waiting, root = iter(files), f"{folder}/"

    def read() -> None:
        for file in waiting:
            try:
                size = manifest.files[file].size
                _, raw.digests[file] = read_file(root + file, size, into.get(file))
            except FileDamaged as error:
                raise VariantCorrupt(where, file, str(error)) from error
            hear(raw, file)

    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(read) for _ in range(READERS)]
        for file in files:  # the disk has all to do at once, while what has come is looked at
            read_ahead(root + file)
        complete = _complete(folder, manifest)
        for reader in readers:
            reader.result()
    for file, problem in () if complete else listing_problems(folder, manifest):
        raise VariantCorrupt(where, file, problem)
    return raw


def _complete(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder has the files that it should and no others, whatever they are."""
    expected: dict[str, set[str]] = {"": {MANIFEST}}
    for file in manifest.files:
        parent, _, name = file.rpartition("/")
        expected.setdefault(parent, set()).add(name)
        while parent:
            parent, _, name = parent.rpartition("/")
            expected.setdefault(parent, set()).add(name)
    root = f"{folder}/"
    try:
        for below, names in expected.items():
            linked = below and not stat.S_ISDIR(os.lstat(root + below).st_mode)
            if linked or names != set(os.listdir(root + below)):
                return False
    except OSError:
        return False
    return True
