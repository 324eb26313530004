"""Arrays cut into shards, and files read once and checked in memory."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

from zen_jax.checkpoint.manifest import FileEntry, Part
from zen_jax.host_memory import concatenate, empty

_BLOCK = 8 * 2**20
# Read and hashed at a time: it is still in the processor's cache when it is hashed.
_PIECE = 2**20


class FileDamaged(Exception):
    """A file is not what its manifest says; the message completes "FILE ..."."""


def dtype_of(name: str) -> np.dtype:
    """The dtype of a stored array from its name; bfloat16 is known here, not to NumPy."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def cut(array: np.ndarray, shards: int, axis: int) -> np.ndarray:
    """An array as it is stored for several shards: [..., n, ...] -> [shards, ..., n/shards, ...].

    With one shard it is stored as it is. Row-major and contiguous either way.
    """
    if shards == 1:
        return np.ascontiguousarray(array)
    shape = array.shape
    split = array.reshape(*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
    return np.ascontiguousarray(np.moveaxis(split, axis, 0))


def join(pieces: Sequence[np.ndarray], part: Part) -> np.ndarray:
    """The inverse of `cut`, from what the files of a part hold; see
    `host_memory.concatenate`."""
    if len(pieces) == 1:
        return pieces[0].reshape(part.shape)
    return concatenate(pieces, part.axis)


def piece_shape(part: Part) -> tuple[int, ...]:
    """The shape of what one file of a part holds."""
    shape = list(part.shape)
    shape[part.axis] //= part.shards
    return tuple(shape)


def empty_pieces(part: Part) -> list[np.ndarray]:
    """Room for what each file of a part holds."""
    return [empty(piece_shape(part), dtype_of(part.dtype)) for _ in range(part.shards)]


def open_regular(path: Path | str) -> int:
    """Opens a file for reading; a symbolic link or anything but a plain file is refused.

    Raises:
      FileDamaged: it is missing, or no plain file.
    """
    return _open(path)[0]


def _open(path: Path | str) -> tuple[int, int]:
    """The same, and the file's size."""
    handle = _open_any(path)
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode):
        os.close(handle)
        raise FileDamaged("is not a plain file")
    return handle, state.st_size


def _open_any(path: Path | str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileDamaged(f"cannot be opened ({error.strerror})") from error


def read_file(
    path: Path | str,
    size_meant: int,
    into: np.ndarray | None = None,
    pause: Callable[[], None] = lambda: None,
) -> tuple[memoryview, str]:
    """Reads a file once, and hashes it on the way.

    Args:
      path: the file.
      size_meant: its bytes.
      into: a contiguous array of exactly its bytes to read into; a new one by default.
      pause: called after each megabyte.

    Returns:
      The bytes, and their xxh3_128 in hex.

    Raises:
      FileDamaged: it is missing, cannot be read, or has another size.
    """
    handle, size = _open(path)
    try:
        if size != size_meant or (into is not None and into.nbytes != size):
            expected = size_meant if into is None else into.nbytes
            raise FileDamaged(f"has {size} bytes; expected {expected}")
        raw = empty((size,), np.uint8) if into is None else _flat(into)
        view, done, digest = memoryview(raw), 0, xxhash.xxh3_128()
        while done < size:
            count = os.readv(handle, [view[done : done + _PIECE]])
            if count == 0:
                raise FileDamaged(f"ended after {done} bytes; expected {size}")
            digest.update(view[done : done + count])
            done += count
            pause()
    except OSError as error:
        raise FileDamaged(f"cannot be read ({error.strerror})") from error
    finally:
        os.close(handle)
    return view, digest.hexdigest()


def read_ahead(path: Path | str, size: int) -> int:
    """Opens a file and has the system read it into its cache, if it can, without waiting for it.

    Args:
      path: the file.
      size: its bytes.

    Returns:
      A descriptor, to be closed or given to `read_small`.

    Raises:
      FileDamaged: it cannot be opened.
    """
    handle = _open_any(path)
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # what cannot be read is told when it is
            os.posix_fadvise(handle, 0, size, os.POSIX_FADV_WILLNEED)
    return handle


def read_small(handle: int, size: int, into: np.ndarray | None = None) -> str:
    """Reads a file that `read_ahead` has opened, in one call, and closes it.

    Args:
      handle: the descriptor.
      size: bytes that the file should have, 1 MB at most.
      into: as in `read_file`.

    Returns:
      The xxh3_128 of the bytes, in hex.

    Raises:
      FileDamaged: it cannot be read, has another size, or is no plain file.
    """
    try:
        data = bytearray(size) if into is None else _flat(into)
        # One more is asked for, to see that there is none.
        count = os.readv(handle, [data, bytearray(1)])
        if count != size:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                raise FileDamaged("is not a plain file")
            raise FileDamaged(f"has {state.st_size} bytes; expected {size}")
        return xxhash.xxh3_128_hexdigest(data)
    except OSError as error:
        raise FileDamaged(f"cannot be read ({error.strerror})") from error
    finally:
        os.close(handle)


def _flat(array: np.ndarray) -> np.ndarray:
    """An array's bytes; buffers do not know bfloat16."""
    return array.reshape(-1).view(np.uint8)


def read_checked(path: Path, entry: FileEntry, into: np.ndarray | None = None) -> memoryview:
    """Reads a file once and checks it; see `read_file`.

    Raises:
      FileDamaged: it is missing, has another size or another xxh3.
    """
    view, digest = read_file(path, entry.size, into)
    if digest != entry.xxh3:
        raise FileDamaged("does not match its checksum")
    return view


def describe_bytes(data: np.ndarray | bytes) -> FileEntry:
    """Size and checksums of bytes in memory."""
    view = memoryview(data) if isinstance(data, bytes) else memoryview(_as_bytes(data))
    return FileEntry(len(view), xxhash.xxh3_128_hexdigest(view), hashlib.sha256(view).hexdigest())


def sha256_of(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in row-major order."""
    return hashlib.sha256(memoryview(_as_bytes(array))).hexdigest()


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def describe_file(path: Path) -> FileEntry:
    """Size and both checksums of a file, read in blocks.

    Raises:
      FileDamaged: it cannot be read.
    """
    fast, strong, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    for block in _blocks(path):
        fast.update(block)
        strong.update(block)
        size += len(block)
    return FileEntry(size, fast.hexdigest(), strong.hexdigest())


def fast_checksum(path: Path) -> str:
    """A file's xxh3_128 in hex, read in blocks.

    Raises:
      FileDamaged: it cannot be read.
    """
    fast = xxhash.xxh3_128()
    for block in _blocks(path):
        fast.update(block)
    return fast.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    handle = open_regular(path)
    try:
        while block := os.read(handle, _BLOCK):
            yield block
    except OSError as error:
        raise FileDamaged(f"cannot be read ({error.strerror})") from error
    finally:
        os.close(handle)


def list_files(folder: Path) -> dict[str, bool]:
    """Every entry below a folder that is not a folder: relative path -> whether it is a plain file.

    Symbolic links are not followed and count as no plain file.
    """
    found: dict[str, bool] = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{path}/")
                else:
                    found[path] = entry.is_file(follow_symlinks=False)
    return found
