"""A pool on disk: POOL/pool.json says which files count; everything else is swept.

A member is one safetensors file, written and synced beside the others before the table names it,
and the table is replaced in one step: whoever is killed leaves the pool as it was before or after.
One process changes a pool at a time. Who answers by a member holds a shared lock on its file, which
the system takes back should he be killed: a member that is evicted meanwhile stays, named as
leaving and its bytes counted, until nobody holds it.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from zen_jax.checkpoint.manifest import check_name
from zen_jax.merge.lora import Adapter, Factors
from zen_jax.merge.opcm import Opcm
from zen_jax.merge.opcm_lora import Merge, Merger, Share
from zen_jax.merge.pool import Held, Member, Pool, PoolConfig, PoolRefusal
from zen_jax.merge.pool_change import Change, Newcomer, Score, Tasks, take_in

TABLE = "pool.json"
_MEMBERS, _TASKS, _LOCK, _PART = "members", "tasks", "lock", ".part"
_FORMAT = 1
_DTYPE = np.dtype(np.float32)
# The table's bytes at most; while it is replaced there are two.
_TABLE_BYTES = 64 * 2**10
# How often somebody who waits for the lock looks, in seconds.
_LOOK_S = 0.02
# Of a member's file beside its factors: a line of the header a factor, and what says how it came.
_HEADER, _LINE = 4096, 512
_ABOUT = "merge"


class PoolDamaged(ValueError):
    """A pool's folder that does not hold what its table says."""


class PoolBusy(ValueError):
    """Another process changes the pool."""


class OpenMember:
    """A member's file, not deleted before this is closed."""

    def __init__(self, path: Path) -> None:
        """Opens it; raises FileNotFoundError, also where it is just being deleted."""
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.fstat(self._handle).st_nlink:
                raise FileNotFoundError(path)
        except BlockingIOError:
            os.close(self._handle)
            raise FileNotFoundError(path) from None
        except BaseException:
            os.close(self._handle)
            raise

    def read(self) -> bytes:
        """All of it."""
        return os.pread(self._handle, os.fstat(self._handle).st_size, 0)

    def close(self) -> None:
        """Lets it go; once."""
        os.close(self._handle)


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """What a pool is made with; never changed.

    Attributes:
      config: limits and rules.
      merger: how adapters are merged.
      base_digest: of the base that all belong to.
    """

    config: PoolConfig
    merger: Merger
    base_digest: str

    @classmethod
    def new(cls, config: PoolConfig, merger: Merger, base_digest: str) -> "PoolSettings":
        """Settings that count the table's bytes."""
        return cls(dataclasses.replace(config, table_bytes=2 * _TABLE_BYTES), merger, base_digest)


