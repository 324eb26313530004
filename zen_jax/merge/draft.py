"""A folder of safetensors on its way: tensors are written in any order, each whole or not at all.

Room for all of it is taken at once, so that a full disk is met at the start. Files are cut where
the next tensor would pass a limit, with an index, as Hugging Face does.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from zen_jax.checkpoint.hf import INDEX, SINGLE
from zen_jax.checkpoint.safetensors import DTYPES

SHARD_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    file: str
    start: int
    size: int


class Draft:
    """Files of a checkpoint that is being written.

    Attributes:
      folder: where they lie.
    """

    def __init__(
        self,
        folder: Path,
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        limit: int = SHARD_BYTES,
    ) -> None:
        """Makes the files, or finds those of an interrupted run.

        Args:
          folder: for them; made if need be.
          layout: (code of `DTYPES`, shape) by name.
          limit: bytes of a file; one tensor may be larger.

        Raises:
          OSError: there is no room.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._places: dict[str, _Place] = {}
        shards = _shards(layout, limit)
        for i, names in enumerate(shards):
            count = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            self._make(SINGLE if len(shards) == 1 else count, {n: layout[n] for n in names})

    def _make(self, file: str, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, (code, shape) in layout.items():
            size = _size(code, shape)
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
            self._places[name] = _Place(file, at, size)
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        lead = len(text).to_bytes(8, "little") + text
        for name in layout:
            place = self._places[name]
            self._places[name] = dataclasses.replace(place, start=place.start + len(lead))
        path = self.folder / file
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(handle, 0, len(lead) + at)
            os.ftruncate(handle, len(lead) + at)
            os.pwrite(handle, lead, 0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(handle)

    def put(self, name: str, array: np.ndarray) -> str:
        """Writes a tensor of the layout's dtype and shape; returns xxh3_128 of its bytes."""
        place = self._places[name]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size != place.size:
            raise ValueError(f"{name} has {data.size} bytes; its place has {place.size}")
        view, done = memoryview(data), 0
        handle = os.open(self.folder / place.file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while done < place.size:
                done += os.pwrite(handle, view[done:], place.start + done)
        finally:
            os.close(handle)
        return xxhash.xxh3_128_hexdigest(view)

    def checksum(self, name: str) -> str:
        """xxh3_128 of the bytes that lie in a tensor's place."""
        place, digest = self._places[name], xxhash.xxh3_128()
        with open(self.folder / place.file, "rb") as file:
            file.seek(place.start)
            left = place.size
            while left and (block := file.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
        return digest.hexdigest()

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Adds other files and the index, and brings everything to the disk."""
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        where = {name: place.file for name, place in sorted(self._places.items())}
        if len(set(where.values())) > 1:
            total = sum(place.size for place in self._places.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for path in (*self.folder.iterdir(), self.folder):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _size(code: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[code].itemsize


def _shards(layout: Mapping[str, tuple[str, tuple[int, ...]]], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, (code, shape) in layout.items():
        size = _size(code, shape)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
