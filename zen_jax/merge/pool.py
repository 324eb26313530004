"""A pool of merged adapters under limits: who is kept, who is merged with whom, who has to go.

A pure, immutable table and its transitions, without arrays, files or clocks: how alike two adapters
are, and how well a merge still does their tasks, is told from outside. Limits are the members that
answer (K) and bytes (B); bytes count members, those that were evicted and still answer their last
requests, what is being written, and what tasks and the table take. Neither is passed by any table.

    arrive --> Keep, Try a merge, Answered or a refusal
    Try -- judged --> Commit, or the next: another Try, Keep or a refusal
    Keep, Commit -- committed --> the new table, and what to delete; given_up --> the old table

Policies (arXiv:2510.13537, Algorithm 1 and 2, and the project's own):

  kmerge    a free place is filled; without one the most similar member takes it in
  kmerge++  a member that is similar enough takes it in; else a free place; else the most similar
  gated     members are tried from the most similar on, each merge judged by the tasks of all that
            are in it; if none passes a free place; else a refusal, and the pool is as before
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from types import MappingProxyType
from typing import Literal, get_args

Policy = Literal["kmerge", "kmerge++", "gated"]


class PoolRefusal(ValueError):
    """An adapter that the pool does not take; the pool is as it was.

    Attributes:
        passing: whether nothing is lacking but bytes of members that answer their last requests.
    """

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class MemberGone(ValueError):
    """A member that the pool has no more."""


class NotInPool(ValueError):
    """An adapter that no member answers for."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Limits and rules.

    Attributes:
        adapters: K, members that answer at most.
        bytes: B.
        policy: see above.
        threshold: for "kmerge++", the least similarity of a merge.
        gate: for "gated", the least share of its own score that every task keeps.
        table_bytes: what the table takes, twice while it is replaced.
    """

    adapters: int
    bytes: int
    policy: Policy = "gated"
    threshold: float = 0.024
    gate: float = 0.9
    table_bytes: int = 0

    def __post_init__(self) -> None:
        if self.adapters < 1 or self.bytes < 1:
            raise ValueError(
                f"limits are {self.adapters} adapters and {self.bytes} bytes; expected 1 or more"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy is {self.policy!r}; expected one of {get_args(Policy)}")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; expected a cosine, -1 to 1")
        if not 0 < self.gate <= 10:
            raise ValueError(f"gate is {self.gate}; expected a share above 0")


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter that a member answers for.

    Attributes:
        name: how it is asked for.
        digest: of its tensors; a name with other tensors is another adapter.
        scores: M of it alone, by task, as it was on arrival.
        task_bytes: what its tasks take.
    """

    name: str
    digest: str
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    task_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One adapter in the pool, perhaps merged of several.

    Attributes:
        id: of this content; never used again.
        bytes: of its factors.
        holds: who it answers for, in the order of arrival.
        leases: requests that it answers now.
    """

    id: str
    bytes: int
    holds: tuple[Held, ...]
    leases: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """An adapter that asks for a place.

    Attributes:
        held: what a member would answer for.
        bytes: if it is kept as it is.
        merged: by member, the bytes of a merge with it.
        similarities: by member; higher is more alike.
    """

    held: Held
    bytes: int
    merged: Mapping[str, int] = field(default_factory=dict[str, int])
    similarities: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the adapter as it is, then say `committed`."""


@dataclass(frozen=True, slots=True)
class Try:
    """Merge it into this member and say what the gate finds by `judged`."""

    member: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the merge into this member, then say `committed`."""

    member: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The pool has it: this member answers."""

    member: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this member's files."""

    member: str


type Wanted = Keep | Try | Commit | Answered
type Option = Keep | Try


