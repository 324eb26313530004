"""One adapter on its way into a pool: compared with every member, merged, judged, put on a shelf.

What is decided is `zen_jax.merge.pool`'s. In memory are the new adapter, one member and one merge,
however many adapters went into them.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any, Literal, Protocol

import numpy as np

from zen_jax.merge import lora
from zen_jax.merge.lora import Adapter, Factors
from zen_jax.merge.opcm_lora import Merge, Merger
from zen_jax.merge.pool import (
    Answered,
    Arrival,
    Commit,
    Delete,
    Held,
    Keep,
    Pool,
    PoolRefusal,
    Try,
    least_ratio,
)

_METRICS = ("exact", "text")


@dataclasses.dataclass(frozen=True)
class Tasks:
    """What an adapter is scored on.

    Attributes:
      metric: "exact": the share of examples that greedy decoding answers exactly; "text": 2 to the
        power of minus the bits a token.
      examples: (prompt, answer) token ids; for "text" windows, the first token context only.
    """

    metric: Literal["exact", "text"]
    examples: tuple[Any, ...]

    @classmethod
    def parse(cls, data: bytes) -> "Tasks":
        """Reads JSON: {"metric": ..., "examples": [[[prompt ids], [answer ids]], ...]}.

        Raises:
          ValueError: it is no such thing.
        """
        try:
            fields = json.loads(data)
            metric, examples = fields["metric"], fields["examples"]
            if metric not in _METRICS or not examples:
                raise ValueError(f"metric is {metric!r} with {len(examples)} examples")
            if metric == "text":
                windows = tuple(_ids(window, 2) for window in examples)
                if len({len(window) for window in windows}) > 1:
                    raise ValueError("the windows are not all of one length")
                return cls(metric, windows)
            pairs = tuple((_ids(prompt, 1), _ids(answer, 1)) for prompt, answer in examples)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"tasks cannot be read ({error}); expected a metric, {' or '.join(_METRICS)}, and "
                "examples of token ids"
            ) from error
        return cls(metric, pairs)

    @property
    def largest(self) -> int:
        """Of all token ids."""
        if self.metric == "text":
            return max(map(max, self.examples))
        return max(max(*prompt, *answer) for prompt, answer in self.examples)


def _ids(given: Any, least: int) -> tuple[int, ...]:
    """Token ids as JSON has them, so many at least."""
    sound = isinstance(given, list) and all(type(i) is int and 0 <= i < 2**31 for i in given)
    if not sound or len(given) < least:
        raise ValueError(f"{shortened(given)} is no list of {least} or more token ids")
    return tuple(given)


# M of an adapter on tasks; more is better.
type Score = Callable[[Adapter, Tasks], float]


class Shelf(Protocol):
    """Where the contents of members and the tasks of adapters lie."""

    def load(self, id: str) -> Merge:
        """A member's content."""
        ...

    def tasks(self, name: str) -> Tasks:
        """What an adapter of the pool is scored on."""
        ...

    def put(self, merge: Merge, name: str, tasks: bytes) -> tuple[str, int]:
        """Writes a new member, and the tasks of who came: its id and bytes."""
        ...

    def size(self, adapter: Adapter, rank: int | None) -> int:
        """The bytes that an adapter, cut to a rank if one is given, takes at most."""
        ...


