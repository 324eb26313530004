"""Publishing into a store: all of a checkpoint at once, or nothing of it.

A checkpoint is written by orbax into a folder of this publisher's own below STORE/.publishing,
checked, synced and renamed to its place. Arrays are made only when orbax comes to write them, so
memory is bounded by the largest tensor. Folders that dead publishers left are swept
when the next one starts: a living one holds a lock on its folder. Work that has a key is kept when
it is interrupted, for a week, and gone on with by the next publisher with that key.
"""

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zen_jax.checkpoint.chunks import (
    FileDamaged,
    cut,
    describe_bytes,
    describe_file,
    fast_checksum,
    list_files,
    sha256_of,
)
from zen_jax.checkpoint.journal import Journal
from zen_jax.checkpoint.manifest import (
    BASE,
    MANIFEST,
    BaseExists,
    FileEntry,
    Manifest,
    NotAStore,
    Part,
)

PUBLISHING = ".publishing"
VARIANTS = "variants"
TOKENIZER = "tokenizer"
_COMMITTED = "commit_success.txt"
_SYNCS = 16
# Bytes of small arrays that are held and written together.
_IN_FLIGHT = 4 * 2**20
_WRITERS = 16
UNFINISHED = "unfinished-"
_KEPT_S = 7 * 24 * 3600.0
# Below a publisher's folder: what was written before an interruption, and the records of it.
_BEFORE = "before"
_WRITTEN = "written.jsonl"


class StoreWriteFailed(OSError):
    """Writing into the store failed, for want of space for instance; nothing was published."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is made when it is written.

    Attributes:
      dtype: of the array.
      shape: of the whole array.
      produce: makes it; called once.
      shards: files to write it to; divides ``shape[axis]``.
      axis: the dimension that is cut for them.
      skip: called in place of `produce` when an interrupted run had written it already.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    produce: Callable[[], np.ndarray]
    shards: int = 1
    axis: int = 0
    skip: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass
class Written:
    """What a publisher has written so far.

    Attributes:
      parts: by orbax leaf.
      files: by path relative to the checkpoint's folder.
      tokenizer: file name -> SHA-256.
    """

    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    files: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    tokenizer: dict[str, str] = dataclasses.field(default_factory=dict)


class _Earlier:
    """What an interrupted publisher had written: moved if it is whole, not made again."""

    def __init__(self, work: Path, keyed: bool):
        self._folder = work / _BEFORE
        self._journal = Journal(work / _WRITTEN) if keyed else None
        self._known: dict[str, dict[str, Any]] = {}
        if self._journal is not None:
            self._known = {str(record.get("leaf")): record for record in self._journal.read()}
            self._journal.start(list(self._known.values()))

    def adopt(self, leaf: str, value: LazyArray, folder: Path, written: Written) -> bool:
        """Moves a leaf to where it is wanted, if it was written before and is whole."""
        record = self._known.get(leaf)
        if record is None:
            return False
        meant = (leaf, value.dtype.name, value.shape, value.shards, value.axis)
        try:
            part = Part(**{**record["part"], "shape": tuple(record["part"]["shape"])})
            files = {path: FileEntry(**entry) for path, entry in record["files"].items()}
            if (part.leaf, part.dtype, part.shape, part.shards, part.axis) != meant:
                return False
            if any(fast_checksum(self._folder / p) != entry.xxh3 for p, entry in files.items()):
                return False
        except (FileDamaged, KeyError, TypeError):  # damaged, or of another version of this code
            return False
        os.rename(self._folder / leaf, folder)
        written.parts[leaf] = part
        written.files |= files
        return True

    def record(self, leaf: str, written: Written) -> None:
        """Notes a leaf that is on disk now, if it is to be gone on with after an interruption."""
        if self._journal is None:
            return
        part = written.parts[leaf]
        files = {path: dataclasses.asdict(written.files[path]) for path in part.files()}
        try:
            self._journal.append({"leaf": leaf, "part": dataclasses.asdict(part), "files": files})
        except OSError as error:
            raise StoreWriteFailed(f"{leaf} could not be written ({error.strerror})") from error

    def give_up(self) -> None:
        """Forgets what was written, and records no more."""
        if self._journal is not None:
            self._journal.start([])
        self._journal, self._known = None, {}


class _Streaming(ocp.type_handlers.NumpyHandler):
    """Has orbax write `LazyArray` leaves in turn, as the NumPy arrays that they make.

    Large ones are made and written one by one, small ones a few together, since each write waits
    for the disk. In the checkpoint they are NumPy arrays like any other: orbax restores them
    without this.
    """

    def __init__(self, written: Written, earlier: _Earlier):
        super().__init__(deepcopy_host_arrays=False)
        self._written, self._earlier = written, earlier

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Makes, describes and writes the arrays, at most `_IN_FLIGHT` bytes or one at a time."""
        args = args or [ocp.SaveArgs()] * len(values)
        writing: list[tuple[str, Any]] = []
        size = 0
        for value, info, save_args in zip(values, infos, args, strict=True):
            folder = Path(info.parent_dir) / str(info.name)
            if self._earlier.adopt(str(info.name), value, folder, self._written):
                value.skip()
                self._earlier.record(str(info.name), self._written)
                continue
            if size + value.nbytes > _IN_FLIGHT or len(writing) == _WRITERS:
                self._wait(writing)
                writing, size = [], 0
            array = self._make(str(info.name), value)
            commits = await super().serialize([array], [info], [save_args])
            writing += [(str(info.name), commit) for commit in commits]
            size += value.nbytes
        self._wait(writing)
        return []

    def _wait(self, writing: list[tuple[str, Any]]) -> None:
        """Waits until all are written; each one ends before the first failure is raised."""
        failed: list[tuple[str, Exception]] = []
        for leaf, commit in writing:
            try:
                commit.result()
            except Exception as error:
                failed.append((leaf, error))
            else:
                self._earlier.record(leaf, self._written)
        if failed:
            leaf, error = failed[0]
            reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise StoreWriteFailed(f"{leaf} could not be written ({reason})") from error

    def _make(self, leaf: str, value: LazyArray) -> np.ndarray:
        array = value.produce()
        if array.shape != value.shape or array.dtype != value.dtype:
            raise ValueError(
                f"{leaf} came out as {array.dtype}{list(array.shape)}; "
                f"{value.dtype}{list(value.shape)} was announced"
            )
        stored = cut(array, value.shards, value.axis)
        cuts = [stored] if value.shards == 1 else list(stored)
        entries = [describe_bytes(piece) for piece in cuts]
        whole = entries[0].sha256 if value.shards == 1 else sha256_of(array)
        part = Part(leaf, array.dtype.name, array.shape, value.shards, value.axis, whole)
        self._written.parts[leaf] = part
        self._written.files |= dict(zip(part.files(), entries, strict=True))
        return stored


