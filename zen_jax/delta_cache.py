"""Which variants are in device memory: a pure, immutable table and its transitions.

The bank has a fixed number of slots. This table knows who is in which slot, who holds a lease on
it, what is being loaded and who waits for it. It touches no device, file, clock or thread: every
transition takes the time as an argument and returns the next table and the actions to carry out,
in order. Keys are digests, so a name that is given new weights is another entry.

The way of a variant:

    Absent -> Queued -> Loading -> Staged -> Resident -> Absent
                           |
                           +-> Absent, remembered as failed until its back-off is over

A slot is chosen only when the weights are staged, so a load that fails or hangs costs nobody's
place. A holder is leased from the moment its variant has a slot until it is released, and a leased
slot is never written. Slots go first to the free, then to the one least recently used among those
neither leased nor pinned; when all are taken the staged variant waits, and after `patience_s` the
least recently used slot stops giving leases so that the wait is bounded by what already runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from zen_jax.residency import (
    AbandonLoad,
    Absent,
    Action,
    CacheConfig,
    Digest,
    DropStaged,
    Entry,
    Evicted,
    Grant,
    Holder,
    LoadFailure,
    LoadFailureKind,
    Loading,
    PinLimit,
    Queued,
    RefusalKind,
    Refuse,
    Resident,
    Staged,
    StartLoad,
    WriteSlot,
)

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

type Step = tuple[DeltaCache, tuple[Action, ...]]


@dataclass(frozen=True, slots=True)
class DeltaCache:
    """The table. Make one with `DeltaCache(config)`; each method returns the next one.

    Attributes:
        config: sizes and waits.
        entries: by digest; a variant that is absent and has nothing to remember has no entry.
        holders: the digest that each holder waits for or has a lease on.
        turns: counts what must be told apart or put in order: uses, turns and attempts.
        wake_at: when `tick` next has something to do, or infinity.
    """

    config: CacheConfig
    entries: Mapping[Digest, Entry] = field(default_factory=lambda: MappingProxyType({}))
    holders: Mapping[Holder, Digest] = field(default_factory=lambda: MappingProxyType({}))
    turns: int = 0
    wake_at: float = inf

    def request(self, holder: Holder, variant: Variant, now: float) -> Step:
        """Ask for a lease on the variant: granted, refused, or waiting until either.

        Raises ValueError when the holder holds or awaits something already.
        """
        if holder in self.holders:
            raise ValueError(f"holder {holder} already holds or awaits {self.holders[holder]}")
        draft = _Draft(self, now)
        draft.ask(holder, variant)
        return draft.finish()

    def loaded(self, digest: Digest, attempt: int, size: int, now: float) -> Step:
        """Note that `attempt` has staged `size` bytes; an attempt no longer wanted is dropped."""
        place = self._loading(digest, attempt)
        if place is None:
            return self, (DropStaged(digest, attempt),)
        draft = _Draft(self, now)
        staged = Staged(place.turn, attempt, now, size)
        draft.entries[digest] = replace(self.entries[digest], place=staged, failure=None)
        return draft.finish()

    def failed(
        self, digest: Digest, attempt: int, kind: LoadFailureKind, message: str, now: float
    ) -> Step:
        """Note that `attempt` failed: its waiters are refused, the variant backs off."""
        if self._loading(digest, attempt) is None:
            return self, ()
        draft = _Draft(self, now)
        draft.fail(digest, kind, message)
        return draft.finish()

    def release(self, holder: Holder, now: float) -> Step:
        """End the holder's lease or wait. Raises ValueError when it has neither.

        A load that it waited for goes on: others may want it, and the next request will.
        """
        if holder not in self.holders:
            raise ValueError(f"holder {holder} has no lease and waits for none; release it once")
        draft = _Draft(self, now)
        draft.release(holder)
        return draft.finish()

    def pin(self, variant: Variant, now: float) -> Step:
        """Keep the variant in memory, loading it when it is absent, and no other version of it.

        The pin goes over to a newer version as soon as that is in memory. Raises PinLimit when the
        pin would leave fewer than one slot for the others.
        """
        pinned = [e.variant.name for e in self.entries.values() if e.pinned]
        others = sum(name != variant.name for name in pinned)
        if others >= self.config.slots - 1:
            raise PinLimit(variant.name, others)
        draft = _Draft(self, now)
        draft.pin(variant)
        return draft.finish()

    def unpin(self, digest: Digest, now: float) -> Step:
        """Let the variant be evicted like any other."""
        if digest not in self.entries:
            return self, ()
        draft = _Draft(self, now)
        draft.entries[digest] = replace(self.entries[digest], pinned=False)
        return draft.finish()

    def unload(self, digest: Digest, now: float) -> Step:
        """Take the variant out of memory and unpin it; it may be asked for again at once.

        Leases run to their end first, and requests that come meanwhile wait for a load anew. A
        load under way is given up and its waiters are refused as withdrawn.
        """
        if digest not in self.entries:
            return self, ()
        draft = _Draft(self, now)
        draft.unload(digest)
        return draft.finish()

    def tick(self, now: float) -> Step:
        """Let time pass: loads and waits that took too long, retries of what is pinned."""
        if now < self.wake_at:
            return self, ()
        draft = _Draft(self, now)
        draft.tick()
        return draft.finish()

    def lease(self, holder: Holder) -> int | None:
        """The slot leased to the holder, or None when it waits or is unknown."""
        digest = self.holders.get(holder)
        place = self.entries[digest].place if digest is not None else Absent()
        return place.slot if isinstance(place, Resident) and holder in place.leases else None

    def digests(self, name: str) -> tuple[Digest, ...]:
        """All that the table knows by that name: versions of one variant."""
        return tuple(d for d, e in self.entries.items() if e.variant.name == name)

    def slot(self, digest: Digest) -> int | None:
        """The slot that the variant is in, or None."""
        entry = self.entries.get(digest)
        return entry.place.slot if entry and isinstance(entry.place, Resident) else None

    def _loading(self, digest: Digest, attempt: int) -> Loading | None:
        entry = self.entries.get(digest)
        if entry is None or not isinstance(entry.place, Loading):
            return None
        return entry.place if entry.place.attempt == attempt else None


class _Draft:
    """One transition at work: copies to write on, made into a table again by `finish`."""

    def __init__(self, table: DeltaCache, now: float) -> None:
        self.config = table.config
        self.entries = dict(table.entries)
        self.holders = dict(table.holders)
        self.turns = table.turns
        self.now = now
        self.actions: list[Action] = []

    def finish(self) -> Step:
        """Do what every transition may have made possible, and close the draft."""
        self._free_unloaded()
        self._place_staged()
        self._make_room()
        self._keep_those_not_needed()
        self._start_queued()
        self._drop_empty()
        table = DeltaCache(
            config=self.config,
            entries=MappingProxyType(self.entries),
            holders=MappingProxyType(self.holders),
            turns=self.turns,
            wake_at=min(map(self._wake_at, self.entries.values()), default=inf),
        )
        return table, tuple(self.actions)

    # What the transitions ask for.

    def ask(self, holder: Holder, variant: Variant) -> None:
        digest = variant.digest
        entry = self.entries.get(digest, Entry(variant))
        failure = entry.failure
        if failure is not None and isinstance(entry.place, Absent) and self.now < failure.retry_at:
            wait = failure.retry_at - self.now
            self.actions.append(Refuse(holder, failure.kind, failure.message, wait))
            return
        waiting = MappingProxyType({**entry.waiting, holder: self.now})
        self.entries[digest] = replace(entry, waiting=waiting, used=self._turn())
        self.holders[holder] = digest
        if isinstance(entry.place, Resident):
            self._grant(digest)
        elif isinstance(entry.place, Absent):
            self._queue(digest)

    def release(self, holder: Holder) -> None:
        digest = self.holders.pop(holder)
        entry = self.entries[digest]
        place = entry.place
        if isinstance(place, Resident) and holder in place.leases:
            place = replace(place, leases=place.leases - {holder})
            self.entries[digest] = replace(entry, place=place, used=self._turn())
        else:
            self._stop_waiting(digest, [holder])

    def fail(self, digest: Digest, kind: LoadFailureKind, message: str) -> None:
        entry = self.entries[digest]
        count = 1 if entry.failure is None else entry.failure.count + 1
        wait = min(self.config.backoff_s * 2.0 ** min(count - 1, 60), self.config.max_backoff_s)
        failure = LoadFailure(kind, message, count, self.now + wait)
        self.entries[digest] = replace(entry, place=Absent(), failure=failure)
        self._refuse(digest, entry.waiting, kind, message, wait)

    def pin(self, variant: Variant) -> None:
        digest = variant.digest
        for other in self._pinned_by_name(variant):
            self.entries[other] = replace(self.entries[other], pinned=False)
        entry = replace(self.entries.get(digest, Entry(variant)), pinned=True)
        self.entries[digest] = entry
        if isinstance(entry.place, Resident):
            self.entries[digest] = replace(entry, place=replace(entry.place, retiring="no"))
            self._grant(digest)
        self._reload_pinned(digest)

    def unload(self, digest: Digest) -> None:
        entry = replace(self.entries[digest], pinned=False)
        self.entries[digest] = entry
        match entry.place:
            case Resident():
                place = replace(entry.place, retiring="unload")
                self.entries[digest] = replace(entry, place=place)
                return
            case Loading(attempt=attempt):
                self.actions.append(AbandonLoad(digest, attempt))
            case Staged(attempt=attempt):
                self.actions.append(DropStaged(digest, attempt))
            case Queued() | Absent():
                pass
        self.entries[digest] = replace(entry, place=Absent())
        message = f"{entry.variant.name} was unloaded by an operator before it was in memory"
        self._refuse(digest, entry.waiting, "withdrawn", message, None)

    def tick(self) -> None:
        for digest, entry in list(self.entries.items()):
            match entry.place:
                case Loading(attempt=attempt, since=since):
                    if since + self.config.load_timeout_s <= self.now:
                        self._time_out(digest, attempt)
                case Absent():
                    self._reload_pinned(digest)
                    self._forget(digest)
                case Queued() | Staged() | Resident():
                    self._refuse_overdue(digest)

    # Steps of the transitions.

    def _turn(self) -> int:
        self.turns += 1
        return self.turns

    def _queue(self, digest: Digest) -> None:
        place = Queued(self._turn())
        self.entries[digest] = replace(self.entries[digest], place=place)

    def _grant(self, digest: Digest) -> None:
        """Lease the slot to all who wait, unless it retires."""
        entry = self.entries[digest]
        place = entry.place
        if not isinstance(place, Resident) or place.retiring != "no" or not entry.waiting:
            return
        self.actions += [Grant(holder, place.slot) for holder in entry.waiting]
        place = replace(place, leases=place.leases.union(entry.waiting))
        self.entries[digest] = replace(entry, place=place, waiting=MappingProxyType({}))

    def _refuse(
        self,
        digest: Digest,
        holders: Iterable[Holder],
        kind: RefusalKind,
        message: str,
        retry_after_s: float | None,
    ) -> None:
        for holder in holders:
            del self.holders[holder]
            self.actions.append(Refuse(holder, kind, message, retry_after_s))
        self._stop_waiting(digest, holders)

    def _stop_waiting(self, digest: Digest, holders: Iterable[Holder]) -> None:
        entry = self.entries[digest]
        gone = set(holders)
        left = {holder: at for holder, at in entry.waiting.items() if holder not in gone}
        self.entries[digest] = replace(entry, waiting=MappingProxyType(left))

    def _time_out(self, digest: Digest, attempt: int) -> None:
        name = self.entries[digest].variant.name
        message = f"loading {name} took longer than {self.config.load_timeout_s:g} s"
        self.actions.append(AbandonLoad(digest, attempt))
        self.fail(digest, "load_failed", message)

    def _refuse_overdue(self, digest: Digest) -> None:
        entry = self.entries[digest]
        overdue = [h for h, at in entry.waiting.items() if at + self.config.wait_s <= self.now]
        message = f"no slot came free for {entry.variant.name} within {self.config.wait_s:g} s"
        self._refuse(digest, overdue, "exhausted", message, self.config.patience_s)

    def _pinned_by_name(self, variant: Variant) -> list[Digest]:
        pinned = [(digest, entry.variant) for digest, entry in self.entries.items() if entry.pinned]
        return [digest for digest, other in pinned if other.name == variant.name]

    def _take_pin_over(self, variant: Variant) -> None:
        """A pin is meant for a name: who comes into memory takes it from the versions before."""
        for digest in self._pinned_by_name(variant):
            if self.entries[digest].variant.version <= variant.version:
                self.entries[digest] = replace(self.entries[digest], pinned=False)
                entry = self.entries[variant.digest]
                self.entries[variant.digest] = replace(entry, pinned=True)

    def _reload_pinned(self, digest: Digest) -> None:
        entry = self.entries[digest]
        ready = entry.failure is None or entry.failure.retry_at <= self.now
        if entry.pinned and ready and isinstance(entry.place, Absent):
            self._queue(digest)

    def _forget(self, digest: Digest) -> None:
        entry = self.entries[digest]
        if entry.failure is not None and not entry.pinned and isinstance(entry.place, Absent):
            if entry.failure.retry_at + self.config.forget_after_s <= self.now:
                self.entries[digest] = replace(entry, failure=None)

    # Slots.

    def _residents(self) -> dict[Digest, Resident]:
        places = ((digest, entry.place) for digest, entry in self.entries.items())
        return {digest: place for digest, place in places if isinstance(place, Resident)}

    def _victim(self) -> Digest | None:
        """Who leaves next: among those neither leased nor pinned the least recently used.

        The one place where a policy decides; those that retire go first.
        """
        free = [
            digest
            for digest, place in self._residents().items()
            if not place.leases and not self.entries[digest].pinned
        ]
        residents = self._residents()
        return min(
            free,
            key=lambda d: (residents[d].retiring == "no", self.entries[d].used),
            default=None,
        )

    def _evict(self, digest: Digest) -> None:
        entry = self.entries[digest]
        if not isinstance(entry.place, Resident) or entry.place.leases:
            raise RuntimeError(f"{digest} is leased or not resident and cannot be evicted")
        self.actions.append(Evicted(digest, entry.place.slot))
        self.entries[digest] = replace(entry, place=Absent())
        if entry.waiting:
            self._queue(digest)

    def _free_slot(self) -> int | None:
        """A slot to write: a free one, else the victim's, who is evicted."""
        taken = {place.slot for place in self._residents().values()}
        if len(taken) == self.config.slots:
            victim = self._victim()
            if victim is None:
                return None
            self._evict(victim)
            taken = {place.slot for place in self._residents().values()}
        return min(set(range(self.config.slots)) - taken)

    def _staged(self) -> list[tuple[Digest, Staged]]:
        places = ((digest, entry.place) for digest, entry in self.entries.items())
        staged = [(digest, place) for digest, place in places if isinstance(place, Staged)]
        return sorted(staged, key=lambda pair: pair[1].turn)

    def _free_unloaded(self) -> None:
        for digest, place in self._residents().items():
            if place.retiring == "unload" and not place.leases:
                self._evict(digest)

    def _place_staged(self) -> None:
        for digest, staged in self._staged():
            slot = self._free_slot()
            if slot is not None:
                entry = self.entries[digest]
                self.actions.append(WriteSlot(entry.variant, slot, staged.attempt))
                place = Resident(slot, staged.bytes)
                self.entries[digest] = replace(entry, place=place, used=self._turn())
                self._take_pin_over(entry.variant)
                self._grant(digest)
            elif not self.entries[digest].wanted:
                self.actions.append(DropStaged(digest, staged.attempt))
                self.entries[digest] = replace(self.entries[digest], place=Absent())

    def _make_room(self) -> None:
        """Retire one slot for each staged variant whose patience is over."""
        residents = self._residents()
        needed = sum(p.since + self.config.patience_s <= self.now for _, p in self._staged())
        needed -= sum(place.retiring != "no" for place in residents.values())
        candidates = [
            digest
            for digest, place in residents.items()
            if place.retiring == "no" and not self.entries[digest].pinned
        ]
        candidates.sort(key=lambda digest: self.entries[digest].used)
        for digest in candidates[: max(needed, 0)]:
            place = replace(residents[digest], retiring="make_room")
            self.entries[digest] = replace(self.entries[digest], place=place)

    def _keep_those_not_needed(self) -> None:
        """Who retires to make room for no one any more gives leases again."""
        needed = len(self._staged())
        for digest, place in self._residents().items():
            if place.retiring != "make_room":
                continue
            needed -= 1
            if needed < 0:
                place = replace(place, retiring="no")
                self.entries[digest] = replace(self.entries[digest], place=place)
                self._grant(digest)

    # Loads.

    def _start_queued(self) -> None:
        turns: list[tuple[int, Digest]] = []
        under_way = 0
        for digest, entry in self.entries.items():
            if isinstance(entry.place, Loading | Staged):
                under_way += 1
            elif isinstance(entry.place, Queued) and entry.wanted:
                turns.append((entry.place.turn, digest))
            elif isinstance(entry.place, Queued):
                self.entries[digest] = replace(entry, place=Absent())
        for turn, digest in sorted(turns)[: max(self.config.max_loads - under_way, 0)]:
            entry = self.entries[digest]
            place = Loading(turn, self._turn(), self.now)
            self.actions.append(StartLoad(entry.variant, place.attempt))
            self.entries[digest] = replace(entry, place=place)

    def _drop_empty(self) -> None:
        for digest, entry in list(self.entries.items()):
            if isinstance(entry.place, Absent) and entry.failure is None and not entry.wanted:
                del self.entries[digest]

    def _wake_at(self, entry: Entry) -> float:
        waits = min(entry.waiting.values(), default=inf) + self.config.wait_s
        match entry.place:
            case Loading(since=since):
                return since + self.config.load_timeout_s
            case Staged(since=since):
                patience = since + self.config.patience_s
                return min(waits, patience if patience > self.now else inf)
            case Absent() if entry.failure is not None:
                forget = 0.0 if entry.pinned else self.config.forget_after_s
                return entry.failure.retry_at + forget
            case _:
                return waits