class PoolFolder:
    """A pool on disk; may be shared by threads for reading.

    Attributes:
      path: its folder.
    """

    def __init__(self, path: Path):
        """Takes the folder; nothing is read."""
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path, settings: PoolSettings) -> "PoolFolder":
        """Makes an empty pool.

        Raises:
          ValueError: something is at that place, or the table alone passes the budget.
        """
        if settings.config.bytes < settings.config.table_bytes:
            raise ValueError(
                f"the budget is {settings.config.bytes} bytes; the table alone may take "
                f"{settings.config.table_bytes}"
            )
        if path.exists() and any(path.iterdir()):
            raise ValueError(f"{path} exists and is not empty; choose a new folder")
        for folder in (path, path / _MEMBERS, path / _TASKS):
            folder.mkdir(parents=True, exist_ok=True)
        pool = cls(path)
        pool._write_table(settings, Pool(settings.config))
        return pool

    def read(self) -> tuple[PoolSettings, Pool]:
        """The settings and the table.

        Raises:
          PoolDamaged: there is none, or it is damaged.
        """
        try:
            data = (self.path / TABLE).read_bytes()
            fields = json.loads(data)
            seal = fields.pop("checksum")
            if seal != _seal(fields):
                raise ValueError("it does not match its own checksum")
            if fields["format"] != _FORMAT:
                raise ValueError(f"it has format {fields['format']}; expected {_FORMAT}")
            return _settings(fields), self._still(_table(fields))
        except FileNotFoundError:
            raise PoolDamaged(f"{self.path} is no pool; `zen pool add` makes one") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PoolDamaged(f"{self.path / TABLE} cannot be read: {error}") from error

    def add(self, newcomer: Newcomer, score: Score, wait_s: float = 0.0) -> Change:
        """Takes an adapter in, or leaves the pool as it is.

        Args:
          newcomer: who.
          score: M.
          wait_s: for how long it waits for another process that changes the pool, in seconds.

        Raises:
          PoolRefusal: there is no place for it.
          PoolBusy: another process changes the pool.
          ValueError: it does not fit; a name is refused.
        """
        check_name(newcomer.name)
        with self._changing(wait_s):
            settings, pool = self.read()
            merger = settings.merger
            after, change, gone = take_in(pool, self, merger, score, newcomer, _DTYPE)
            if after is not pool:
                # Named until they are deleted: somebody may have opened one meanwhile.
                going = {d.member: pool.members[d.member] for d in gone}
                leaving = MappingProxyType({**after.leaving, **going})
                self._write_table(settings, dataclasses.replace(after, leaving=leaving))
                for id in going:
                    _delete_unless_held(self.member_path(id))
            return change

    def sweep(self, wait_s: float) -> None:
        """Deletes what was evicted and is held by nobody any more.

        Raises:
          PoolBusy: another process changes the pool, for longer than may be waited.
        """
        with self._changing(wait_s):
            pass  # it is the first thing that whoever changes the pool does

    def verify(self) -> list[str]:
        """What is damaged, one line each: every member's and task's bytes are read."""
        _, pool = self.read()
        problems = []
        for member in pool.members.values():
            try:
                self.load(member.id)
            except PoolDamaged as error:
                problems.append(str(error))
            for held in member.holds:
                try:
                    self.tasks(held.name)
                except (OSError, ValueError) as error:
                    problems.append(f"tasks of {held.name}: {error}")
        return problems

    # ---- a shelf, see `zen_jax.merge.pool_change`

    def member_path(self, id: str) -> Path:
        """A member's file."""
        return self.path / _MEMBERS / f"{id}.safetensors"

    def load(self, id: str) -> Merge:
        """A member's content, checked against its id, which is a hash of it.

        Raises:
          PoolDamaged: the file is missing or damaged.
        """
        try:
            return parse_member(self.member_path(id).read_bytes(), id)
        except OSError as error:
            raise PoolDamaged(f"{id} cannot be read ({error.strerror})") from error

    def tasks(self, name: str) -> Tasks:
        """What an adapter of the pool is scored on."""
        return Tasks.parse((self.path / _TASKS / f"{name}.json").read_bytes())

    def put(self, merge: Merge, name: str, tasks: bytes) -> tuple[str, int]:
        """Writes a member and tasks; they do not count before the table names them."""
        id, data = render_member(merge)
        path = self.member_path(id)
        # One that still answers its last requests may come again: it is the same file.
        if not path.exists() or path.read_bytes() != data:
            _write(path, data)
        _write(self.path / _TASKS / f"{name}.json", tasks)
        return id, len(data)

    def size(self, adapter: Adapter, rank: int | None) -> int:
        """The bytes of a member's file at most."""
        return member_bytes(adapter, rank)

    # ---- the table

    def _write_table(self, settings: PoolSettings, pool: Pool) -> None:
        fields = _fields(settings, pool)
        data = json.dumps(fields | {"checksum": _seal(fields)}, indent=1).encode() + b"\n"
        if len(data) > _TABLE_BYTES:
            raise PoolRefusal(
                f"the table of the pool would have {len(data)} bytes; at most {_TABLE_BYTES}"
            )
        _write(self.path / TABLE, data)

    def _still(self, pool: Pool) -> Pool:
        """A table without those who have left since it was written."""
        left = {id: m for id, m in pool.leaving.items() if self.member_path(id).exists()}
        return dataclasses.replace(pool, leaving=MappingProxyType(left))

    @contextlib.contextmanager
    def _changing(self, wait_s: float = 0.0) -> Iterator[None]:
        """Holds the pool's lock; sweeps what a dead process left, and what failed here."""
        if not (self.path / TABLE).exists():
            raise PoolDamaged(f"{self.path} is no pool; `zen pool add` makes one")
        handle = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            until = time.monotonic() + wait_s
            while not _locked(handle):
                if time.monotonic() >= until:
                    raise PoolBusy(f"{self.path} is being changed by another process; try again")
                time.sleep(_LOOK_S)  # flock has no limit of its own on waiting
            self._sweep()
            try:
                yield
            except Exception:
                self._sweep()
                raise
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        _, pool = self.read()
        kept = {self.member_path(id) for id in pool.members}
        kept |= {self.path / _TASKS / f"{name}.json" for name in pool.names()}
        for folder in (self.path, self.path / _MEMBERS, self.path / _TASKS):
            for path in folder.iterdir():
                stray = folder != self.path or path.name.endswith(_PART)
                if stray and path not in kept and path.is_file():
                    _delete_unless_held(path)