@dataclass(frozen=True, slots=True)
class Attempt:
    """A change under way.

    Attributes:
        arrival: who asks.
        now: what is being done.
        left: what is tried next, in order.
        found: the gate's findings so far, by member.
        bytes: reserved for what is written.
    """

    arrival: Arrival
    now: Wanted
    left: tuple[Option, ...]
    found: tuple[tuple[str, float], ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The table; each method returns the next one.

    Attributes:
        config: limits and rules.
        members: by id, in the order in which they were made.
        leaving: evicted, but requests still run on them.
        attempt: the one change under way.
    """

    config: PoolConfig
    members: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))
    leaving: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))
    attempt: Attempt | None = None

    @property
    def used(self) -> int:
        """Bytes of everything, what is being written included."""
        members = [*self.members.values(), *self.leaving.values()]
        tasks = sum(held.task_bytes for m in self.members.values() for held in m.holds)
        writing = 0 if self.attempt is None else self.attempt.bytes
        return sum(m.bytes for m in members) + tasks + writing + self.config.table_bytes

    def find(self, name: str) -> Member:
        """The member that answers for an adapter.

        Raises NotInPool.
        """
        for member in self.members.values():
            if any(held.name == name for held in member.holds):
                return member
        raise NotInPool(f"no member of the pool answers for {name!r}")

    def names(self) -> list[str]:
        """All adapters that the pool answers for."""
        return [held.name for member in self.members.values() for held in member.holds]

    def seen(self, now: Pool) -> Pool:
        """The table as others have made it meanwhile, with the leases of this one.

        Whoever is leased here and is a member there no more is leaving.
        """
        known = {**self.members, **self.leaving}
        leases = {id: member.leases for id, member in known.items() if member.leases}
        members = {id: replace(m, leases=leases.get(id, 0)) for id, m in now.members.items()}
        gone = {id: known[id] for id in leases if id not in members}
        leaving = {id: m for id, m in now.leaving.items() if id not in members} | gone
        return replace(now, members=MappingProxyType(members), leaving=MappingProxyType(leaving))

    # ---- a change

    def arrive(self, arrival: Arrival) -> tuple[Pool, Wanted]:
        """Begin to take an adapter in.

        Raises PoolRefusal when there is no place for it, or its name has other tensors already;
        ValueError when another change is under way, or a similarity is missing.
        """
        if self.attempt is not None:
            raise ValueError(f"{self.attempt.arrival.held.name} is being taken in; end that first")
        held = arrival.held
        if held.name in self.names():
            member = self.find(held.name)
            if any(h.digest == held.digest for h in member.holds if h.name == held.name):
                return self, Answered(member.id)
            raise PoolRefusal(
                f"{held.name} is in the pool with other tensors; add it under another name"
            )
        for id in self.members:
            if not isfinite(arrival.similarities.get(id, float("nan"))):
                raise ValueError(f"the similarity to {id} is missing, or no finite number")
        return self._next(arrival, self._options(arrival), ())

    def _options(self, arrival: Arrival) -> tuple[Option, ...]:
        """What the policy would do, in order."""
        alike = arrival.similarities
        order = sorted(self.members, key=lambda id: (-alike[id], list(self.members).index(id)))
        free = len(self.members) < self.config.adapters
        merges, keep = tuple(Try(id) for id in order), (Keep(),) if free else ()
        if self.config.policy == "gated":
            return (*merges, *keep)
        enough = self.config.policy == "kmerge++" and bool(
            order and alike[order[0]] >= self.config.threshold
        )
        return (*merges[:1], *keep) if enough else (*keep, *merges[:1])

    def _next(
        self,
        arrival: Arrival,
        options: tuple[Option, ...],
        found: tuple[tuple[str, float], ...],
    ) -> tuple[Pool, Wanted]:
        """The first option that the bytes allow; raises PoolRefusal when there is none."""
        free = self.config.bytes - replace(self, attempt=None).used - arrival.held.task_bytes
        short: list[int] = []
        for i, option in enumerate(options):
            size = arrival.bytes if isinstance(option, Keep) else arrival.merged[option.member]
            if size > free:
                short.append(size - free)
                continue
            wanted: Wanted = option
            if isinstance(option, Try) and self.config.policy != "gated":
                wanted = Commit(option.member)
            reserved = size + arrival.held.task_bytes
            attempt = Attempt(arrival, wanted, options[i + 1 :], found, reserved)
            return replace(self, attempt=attempt), wanted
        why = [f"the merge into {id[:12]} keeps {ratio:.2f} of a task" for id, ratio in found]
        if len(self.members) >= self.config.adapters:
            why.append(f"all {self.config.adapters} places are taken")
        if short:
            why.append(f"{max(short)} bytes are lacking of {self.config.bytes}")
        answering = sum(member.bytes for member in self.leaving.values())
        if passing := bool(short) and min(short) <= answering:
            why.append(f"members that answer their last requests still have {answering}")
        raise PoolRefusal(f"{arrival.held.name} is not taken in: {'; '.join(why)}", passing)

    def judged(self, ratio: float) -> tuple[Pool, Wanted]:
        """The gate's finding of the merge that is tried: the least share of a score that is kept.

        Raises PoolRefusal when nothing is left to try; ValueError when nothing is being tried.
        """
        attempt = self.attempt
        if attempt is None or not isinstance(attempt.now, Try):
            raise ValueError("no merge is being tried")
        if ratio >= self.config.gate:
            commit = Commit(attempt.now.member)
            return replace(self, attempt=replace(attempt, now=commit)), commit
        found = (*attempt.found, (attempt.now.member, ratio))
        return self._next(attempt.arrival, attempt.left, found)

    def committed(self, id: str, bytes: int) -> tuple[Pool, tuple[Delete, ...]]:
        """The new member is on disk: the table with it.

        Args:
            id: of the new member.
            bytes: of it, no more than were reserved.

        Raises ValueError when nothing is to be written, or it is larger than was said.
        """
        attempt = self.attempt
        if attempt is None or isinstance(attempt.now, Try | Answered):
            raise ValueError("nothing is to be committed")
        held = attempt.arrival.held
        if bytes + held.task_bytes > attempt.bytes:
            raise ValueError(
                f"{id} has {bytes} bytes; {attempt.bytes - held.task_bytes} were reserved"
            )
        if id in self.members:
            raise ValueError(f"{id} is a member already")
        members, leaving = dict(self.members), dict(self.leaving)
        back = leaving.pop(id, None)  # the same content comes again while it still answers
        holds: tuple[Held, ...] = (held,)
        gone: tuple[Delete, ...] = ()
        if isinstance(attempt.now, Commit):
            old = members.pop(attempt.now.member)
            holds = (*old.holds, held)
            if old.leases:
                leaving[old.id] = old
            else:
                gone = (Delete(old.id),)
        members[id] = Member(id, bytes, holds, 0 if back is None else back.leases)
        table = Pool(self.config, MappingProxyType(members), MappingProxyType(leaving))
        return table, gone

    def given_up(self) -> Pool:
        """The table without the change that was under way."""
        return replace(self, attempt=None)

    # ---- requests

    def request(self, name: str) -> tuple[Pool, Member]:
        """A lease on the member that answers for an adapter.

        Raises NotInPool.
        """
        return self.lease(self.find(name).id)

    def lease(self, id: str) -> tuple[Pool, Member]:
        """A lease on a member that answers, or still does.

        Raises MemberGone.
        """
        where = self.members if id in self.members else self.leaving
        if id not in where:
            raise MemberGone(f"the pool has no member {id}")
        leased = replace(where[id], leases=where[id].leases + 1)
        after = MappingProxyType({**where, id: leased})
        if id in self.members:
            return replace(self, members=after), leased
        return replace(self, leaving=after), leased

    def release(self, id: str) -> tuple[Pool, tuple[Delete, ...]]:
        """A request on a member has ended; one that was evicted goes with its last.

        Raises ValueError when nobody has a lease on it.
        """
        where = self.members if id in self.members else self.leaving
        member = where.get(id)
        if member is None or not member.leases:
            raise ValueError(f"nobody has a lease on {id}")
        after = replace(member, leases=member.leases - 1)
        if id in self.members:
            return replace(self, members=MappingProxyType({**where, id: after})), ()
        rest = {key: value for key, value in where.items() if key != id or after.leases}
        if id in rest:
            rest[id] = after
        gone = () if after.leases else (Delete(id),)
        return replace(self, leaving=MappingProxyType(rest)), gone


def least_ratio(merged: Mapping[str, float], single: Mapping[str, float]) -> float:
    """The least M(merged) / M(single) over tasks; one that scored 0 alone has nothing to lose.

    Raises ValueError when there is no task, or one was not scored.
    """
    if not single or not single.keys() <= merged.keys():
        raise ValueError(f"tasks are {sorted(single)}; scored were {sorted(merged)}")
    return min(merged[task] / score if score > 0 else 1.0 for task, score in single.items())


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a pool still answers of what was asked for.

    Attributes:
        asked: profiles that were asked for.
        answered: those that a member answers for.
        mean: of M(merged) / M(single) over all that were asked for; one that is not answered counts
            0.
        least: of those that are answered; 0 if none is.
    """

    asked: int
    answered: int
    mean: float
    least: float


def coverage(asked: Iterable[str], ratios: Mapping[str, float]) -> Coverage:
    """How many of the profiles that are asked for a pool answers, and how well.

    Args:
        asked: names, each counted once.
        ratios: M(merged) / M(single) of those that the pool answers for.
    """
    names = sorted(set(asked))
    found = [ratios[name] for name in names if name in ratios]
    mean = sum(found) / len(names) if names else 0.0
    return Coverage(len(names), len(found), mean, min(found, default=0.0))
