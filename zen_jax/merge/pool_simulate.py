"""A pool in memory: adapters come to it in turn, its bytes counted as they would be on disk."""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zen_jax.checkpoint.peft import open_adapter, read_factors
from zen_jax.merge.lora import Adapter
from zen_jax.merge.opcm_lora import Merge, Merger
from zen_jax.merge.pool import Pool, PoolConfig, PoolRefusal
from zen_jax.merge.pool_change import Change, Newcomer, Score, Tasks, refused, take_in
from zen_jax.merge.pool_folder import PoolSettings, member_bytes, render_member

_DTYPE = np.dtype(np.float32)


class MemoryShelf:
    """Contents of a pool in memory; see `zen_jax.merge.pool_change.Shelf`."""

    def __init__(self) -> None:
        self.merges: dict[str, Merge] = {}
        self._tasks: dict[str, Tasks] = {}

    def load(self, id: str) -> Merge:
        """A member's content."""
        return self.merges[id]

    def tasks(self, name: str) -> Tasks:
        """What an adapter is scored on."""
        return self._tasks[name]

    def put(self, merge: Merge, name: str, tasks: bytes) -> tuple[str, int]:
        """Keeps a member."""
        id, data = render_member(merge)
        self.merges[id] = merge
        self._tasks[name] = Tasks.parse(tasks)
        return id, len(data)

    def size(self, adapter: Adapter, rank: int | None) -> int:
        """The bytes that its file would take at most."""
        return member_bytes(adapter, rank)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A pool after all have come.

    Attributes:
      changes: what became of each, in order.
      ratios: M(merged) / M(single) of all that are answered.
      members: who is together.
      used: bytes at the end.
      peak: bytes at most, what was being written included.
      seconds: processor seconds.
    """

    changes: tuple[Change, ...]
    ratios: dict[str, float]
    members: tuple[tuple[str, ...], ...]
    used: int
    peak: int
    seconds: float


def simulate(
    settings: PoolSettings,
    newcomers: Sequence[Newcomer],
    score: Score,
    hear: Callable[[Change], None] = lambda change: None,
) -> Outcome:
    """Has adapters come to an empty pool in turn; one that is refused leaves it as it was."""
    began = time.process_time()
    shelf, pool = MemoryShelf(), Pool(settings.config)
    changes: list[Change] = []
    peak = pool.used
    for newcomer in newcomers:
        before = pool.used
        try:
            pool, change, gone = take_in(pool, shelf, settings.merger, score, newcomer, _DTYPE)
        except PoolRefusal as error:
            change, gone = refused(newcomer, error), ()
        written = change.what in ("kept", "merged")
        size = pool.members[change.member].bytes if written else 0
        peak = max(peak, before + size + len(newcomer.tasks) * written)
        for delete in gone:
            del shelf.merges[delete.member]
        changes.append(change)
        hear(change)
    ratios: dict[str, float] = {}
    for member in pool.members.values():
        for held in member.holds:
            found = score(shelf.load(member.id).adapter, shelf.tasks(held.name))
            alone = held.scores[held.name]
            ratios[held.name] = found / alone if alone > 0 else 1.0
    members = tuple(tuple(h.name for h in m.holds) for m in pool.members.values())
    took = time.process_time() - began
    return Outcome(tuple(changes), ratios, members, pool.used, peak, took)


def budget(newcomers: Sequence[Newcomer], places: int, rank: int) -> int:
    """B for so many places: one adapter more, for what is being written, and all tasks."""
    each = max(member_bytes(n.adapter, None) for n in newcomers)
    tasks = sum(len(n.tasks) for n in newcomers)
    empty = PoolSettings.new(PoolConfig(places, 2**40), Merger("opcm", rank), "")
    return (places + 1) * each + tasks + empty.config.table_bytes


def orders(names: Sequence[str], count: int) -> list[list[str]]:
    """The given order, and others drawn at random."""
    made = [list(names)]
    for seed in range(1, count):
        other = list(names)
        random.Random(seed).shuffle(other)
        made.append(other)
    return made


def read_newcomers(folder: Path, shapes: dict[str, tuple[int, ...]]) -> list[Newcomer]:
    """Every PEFT folder in a folder that has tasks.json beside it.

    Raises:
      ValueError: there is none.
    """
    found = [path.parent for path in sorted(folder.glob("*/tasks.json"))]
    if not found:
        raise ValueError(f"{folder} holds no adapters with tasks.json")
    return [read_newcomer(path, shapes) for path in found]


def read_newcomer(folder: Path, shapes: dict[str, tuple[int, ...]], name: str = "") -> Newcomer:
    """A PEFT folder with tasks.json beside it.

    Args:
      folder: the adapter's.
      shapes: of the base's tensors.
      name: how it is asked for; else the folder's name.

    Raises:
      ValueError: it is no adapter of this base, or has no tasks.
    """
    factors = read_factors(open_adapter(folder, shapes))
    tasks = folder / "tasks.json"
    if not tasks.is_file():
        raise ValueError(f"{folder} has no tasks.json; what is it to be scored on?")
    return Newcomer(name or folder.resolve().name, factors, tasks.read_bytes())
