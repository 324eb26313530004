"""One transition of the delta cache at work: copies to write on, and the steps that all take.

`zen_jax.delta_cache` opens a draft and makes a table of it again; what is done with slots stands in
`zen_jax.cache_slots`, what is done about loads and host memory in `zen_jax.cache_loads`.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from zen_jax import eviction
from zen_jax.eviction import NEVER, Traffic
from zen_jax.residency import (
    Absent,
    Action,
    CacheConfig,
    Digest,
    Entry,
    Grant,
    Holder,
    HostCopy,
    Lingering,
    LoadFailure,
    LoadFailureKind,
    Loading,
    Place,
    Queued,
    RefusalKind,
    Refuse,
    Resident,
    Staged,
    Writing,
)

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

# Of a name that is new, those are forgotten that were not asked for in so many half-lives.
_FORGET_HALF_LIVES = 20.0


@dataclass(frozen=True, slots=True)
class Asked:
    """How often a name was asked for, and which of its versions last."""

    digest: Digest
    traffic: Traffic


@dataclass(slots=True)
class Draft:
    """Copies of a table's parts, see `zen_jax.delta_cache.DeltaCache`, and what is to be done."""

    config: CacheConfig
    now: float
    entries: dict[Digest, Entry]
    holders: dict[Holder, Digest]
    host: dict[Digest, HostCopy]
    asked: dict[str, Asked]
    kept: frozenset[Digest]
    lingering: dict[int, Lingering]
    turns: int
    actions: list[Action] = field(default_factory=list[Action])

    # What is known.

    def traffic(self, variant: Variant) -> Traffic:
        """Of the variant's name; never asked for, if another version of it was asked for last."""
        asked = self.asked.get(variant.name)
        return asked.traffic if asked and asked.digest == variant.digest else NEVER

    def superseded(self, variant: Variant) -> bool:
        """Whether another version of its name was asked for since."""
        asked = self.asked.get(variant.name)
        return asked is not None and asked.digest != variant.digest

    def worth(self, variant: Variant) -> tuple[bool, bool, float]:
        """Whose place is worth least is least: old versions, then the cold, then by the score."""
        policy, traffic = self.config.policy, self.traffic(variant)
        return (
            not self.superseded(variant),
            not eviction.cold(policy, traffic, self.now),
            eviction.score(policy, traffic, self.now),
        )

    def residents(self) -> dict[Digest, Resident]:
        """Who is in a slot and answers."""
        places = ((digest, entry.place) for digest, entry in self.entries.items())
        return {digest: place for digest, place in places if isinstance(place, Resident)}

    def places[T: Place](self, kind: type[T]) -> list[tuple[Digest, T]]:
        """Who is at such a place."""
        places = ((digest, entry.place) for digest, entry in self.entries.items())
        return [(digest, place) for digest, place in places if isinstance(place, kind)]

    def read_from(self, digest: Digest) -> bool:
        """Whether the variant's copy in host memory is being put on the device, perhaps by a load
        that was given up."""
        entry = self.entries.get(digest)
        loading = entry is not None and isinstance(entry.place, Loading)
        lingering = (load for load in self.lingering.values() if load.digest == digest)
        return loading or any(load.stage == "put" for load in lingering)

    def wake_at(self, entry: Entry) -> float:
        """When time alone changes something for an entry."""
        waits = min(entry.waiting.values(), default=inf) + self.config.wait_s
        match entry.place:
            case Loading(stage=stage, since=since):
                return since + self.config.deadline_s(stage)
            case Writing(since=since):
                return since + self.config.commit_s
            case Staged(since=since):
                patience = since + self.config.patience_s
                return min(waits, patience if patience > self.now else inf)
            case Absent() if entry.failure is not None:
                forget = 0.0 if entry.pinned else self.config.forget_after_s
                return entry.failure.retry_at + forget
            case _:
                return waits

    # Steps of the transitions.

    def turn(self) -> int:
        """A number that was never given before."""
        self.turns += 1
        return self.turns

    def put(self, digest: Digest, place: Place) -> None:
        """Move a variant; who is brought to where a load has succeeded has no failure any more."""
        failure = None if isinstance(place, Staged) else self.entries[digest].failure
        self.entries[digest] = replace(self.entries[digest], place=place, failure=failure)

    def queue(self, digest: Digest) -> None:
        """Have a variant brought into memory in its turn."""
        self.put(digest, Queued(self.turn()))

    def ask(self, holder: Holder, variant: Variant) -> None:
        """Note a request, and grant it, refuse it or have it wait."""
        self._count(variant)
        digest = variant.digest
        entry = self.entries.get(digest, Entry(variant))
        failure = entry.failure
        if failure is not None and isinstance(entry.place, Absent) and self.now < failure.retry_at:
            wait = failure.retry_at - self.now
            self.actions.append(Refuse(holder, failure.kind, failure.message, wait))
            return
        waiting = MappingProxyType({**entry.waiting, holder: self.now})
        self.entries[digest] = replace(entry, waiting=waiting)
        self.holders[holder] = digest
        if isinstance(entry.place, Resident):
            self.grant(digest)
        elif isinstance(entry.place, Absent):
            self.queue(digest)
        self.choose_kept()

    def _count(self, variant: Variant) -> None:
        policy, before = self.config.policy, self.asked.get(variant.name)
        if before is None:
            long = _FORGET_HALF_LIVES * policy.half_life_s
            for name, other in list(self.asked.items()):
                cold = eviction.cold(policy, other.traffic, self.now)
                if cold and self.now - other.traffic.at > long:
                    del self.asked[name]
        traffic = NEVER if before is None else before.traffic
        traffic = eviction.asked(policy, traffic, self.now)
        self.asked[variant.name] = Asked(variant.digest, traffic)

    def release(self, holder: Holder) -> None:
        """End a lease or a wait."""
        digest = self.holders.pop(holder)
        entry = self.entries[digest]
        place = entry.place
        if isinstance(place, Resident) and holder in place.leases:
            self.put(digest, replace(place, leases=place.leases - {holder}))
            asked = self.asked.get(entry.variant.name)
            if asked is not None and asked.digest == digest:
                used = replace(asked.traffic, used=self.now)
                self.asked[entry.variant.name] = replace(asked, traffic=used)
        else:
            self._stop_waiting(digest, [holder])

    def grant(self, digest: Digest) -> None:
        """Lease the slot to all who wait, unless it retires."""
        entry = self.entries[digest]
        place = entry.place
        if not isinstance(place, Resident) or place.retiring != "no" or not entry.waiting:
            return
        self.actions += [Grant(holder, place.slot) for holder in entry.waiting]
        place = replace(place, leases=place.leases.union(entry.waiting))
        self.entries[digest] = replace(entry, place=place, waiting=MappingProxyType({}))

    def refuse(
        self,
        digest: Digest,
        holders: Iterable[Holder],
        kind: RefusalKind,
        message: str,
        retry_after_s: float | None,
    ) -> None:
        """Tell holders that they get nothing; they wait no longer."""
        for holder in holders:
            del self.holders[holder]
            self.actions.append(Refuse(holder, kind, message, retry_after_s))
        self._stop_waiting(digest, holders)

    def _stop_waiting(self, digest: Digest, holders: Iterable[Holder]) -> None:
        entry = self.entries[digest]
        gone = set(holders)
        left = {holder: at for holder, at in entry.waiting.items() if holder not in gone}
        self.entries[digest] = replace(entry, waiting=MappingProxyType(left))

    def fail(self, digest: Digest, kind: LoadFailureKind, message: str) -> None:
        """Refuse all that wait for a variant, and try no more until its back-off is over."""
        entry = self.entries[digest]
        count = 1 if entry.failure is None else entry.failure.count + 1
        wait = min(self.config.backoff_s * 2.0 ** min(count - 1, 60), self.config.max_backoff_s)
        failure = LoadFailure(kind, message, count, self.now + wait)
        self.entries[digest] = replace(entry, place=Absent(), failure=failure)
        self.refuse(digest, entry.waiting, kind, message, wait)

    def choose_kept(self) -> None:
        """Choose the most asked for among those in memory; operators' pins come off their number,
        and one slot is left to the others."""
        residents = self.residents()
        pinned = sum(entry.pinned for entry in self.entries.values())
        candidates = {
            digest: self.traffic(self.entries[digest].variant)
            for digest, place in residents.items()
            if place.retiring == "no" and not self.entries[digest].pinned
        }
        policy = self.config.policy
        quota = max(min(policy.pinned, self.config.slots - 1 - pinned), 0)
        self.kept = eviction.keep(policy, self.kept, candidates, candidates, quota, self.now)

    def drop_empty(self) -> None:
        """Forget who is absent and wanted by nobody, a failure when its time is over."""
        for digest, entry in list(self.entries.items()):
            if not isinstance(entry.place, Absent) or entry.wanted:
                continue
            failure = entry.failure
            if failure is None or failure.retry_at + self.config.forget_after_s <= self.now:
                del self.entries[digest]
        if not self.kept <= self.entries.keys():
            self.kept = self.kept & self.entries.keys()
