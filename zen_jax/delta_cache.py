"""Which variants are in memory: a pure, immutable table and its transitions.

The bank has a fixed number of slots, host memory a budget in bytes. This table knows who is in
which slot, who has a copy in host memory, who holds a lease, what is being loaded and who waits for
it. It touches no device, file, clock or thread: every transition takes the time as an argument and
returns the next table and the actions to carry out, in order. Keys are digests, so a name that is
given new weights is another entry; how often a variant is asked for is its name's affair, so that a
new version is as hot as the one before, which is then the first to go.

The way of a variant, each stage of a load with a deadline of its own:

    Absent -> Queued -> Loading read, verify -> (a copy in host memory) -> Loading put -> Staged
      ^         ^                                                                           |
      |         +-- evicted while somebody waits                                            v
      +-- failed: remembered until its back-off is over <-----------  Resident <-- Writing commit

A slot is chosen only when the weights are staged, so a load that fails or hangs costs nobody's
place. A holder is leased from the moment its variant is resident until it is released, and a leased
slot is never written; so a variant stays until all that was queued for it is served. Slots go first
to the free, then to the victim of `zen_jax.eviction` among those that nobody holds, that are not
pinned and not among the most asked for. When there is none the staged variant waits, and after
`patience_s` the one that would be the victim stops giving leases, so that the wait is bounded by
what already runs, and by `wait_s` in any case. What is queued is read into host memory meanwhile.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from zen_jax import cache_loads, cache_slots, eviction
from zen_jax.cache_draft import Asked, Draft
from zen_jax.residency import (
    Absent,
    Action,
    CacheConfig,
    Digest,
    DropStaged,
    Entry,
    Holder,
    HostCopy,
    Lingering,
    LoadFailureKind,
    Loading,
    PinLimit,
    Resident,
    Stage,
    Staged,
    Writing,
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
        host: copies in host memory.
        asked: by name, how often a variant was asked for, and in which version last.
        kept: the most asked for, who stay.
        lingering: by attempt, loads that were given up and have not ended.
        turns: counts what must be told apart or put in order: turns and attempts.
        wake_at: when `tick` next has something to do, or infinity.
    """

    config: CacheConfig
    entries: Mapping[Digest, Entry] = field(default_factory=lambda: MappingProxyType({}))
    holders: Mapping[Holder, Digest] = field(default_factory=lambda: MappingProxyType({}))
    host: Mapping[Digest, HostCopy] = field(default_factory=lambda: MappingProxyType({}))
    asked: Mapping[str, Asked] = field(default_factory=lambda: MappingProxyType({}))
    kept: frozenset[Digest] = frozenset()
    lingering: Mapping[int, Lingering] = field(default_factory=lambda: MappingProxyType({}))
    turns: int = 0
    wake_at: float = inf

    def request(self, holder: Holder, variant: Variant, now: float) -> Step:
        """Ask for a lease on the variant: granted, refused, or waiting until either.

        Raises ValueError when the holder holds or awaits something already.
        """
        if holder in self.holders:
            raise ValueError(f"holder {holder} already holds or awaits {self.holders[holder]}")
        draft = self._draft(now)
        draft.ask(holder, variant)
        return self._finish(draft)

    def advanced(self, digest: Digest, attempt: int, stage: Stage, now: float) -> Step:
        """Note that `attempt` has begun another stage, whose deadline counts from now."""
        place = self._on_its_way(digest, attempt)
        if not isinstance(place, Loading):
            return self, ()
        draft = self._draft(now)
        draft.put(digest, replace(place, stage=stage, since=now))
        return self._finish(draft)

    def fetched(self, digest: Digest, attempt: int, size: int, now: float) -> Step:
        """Note that `attempt` has left a checked copy of `size` bytes in host memory.

        The copy of an attempt that is no longer wanted is dropped.
        """
        place = self._on_its_way(digest, attempt)
        if not isinstance(place, Loading):
            return self, ()
        draft = self._draft(now)
        cache_loads.fetched(draft, digest, place, size)
        return self._finish(draft)

    def loaded(self, digest: Digest, attempt: int, size: int, now: float) -> Step:
        """Note that `attempt` has staged `size` bytes on the device; one no longer wanted is
        dropped."""
        place = self._on_its_way(digest, attempt)
        if not isinstance(place, Loading):
            return self, (DropStaged(digest, attempt),)
        draft = self._draft(now)
        draft.put(digest, Staged(place.turn, attempt, now, size))
        return self._finish(draft)

    def committed(self, digest: Digest, attempt: int, now: float) -> Step:
        """Note that what `attempt` staged is in its slot: its waiters are granted."""
        place = self._on_its_way(digest, attempt)
        if not isinstance(place, Writing):
            return self, ()
        draft = self._draft(now)
        cache_slots.committed(draft, digest, place)
        return self._finish(draft)

    def failed(
        self, digest: Digest, attempt: int, kind: LoadFailureKind, message: str, now: float
    ) -> Step:
        """Note that a stage of `attempt` failed: its waiters are refused, the variant backs off,
        a slot that was being written is free."""
        if self._on_its_way(digest, attempt) is None:
            return self, ()
        draft = self._draft(now)
        draft.fail(digest, kind, message)
        return self._finish(draft)

    def ended(self, attempt: int, now: float) -> Step:
        """Note that a load that was given up has ended and holds no memory any more."""
        if attempt not in self.lingering:
            return self, ()
        draft = self._draft(now)
        del draft.lingering[attempt]
        return self._finish(draft)

    def release(self, holder: Holder, now: float) -> Step:
        """End the holder's lease or wait. Raises ValueError when it has neither.

        A load that it waited for goes on: others may want it, and the next request will.
        """
        if holder not in self.holders:
            raise ValueError(f"holder {holder} has no lease and waits for none; release it once")
        draft = self._draft(now)
        draft.release(holder)
        return self._finish(draft)

    def pin(self, variant: Variant, now: float) -> Step:
        """Keep the variant in memory, loading it when it is absent, and no other version of it.

        The pin goes over to a newer version as soon as that is in memory. Raises PinLimit when the
        pin would leave fewer than one slot for the others.
        """
        pinned = [e.variant.name for e in self.entries.values() if e.pinned]
        others = sum(name != variant.name for name in pinned)
        if others >= self.config.slots - 1:
            raise PinLimit(variant.name, others)
        draft = self._draft(now)
        cache_slots.pin(draft, variant)
        return self._finish(draft)

    def unpin(self, digest: Digest, now: float) -> Step:
        """Let the variant be evicted like any other."""
        if digest not in self.entries:
            return self, ()
        draft = self._draft(now)
        draft.entries[digest] = replace(self.entries[digest], pinned=False)
        return self._finish(draft)

    def unload(self, digest: Digest, now: float) -> Step:
        """Take the variant out of memory, host memory too, and unpin it; it may be asked for again
        at once.

        Leases run to their end first, and requests that come meanwhile wait for a load anew. A
        load under way is given up and its waiters are refused as withdrawn.
        """
        if digest not in self.entries and digest not in self.host:
            return self, ()
        draft = self._draft(now)
        cache_slots.unload(draft, digest)
        return self._finish(draft)

    def tick(self, now: float) -> Step:
        """Let time pass: loads and waits that took too long, retries of what is pinned."""
        if now < self.wake_at:
            return self, ()
        draft = self._draft(now)
        cache_loads.tick(draft)
        return self._finish(draft)

    def lease(self, holder: Holder) -> int | None:
        """The slot leased to the holder, or None when it waits or is unknown."""
        digest = self.holders.get(holder)
        place = self.entries[digest].place if digest is not None else Absent()
        return place.slot if isinstance(place, Resident) and holder in place.leases else None

    def digests(self, name: str) -> tuple[Digest, ...]:
        """All that the table knows by that name: versions of one variant."""
        known = [(digest, entry.variant) for digest, entry in self.entries.items()]
        known += [(digest, copy.variant) for digest, copy in self.host.items()]
        return tuple({digest: None for digest, variant in known if variant.name == name})

    def slot(self, digest: Digest) -> int | None:
        """The slot that the variant is in, or None."""
        entry = self.entries.get(digest)
        return entry.place.slot if entry and isinstance(entry.place, Resident) else None

    def rate(self, variant: Variant, now: float) -> float:
        """Requests a second for the variant of late; a version that another took over from: 0."""
        asked = self.asked.get(variant.name)
        if asked is None or asked.digest != variant.digest:
            return 0.0
        return eviction.rate(self.config.policy, asked.traffic, now)

    @property
    def host_used(self) -> int:
        """Bytes of host memory: copies, and what loads take at most, those given up included."""
        return cache_loads.host_used(self._draft(0.0))

    def _on_its_way(self, digest: Digest, attempt: int) -> Loading | Writing | None:
        entry = self.entries.get(digest)
        if entry is None or not isinstance(entry.place, Loading | Writing):
            return None
        return entry.place if entry.place.attempt == attempt else None

    def _draft(self, now: float) -> Draft:
        return Draft(
            config=self.config,
            now=now,
            entries=dict(self.entries),
            holders=dict(self.holders),
            host=dict(self.host),
            asked=dict(self.asked),
            kept=self.kept,
            lingering=dict(self.lingering),
            turns=self.turns,
        )

    def _finish(self, draft: Draft) -> Step:
        """Do what every transition may have made possible, and close the draft."""
        cache_slots.settle(draft)
        cache_loads.start_queued(draft)
        draft.drop_empty()
        table = DeltaCache(
            config=self.config,
            entries=MappingProxyType(draft.entries),
            holders=MappingProxyType(draft.holders),
            host=MappingProxyType(draft.host),
            asked=MappingProxyType(draft.asked),
            kept=draft.kept,
            lingering=MappingProxyType(draft.lingering),
            turns=draft.turns,
            wake_at=min(map(draft.wake_at, draft.entries.values()), default=inf),
        )
        return table, tuple(draft.actions)