class _Nothing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps from the terminal what orbax logs: features switched off here, and failures, which are
    raised here as errors."""
    logger, nothing = logging.getLogger("absl"), _Nothing()
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


class Publisher:
    """One publication into a store; a context manager whose folder vanishes at its end.

    Attributes:
      scratch: a folder for intermediate files, on the store's file system. Of interrupted work with
        a key it has what was there.
    """

    def __init__(self, root: Path, key: str | None = None):
        """Prepares a publication.

        Args:
          root: the store's folder.
          key: names work that is to be gone on with after an interruption; everything that decides
            what is written has to be in it.
        """
        self._root, self._key = root, key
        self._all = root / PUBLISHING
        self._own = self._all / f"{os.getpid()}-{uuid.uuid4().hex}"
        self._alive: int | None = None
        self._settle(self._own)

    def _settle(self, work: Path) -> None:
        self._work, self._content, self.scratch = work, work / "checkpoint", work / "scratch"

    def __enter__(self) -> "Publisher":
        if self._all.is_symlink():
            raise NotAStore(f"{self._all} is a symbolic link; expected a folder of the store")
        self._all.mkdir(exist_ok=True)
        with self._locked():
            self._sweep()
            if self._key is None or not self._take(self._all / f"{UNFINISHED}{self._key}"):
                self._take(self._own)
        self._put_before()
        self._earlier = _Earlier(self._work, self._key is not None)
        return self

    def _take(self, work: Path) -> bool:
        """Makes a folder this publisher's own; not if another one that lives has it."""
        (work / "scratch").mkdir(parents=True, exist_ok=True)
        handle = os.open(work / "alive", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        os.utime(work / "alive")
        self._alive = handle
        self._settle(work)
        return True

    def _put_before(self) -> None:
        """Puts what an interrupted publisher wrote of the checkpoint where it is looked for."""
        before = self._work / _BEFORE
        for folder in self._work.glob("checkpoint*"):
            before.mkdir(exist_ok=True)
            for leaf in folder.iterdir():
                # What is there already was looked at and found damaged, or is the same.
                shutil.rmtree(before / leaf.name, ignore_errors=True)
                if leaf.is_dir():
                    os.rename(leaf, before / leaf.name)
            shutil.rmtree(folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        if self._key is None or not interrupted:
            shutil.rmtree(self._work, ignore_errors=True)
        if self._alive is not None:
            os.close(self._alive)
        if _is_full(error):
            text = f"the disk of {self._root} is full; nothing was published, free some space there"
            raise StoreWriteFailed(text) from error

    def give_up(self) -> None:
        """Says that nothing will be published: what was written is not gone on with later."""
        self._earlier.give_up()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the store's one lock: around sweeping, and around choosing a version."""
        handle = os.open(self._all / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Removes the folders of publishers that no longer live."""
        for folder in self._all.iterdir():
            if folder.is_symlink() or not folder.is_dir():
                continue
            try:
                handle = os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                age = time.time() - os.fstat(handle).st_mtime
                if not folder.name.startswith(UNFINISHED) or age > _KEPT_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)

    def write(self, tree: Mapping[str, Any], tokenizer: Mapping[str, bytes]) -> Written:
        """Writes the checkpoint into this publisher's folder and reads it back.

        Args:
          tree: `LazyArray` leaves by Hugging Face name, or by name and kind of part.
          tokenizer: file name -> contents.

        Returns:
          What the manifest has to say of it.

        Raises:
          StoreWriteFailed: it could not be written, or did not come back as it was meant.
          Whatever a leaf's ``produce`` raises.
        """
        written = Written()
        self._save(tree, written)
        (self._content / TOKENIZER).mkdir()
        for name, data in tokenizer.items():
            (self._content / TOKENIZER / name).write_bytes(data)
            entry = describe_bytes(data)
            written.tokenizer[name] = entry.sha256
            written.files[f"{TOKENIZER}/{name}"] = entry
        self._check(written)
        return written

    def _save(self, tree: Mapping[str, Any], written: Written) -> None:
        registry = ocp.type_handlers.create_type_handler_registry(
            (LazyArray, _Streaming(written, self._earlier)),
            (jax.Array, ocp.type_handlers.ArrayHandler()),
        )
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False,
            use_zarr3=False,
            use_compression=False,
            type_handler_registry=registry,
        )
        # Cut arrays have the shards in front; one chunk, which is one file, for each.
        save_args = jax.tree.map(
            lambda leaf: ocp.SaveArgs(shard_axes=(0,) if leaf.shards > 1 else ()), tree
        )
        with quiet_orbax(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(self._content, ocp.args.PyTreeSave(dict(tree), save_args=save_args))
        # It names the folder where it was written, and orbax reads it on file systems only that
        # cannot rename.
        (self._content / _COMMITTED).unlink(missing_ok=True)

    def _check(self, written: Written) -> None:
        """Compares the files with what was meant, describes those of orbax, syncs all to disk."""
        found = list_files(self._content)
        lost = sorted(set(written.files) - set(found))
        if lost:
            raise StoreWriteFailed(f"{lost[0]} was not written")
        try:
            for path in found:
                if path not in written.files:
                    written.files[path] = describe_file(self._content / path)
                elif fast_checksum(self._content / path) != written.files[path].xxh3:
                    raise StoreWriteFailed(f"{path} did not come back as it was written")
        except FileDamaged as error:
            raise StoreWriteFailed(f"the new checkpoint cannot be read back: {error}") from error
        files = [self._content / path for path in found]
        # All at once: a file system commits what waits together in one go.
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(_sync, files))
            list(pool.map(_sync, {self._content, *(file.parent for file in files)}))

    def publish_base(self, manifest: Manifest) -> Path:
        """Makes the checkpoint the store's base.

        Raises:
          BaseExists: the store has a base by now.
        """
        with self._locked():
            target = self._root / BASE
            if target.exists():
                raise BaseExists(f"{self._root} has a base already; choose another folder")
            self._put(manifest, target)
        return target

    def publish_variant(self, name: str, describe: Callable[[int], Manifest]) -> Manifest:
        """Makes the checkpoint the newest version of a variant.

        Args:
          name: a checked name.
          describe: from the version that it gets to its manifest.

        Returns:
          The manifest, published.
        """
        with self._locked():
            folder = self._root / VARIANTS / name
            for each in (folder.parent, folder):
                if each.is_symlink():
                    raise NotAStore(f"{each} is a symbolic link; expected a folder of the store")
                each.mkdir(exist_ok=True)
                _sync(each.parent)
            taken = [int(p.name) for p in folder.iterdir() if p.name.isdecimal()]
            manifest = describe(max(taken, default=0) + 1)
            self._put(manifest, folder / str(manifest.version))
        return manifest

    def replace_manifest(self, folder: Path, describe: Callable[[], Manifest]) -> Manifest:
        """Exchanges a published checkpoint's manifest for another in one step.

        Args:
          folder: of the checkpoint, in the store.
          describe: makes the new one; no other publisher changes the old one meanwhile.
        """
        with self._locked():
            manifest = describe()
            path = self.scratch / MANIFEST
            path.write_bytes(manifest.render())
            _sync(path)
            os.replace(path, folder / MANIFEST)
            _sync(folder)
        return manifest

    def _put(self, manifest: Manifest, target: Path) -> None:
        path = self._content / MANIFEST
        path.write_bytes(manifest.render())
        _sync(path)
        _sync(self._content)
        os.rename(self._content, target)
        _sync(target.parent)


def _is_full(error: BaseException | None) -> bool:
    """Whether a write found no room, whoever did it; some say it in words only."""
    words = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]
    while error is not None and not any(text in str(error) for text in words):
        error = error.__cause__
    return error is not None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