def _locked(handle: int) -> bool:
    """Whether the exclusive lock on a file could be taken at once."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _delete_unless_held(path: Path) -> None:
    """Deletes a file that no `OpenMember` holds; whoever opens it now finds it gone."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _locked(handle):
                path.unlink()
        finally:
            os.close(handle)


def _write(path: Path, data: bytes) -> None:
    """A file, whole or not at all, and on disk when this returns."""
    temporary = path.with_name(path.name + _PART)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    handle = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- a member's file


def member_bytes(adapter: Adapter, rank: int | None) -> int:
    """The bytes of a member's file at most, with its factors cut to a rank if one is given."""
    total = _HEADER
    for factors in adapter.values():
        kept = factors.rank if rank is None else min(rank, factors.rank)
        total += kept * sum(factors.shape) * _DTYPE.itemsize + _LINE
    return total


def render_member(merge: Merge) -> tuple[str, bytes]:
    """A member's id, which is a hash of its file, and the file."""
    tensors: dict[str, np.ndarray] = {}
    for name, factors in sorted(merge.adapter.items()):
        tensors |= {f"{name}.a": factors.a, f"{name}.b": factors.b}
    shares = {name: [s.factor, s.length] for name, s in sorted(merge.shares.items())}
    # One entry: safetensors writes several in any order, and equal members are to have equal ids.
    about = {_ABOUT: json.dumps({"count": merge.count, "shares": shares})}
    data = save({n: np.ascontiguousarray(t, _DTYPE) for n, t in tensors.items()}, about)
    return _digest(data), data


def parse_member(data: bytes, id: str) -> Merge:
    """A member's content from its file's bytes.

    Raises:
      PoolDamaged: they are not those that the id is a hash of, or hold something else.
    """
    if _digest(data) != id:
        raise PoolDamaged(f"{id} does not match its checksum")
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
        # Pools that were made before have two entries.
        if _ABOUT in header:
            about = json.loads(header[_ABOUT])
        else:
            about = {name: json.loads(header[name]) for name in ("count", "shares")}
        shares = {n: Share(*map(float, s)) for n, s in about["shares"].items()}
        names = sorted({name[:-2] for name in tensors})
        adapter = {n: Factors(tensors[f"{n}.a"], tensors[f"{n}.b"]) for n in names}
        return Merge(adapter, int(about["count"]), shares)
    except (SafetensorError, KeyError, ValueError, struct.error) as error:
        raise PoolDamaged(f"{id} is no member of a pool: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- the table as JSON


def _fields(settings: PoolSettings, pool: Pool) -> dict[str, Any]:
    members = [
        {"id": m.id, "bytes": m.bytes, "holds": [dataclasses.asdict(held) for held in m.holds]}
        for m in pool.members.values()
    ]
    return {
        "format": _FORMAT,
        "base_digest": settings.base_digest,
        "config": dataclasses.asdict(settings.config),
        "merger": dataclasses.asdict(settings.merger),
        "members": members,
        "leaving": [{"id": m.id, "bytes": m.bytes} for m in pool.leaving.values()],
    }


def _seal(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _settings(fields: Mapping[str, Any]) -> PoolSettings:
    merger = dict(fields["merger"])
    merger["opcm"] = Opcm(**merger["opcm"])
    return PoolSettings(PoolConfig(**fields["config"]), Merger(**merger), fields["base_digest"])


def _table(fields: Mapping[str, Any]) -> Pool:
    members = {
        m["id"]: Member(m["id"], m["bytes"], tuple(Held(**held) for held in m["holds"]))
        for m in fields["members"]
    }
    leaving = {m["id"]: Member(m["id"], m["bytes"], ()) for m in fields.get("leaving", ())}
    config = PoolConfig(**fields["config"])
    return Pool(config, MappingProxyType(members), MappingProxyType(leaving))