@dataclasses.dataclass(frozen=True)
class Newcomer:
    """An adapter that asks for a place.

    Attributes:
      name: how it is asked for.
      adapter: its factors, the scale in b.
      tasks: what it is scored on, as `Tasks.parse` reads it.
    """

    name: str
    adapter: Adapter
    tasks: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of names, shapes and values."""
        whole = hashlib.sha256()
        for name, factors in sorted(self.adapter.items()):
            for part in (factors.a, factors.b):
                whole.update(f"{name} {part.dtype} {part.shape} ".encode())
                whole.update(np.ascontiguousarray(part).tobytes())
        return whole.hexdigest()


@dataclasses.dataclass(frozen=True)
class Change:
    """What became of a newcomer, for people.

    Attributes:
      name: its name.
      what: "kept", "merged", "there" already, or "refused".
      member: the member that answers now; "" if refused.
      together: who else that member answers for.
      similarity: to the one that it was merged with, else to the most similar; None without one.
      ratios: by task, M(merged) / M(single) of the merge that was taken.
      tried: merges that failed the gate, and the least share each kept.
      why: of a refusal.
      seconds: all of it.
    """

    name: str
    what: Literal["kept", "merged", "there", "refused"]
    member: str = ""
    together: tuple[str, ...] = ()
    similarity: float | None = None
    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tried: tuple[tuple[str, float], ...] = ()
    why: str = ""
    seconds: float = 0.0


def take_in(
    pool: Pool, shelf: Shelf, merger: Merger, score: Score, newcomer: Newcomer, dtype: np.dtype
) -> tuple[Pool, Change, tuple[Delete, ...]]:
    """Brings an adapter to the pool.

    Args:
      pool: the table.
      shelf: the contents.
      merger: how.
      score: M.
      newcomer: who.
      dtype: that members are rounded to, once, when they are made.

    Returns:
      The table to be written (the old one if it was there already), what happened, and which
      members' files may go once the table is written.

    Raises:
      PoolRefusal: it is not taken in; nothing was written but what is swept.
      ValueError: its tasks cannot be read, or it does not fit the members.
    """
    began = time.perf_counter()
    tasks = Tasks.parse(newcomer.tasks)
    arrival = _arrival(pool, shelf, merger, newcomer)
    pool, wanted = pool.arrive(arrival)
    alike = arrival.similarities
    most = max(alike.values(), default=None)
    if isinstance(wanted, Answered):
        return pool, Change(newcomer.name, "there", wanted.member), ()
    own = Merge(lora.cast(newcomer.adapter, dtype))
    single = {newcomer.name: score(own.adapter, tasks)}
    pool = _with_scores(pool, single)
    made: dict[str, tuple[Merge, dict[str, float]]] = {}
    found: list[tuple[str, float]] = []
    while isinstance(wanted, Try):
        at, alone = wanted.member, _single(pool, wanted.member, single)
        merge = _merged(shelf, merger, at, newcomer, dtype)
        scores = _scores(pool, shelf, at, merge, newcomer, score, alone)
        made = {at: (merge, scores)}
        ratio = least_ratio(scores, {name: alone[name] for name in scores})
        pool, wanted = pool.judged(ratio)
        found += [] if isinstance(wanted, Commit) else [(at, ratio)]
    if isinstance(wanted, Keep):
        id, size = shelf.put(own, newcomer.name, newcomer.tasks)
        pool, gone = pool.committed(id, size)
        took = time.perf_counter() - began
        return pool, Change(newcomer.name, "kept", id, (), most, {}, tuple(found), "", took), gone
    assert isinstance(wanted, Commit)
    into = wanted.member
    alone = _single(pool, into, single)
    if into not in made:
        merge = _merged(shelf, merger, into, newcomer, dtype)
        made[into] = merge, _scores(pool, shelf, into, merge, newcomer, score)
    merge, scores = made[into]
    ratios = {name: scores[name] / m if m > 0 else 1.0 for name, m in alone.items()}
    id, size = shelf.put(merge, newcomer.name, newcomer.tasks)
    together = tuple(held.name for held in pool.members[into].holds)
    pool, gone = pool.committed(id, size)
    took = time.perf_counter() - began
    change = Change(
        newcomer.name, "merged", id, together, alike[into], ratios, tuple(found), "", took
    )
    return pool, change, gone


def _arrival(pool: Pool, shelf: Shelf, merger: Merger, newcomer: Newcomer) -> Arrival:
    """How alike it is to each member, read one at a time, and what either way takes."""
    similarities: dict[str, float] = {}
    merged: dict[str, int] = {}
    for id in pool.members:
        other = shelf.load(id).adapter
        similarities[id] = lora.similarity(other, newcomer.adapter)
        sides = {
            n: _both(other.get(n), newcomer.adapter.get(n)) for n in {*other, *newcomer.adapter}
        }
        merged[id] = shelf.size(sides, merger.rank)
    held = Held(newcomer.name, newcomer.digest, {}, len(newcomer.tasks))
    return Arrival(held, shelf.size(newcomer.adapter, None), merged, similarities)


def _both(one: Factors | None, other: Factors | None) -> Factors:
    """Factors of both ranks together, of no values: for their size only."""
    shape = (one or other).shape  # pyright: ignore[reportOptionalMemberAccess]
    rank = sum(f.rank for f in (one, other) if f is not None)
    empty = np.broadcast_to(np.float32(0), (1, 1))
    return Factors(
        np.broadcast_to(empty, (rank, shape[1])), np.broadcast_to(empty, (shape[0], rank))
    )


def _with_scores(pool: Pool, scores: Mapping[str, float]) -> Pool:
    """The table with what the newcomer scores alone, which its member keeps."""
    attempt = pool.attempt
    assert attempt is not None
    held = dataclasses.replace(attempt.arrival.held, scores=dict(scores))
    arrival = dataclasses.replace(attempt.arrival, held=held)
    return dataclasses.replace(pool, attempt=dataclasses.replace(attempt, arrival=arrival))


def _single(pool: Pool, id: str, own: Mapping[str, float]) -> dict[str, float]:
    """M alone of everybody who would be in the merge."""
    scores = dict(own)
    for held in pool.members[id].holds:
        scores |= held.scores
    return scores


def _merged(shelf: Shelf, merger: Merger, id: str, newcomer: Newcomer, dtype: np.dtype) -> Merge:
    """The merge with a member, rounded once."""
    merge = merger.add(shelf.load(id), newcomer.adapter)
    return dataclasses.replace(merge, adapter=lora.cast(merge.adapter, dtype))


def _scores(
    pool: Pool,
    shelf: Shelf,
    id: str,
    merge: Merge,
    newcomer: Newcomer,
    score: Score,
    alone: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """M of a merge on the tasks of everybody in it; up to the first that the gate would not let
    pass, if `alone`, what they score alone, is given."""
    scores: dict[str, float] = {}
    for name in (newcomer.name, *(held.name for held in pool.members[id].holds)):
        tasks = Tasks.parse(newcomer.tasks) if name == newcomer.name else shelf.tasks(name)
        scores[name] = score(merge.adapter, tasks)
        if alone and least_ratio(scores, {name: alone[name]}) < pool.config.gate:
            break
    return scores


def refused(newcomer: Newcomer, error: PoolRefusal) -> Change:
    """What became of one that was not taken in."""
    return Change(newcomer.name, "refused", why=str(error))
