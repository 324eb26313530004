"""A variant's files in host memory: each read once, then checked where it lies."""

import contextlib
import dataclasses
import os
import resource
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.checkpoint.chunks import (
    FileDamaged,
    dtype_of,
    join,
    list_files,
    piece_shape,
    read_ahead,
    read_file,
    read_small,
)
from zen_jax.checkpoint.manifest import MANIFEST, Manifest, Part, VariantCorrupt
from zen_jax.host_memory import adjacent, concatenate

# Threads that read the large files of a variant: they hash and bring into shape too, so more than
# processors wait for one another.
READERS = min(16, os.cpu_count() or 1)
# What is no larger is read by one thread: several wait for one another's interpreter longer than
# for the disk. All are asked for ahead, as far as the process may hold them open.
_SMALL = 256 * 2**10
_AHEAD = 1024
# Parts of a low-rank difference: a [R, I], b [O, R], and what their product is multiplied by, [1].
_FACTORS = ("lora_a", "lora_b", "lora_scale")


@dataclasses.dataclass(frozen=True)
class Span:
    """Outputs, or inputs, `start` to `stop` - 1 of a tensor.

    Attributes:
      dimension: 0 for outputs, which a vector has only; 1 for inputs.
      start: where it begins; for inputs of signs a multiple of 8.
      stop: where it ends.
    """

    dimension: int
    start: int
    stop: int

    def of(self, kind: str, part: Part) -> tuple[int, int, int] | None:
        """The same of one of the tensor's arrays, which are kept in other units: its dimension,
        start and stop. None: all of it."""
        if kind == "rows" or (kind == "scale" and (self.dimension or part.shape[1] == 1)):
            return None
        if kind in _FACTORS:
            kept = kind != "lora_scale" and self.dimension == (kind == "lora_a")
            return (self.dimension, self.start, self.stop) if kept else None
        if kind == "bits":
            unit = 8 if self.dimension else 1
            return self.dimension + 1, self.start // unit, -(-self.stop // unit)
        return self.dimension + (kind == "scale"), self.start, self.stop

    def files(self, kind: str, part: Part) -> tuple[str, ...]:
        """Those that it lies in; of a matrix kept whole all, since it is compared as a whole."""
        own = None if kind == "whole" else self.of(kind, part)
        if own is None or part.shards == 1 or part.axis != own[0]:
            return part.files()
        size = part.shape[part.axis] // part.shards
        return part.files()[own[1] // size : -(-own[2] // size)]


class RawVariant:
    """A variant's files in host memory, read and not all checked yet.

    Attributes:
      where: "name/version".
      manifest: what they should be.
      files: those that are read.
      stored: what each of them holds of an array, as `zen_jax.checkpoint.chunks.cut` cuts it.
      digests: xxh3_128 of each file as it was read, by path.
    """

    def __init__(
        self,
        where: str,
        manifest: Manifest,
        files: Collection[str] | None = None,
        rooms: Iterable[Sequence[Sequence[str]]] = (),
    ) -> None:
        """Makes room for all arrays.

        Args:
          where: "name/version".
          manifest: what they are.
          files: those that are read; None: all.
          rooms: groups of files that are kept as they are read; the groups of a room are to lie in
            one piece of memory, the files of a group one right after the other.
        """
        self.where, self.manifest = where, manifest
        self.files = frozenset(manifest.files if files is None else files)
        parts = [part for t in manifest.tensors.values() for part in t.parts.values()]
        shapes = {
            file: (piece_shape(part), dtype_of(part.dtype))
            for part in parts
            for file in part.files()
            if file in self.files
        }
        self.stored: dict[str, np.ndarray] = {}
        for groups in rooms:
            arrays = adjacent([[shapes[file] for file in group] for group in groups])
            for group, own in zip(groups, arrays, strict=True):
                self.stored |= zip(group, own, strict=True)
        rest = [file for file in shapes if file not in self.stored]
        for file, [array] in zip(rest, adjacent([[shapes[file]] for file in rest]), strict=True):
            self.stored[file] = array
        self.digests: dict[str, str] = {}
        self._once = threading.Lock()
        self._made: dict[str, Any] = {}

    def check(self, files: Iterable[str] | None = None) -> None:
        """Compares files with what was published; None: all that are read.

        Raises:
          VariantCorrupt: one does not match its checksum, or was not read; it is named.
        """
        for file in self.files if files is None else files:
            if self.digests.get(file) != self.manifest.files[file].xxh3:
                raise VariantCorrupt(self.where, file, "does not match its checksum")

    def arrays(self, tensor: str, span: Span | None = None) -> dict[str, np.ndarray]:
        """A tensor's arrays by kind, or what a span of it has of them; the files are read. What is
        kept whole is given whole."""
        parts = self.manifest.tensors[tensor].parts
        return {
            kind: self._array(
                part, None if span is None or kind == "whole" else span.of(kind, part)
            )
            for kind, part in parts.items()
        }

    def once[T](self, what: str, make: Callable[[], T]) -> T:
        """What is made of it for several, by the first who asks."""
        with self._once:
            if what not in self._made:
                self._made[what] = make()
            return self._made[what]

    def _array(self, part: Part, span: tuple[int, int, int] | None) -> np.ndarray:
        files = part.files()
        if span is None or part.axis != span[0] or part.shards == 1:
            whole = self.stored[files[0]]
            if part.shards > 1:
                whole = self.once(part.leaf, lambda: join([self.stored[f] for f in files], part))
            return whole if span is None else along(whole, *span)
        axis, start, stop = span
        size = part.shape[axis] // part.shards
        pieces = [
            along(self.stored[file], axis, max(start - at, 0), min(stop - at, size))
            for at, file in zip(range(0, part.shape[axis], size), files, strict=True)
            if start < at + size and at < stop
        ]
        return pieces[0] if len(pieces) == 1 else concatenate(pieces, axis)


def along(array: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    """Part of an array along one axis; itself where that is all of it."""
    if (start, stop) == (0, array.shape[axis]):
        return array
    return array[(slice(None),) * axis + (slice(start, stop),)]


def folded(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(a float32[R, I], b float32[O, R]) of an adapter's arrays; the scale is folded into b here,
    and nowhere else."""
    a, b, scale = (arrays[kind].astype(np.float32) for kind in _FACTORS)
    return a, b * scale


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
    pause: Callable[[], None] = lambda: None,
) -> RawVariant:
    """Reads the files of a variant that `raw` is to have, several at a time, the large ones first.

    Args:
      folder: of the variant.
      raw: room for them.
      hear: called after each file, by the thread that has read it, while others read on.
      pause: called by it after each megabyte of a larger one.

    Raises:
      VariantCorrupt: a file is missing, too much, of another size, or cannot be read.
    """
    manifest, into = raw.manifest, raw.stored
    sizes = {file: manifest.files[file].size for file in raw.files}
    files = sorted(sizes, key=lambda file: -sizes[file])
    large = [file for file in files if sizes[file] > _SMALL]
    # Handed out one by one: who meets a slow file does not hold up the rest.
    waiting, root = iter(large), f"{folder}/"

    def read_large() -> None:
        for file in waiting:
            try:
                _, raw.digests[file] = read_file(root + file, sizes[file], into.get(file), pause)
            except FileDamaged as error:
                raise VariantCorrupt(raw.where, file, str(error)) from error
            hear(raw, file)

    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(read_large) for _ in range(READERS) if large]
        for file in large:  # the disk has all to do at once, while what has come is looked at
            with contextlib.suppress(FileDamaged):  # who reads it tells
                os.close(read_ahead(root + file, sizes[file]))
        _read_many(root, raw, files[len(large) :], hear)
        complete = _complete(folder, manifest)
        for reader in readers:
            reader.result()
    for file, problem in () if complete else listing_problems(folder, manifest):
        raise VariantCorrupt(raw.where, file, problem)
    return raw


def _read_many(
    root: str, raw: RawVariant, files: Sequence[str], hear: Callable[[RawVariant, str], None]
) -> None:
    """Reads small files on this thread, which is done sooner than they are handed to others; the
    system reads ahead meanwhile."""
    sizes, opened, file = raw.manifest.files, deque[int](), ""
    limit, ahead = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _AHEAD
    if limit != resource.RLIM_INFINITY:
        ahead = min(ahead, limit // 4)
    try:
        for i in range(len(files) + ahead):
            if i < len(files):
                file = files[i]
                opened.append(read_ahead(root + file, sizes[file].size))
            if i >= ahead:
                file = files[i - ahead]
                size, into = sizes[file].size, raw.stored.get(file)
                raw.digests[file] = read_small(opened.popleft(), size, into)
                hear(raw, file)
    except FileDamaged as error:
        raise VariantCorrupt(raw.where, file, str(error)) from error
    finally:
        for handle in opened:
            os.close(handle)


def _complete(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder has the files that it should and no others, whatever they are."""
    expected: dict[str, set[str]] = {"": {MANIFEST}}
    for file in manifest.files:
        parent, _, name = file.rpartition("/")
        expected.setdefault(parent, set()).add(name)
    for parent in list(expected):
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
