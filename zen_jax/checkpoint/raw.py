"""A variant's files in host memory: each read once, then checked where it lies."""

import dataclasses
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from zen_jax.checkpoint.chunks import FileDamaged, empty_stored, join, list_files, read_file
from zen_jax.checkpoint.manifest import MANIFEST, Manifest, VariantCorrupt

# Threads that read a variant: enough to keep a disk busy, on few processors no more than twice
# their number.
READERS = min(8, 2 * (os.cpu_count() or 1))


@dataclasses.dataclass(frozen=True)
class RawVariant:
    """A variant's files in host memory, not checked yet.

    Attributes:
      where: "name/version".
      manifest: what they should be.
      stored: its arrays as `zen_jax.checkpoint.chunks.cut` stores them, by leaf.
      digests: xxh3_128 of each file as it was read, by path.
    """

    where: str
    manifest: Manifest
    stored: Mapping[str, np.ndarray]
    digests: Mapping[str, str]

    def checked(self) -> dict[str, np.ndarray]:
        """The arrays by leaf.

        Raises:
          VariantCorrupt: a file does not match its checksum, or was not read; it is named.
        """
        for file, entry in self.manifest.files.items():
            if self.digests.get(file) != entry.xxh3:
                raise VariantCorrupt(self.where, file, "does not match its checksum")
        parts = [part for t in self.manifest.tensors.values() for part in t.parts.values()]
        return {part.leaf: join(self.stored[part.leaf], part) for part in parts}


def listing_problems(folder: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Files that are missing, too much, or no plain files: (path, problem)."""
    found = list_files(folder)
    expected = {*manifest.files, MANIFEST}
    return [
        *((path, "is missing") for path in sorted(expected - set(found))),
        *((path, "does not belong here") for path in sorted(set(found) - expected)),
        *((path, "is not a plain file") for path, plain in sorted(found.items()) if not plain),
    ]


def read_all(folder: Path, manifest: Manifest, where: str) -> RawVariant:
    """Reads every file of a variant, several at a time."""
    for file, problem in listing_problems(folder, manifest):
        raise VariantCorrupt(where, file, problem)
    parts = [part for t in manifest.tensors.values() for part in t.parts.values()]
    stored = {part.leaf: empty_stored(part) for part in parts}
    into: dict[str, np.ndarray] = {}
    for part in parts:
        pieces = [stored[part.leaf]] if part.shards == 1 else list(stored[part.leaf])
        into |= dict(zip(part.files(), pieces, strict=True))

    digests: dict[str, str] = {}

    def read(files: list[str]) -> None:
        for file in files:
            try:
                _, digests[file] = read_file(
                    folder / file, manifest.files[file].size, into.get(file)
                )
            except FileDamaged as error:
                raise VariantCorrupt(where, file, str(error)) from error

    # Large files dealt out first, so that the readers end together.
    files = sorted(manifest.files, key=lambda file: -manifest.files[file].size)
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(read, (files[reader::READERS] for reader in range(READERS))):
            pass
    return RawVariant(where, manifest, stored, digests)
