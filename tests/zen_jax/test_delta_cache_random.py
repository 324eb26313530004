"""The delta cache's table: what no sequence of transitions may do."""

from math import inf
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from zen_jax.checkpoint.manifest import Variant
from zen_jax.delta_cache import DeltaCache
from zen_jax.residency import (
    AbandonLoad,
    CacheConfig,
    DropStaged,
    Evicted,
    Grant,
    Loading,
    PinLimit,
    Refuse,
    Resident,
    Staged,
    StartLoad,
    WriteSlot,
)


class TableMachine(RuleBasedStateMachine):
    """Any sequence of transitions, with a bank and loads beside the table that believe nothing.

    `bank` is what the slots would hold, `loads` the loads that were begun and not given up,
    `staged` what lies beside the bank, `waiting` and `leased` what each holder was told.
    """

    slots, max_loads = 2, 2
    variants = Bundle("variants")

    def __init__(self) -> None:
        super().__init__()
        self.cache = DeltaCache(
            CacheConfig(
                slots=self.slots,
                max_loads=self.max_loads,
                load_timeout_s=8.0,
                backoff_s=1.0,
                max_backoff_s=4.0,
                forget_after_s=20.0,
                patience_s=3.0,
                wait_s=30.0,
            )
        )
        self.now = 0.0
        self.holders = 0
        self.waiting: dict[int, tuple[Variant, float]] = {}
        self.leased: dict[int, tuple[Variant, int]] = {}
        self.loads: dict[int, Variant] = {}
        self.given_up: dict[int, Variant] = {}
        self.staged: dict[int, Variant] = {}
        self.bank: dict[int, Variant] = {}
        self.pinned: set[str] = set()
        self.known: dict[str, Variant] = {}

    def apply(self, step: tuple[DeltaCache, tuple[object, ...]]) -> None:
        self.cache, actions = step
        for action in actions:
            match action:
                case StartLoad(which, attempt):
                    assert which.digest not in {v.digest for v in self.loads.values()}
                    assert attempt not in self.loads | self.given_up | self.staged
                    self.loads[attempt] = which
                case AbandonLoad(_, attempt):
                    self.given_up[attempt] = self.loads.pop(attempt)
                case DropStaged(_, attempt):
                    del self.staged[attempt]
                case WriteSlot(which, slot, attempt):
                    assert 0 <= slot < self.slots
                    assert slot not in self.bank, "written over"
                    assert self.staged.pop(attempt) == which
                    self.bank[slot] = which
                    before = {d for d in self.namesakes(which) if self.known[d].version < 2}
                    if before and which.version == 2:  # the pin goes over
                        self.pinned = self.pinned - before | {which.digest}
                case Evicted(digest, slot):
                    assert self.bank.pop(slot).digest == digest
                    assert digest not in self.pinned, "a pinned variant left"
                    assert slot not in {s for _, s in self.leased.values()}, "evicted under lease"
                case Grant(holder, slot):
                    which, _ = self.waiting.pop(holder)
                    assert self.bank[slot] == which
                    self.leased[holder] = which, slot
                case Refuse(holder):
                    del self.waiting[holder]
                case _:
                    raise AssertionError(action)

    @rule(target=variants, letter=st.sampled_from("abcd"), version=st.integers(1, 2))
    def publish(self, letter: str, version: int) -> Variant:
        which = Variant(f"zen4-{letter}", version, f"digest-{letter}{version}", Path("/store"))
        self.known[which.digest] = which
        return which

    def namesakes(self, which: Variant) -> set[str]:
        """The pinned versions of its name."""
        return {digest for digest in self.pinned if self.known[digest].name == which.name}

    @rule(which=variants)
    def request(self, which: Variant) -> None:
        self.holders += 1
        self.waiting[self.holders] = which, self.now
        self.apply(self.cache.request(self.holders, which, self.now))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), good=st.booleans())
    def end_load(self, data: st.DataObject, good: bool) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.loads)))
        which = self.loads.pop(attempt)
        if good:
            self.staged[attempt] = which
            self.apply(self.cache.loaded(which.digest, attempt, 1, self.now))
        else:
            self.apply(self.cache.failed(which.digest, attempt, "load_failed", "", self.now))

    @precondition(lambda self: self.given_up)
    @rule(data=st.data(), good=st.booleans())
    def end_load_too_late(self, data: st.DataObject, good: bool) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.given_up)))
        which = self.given_up.pop(attempt)
        if good:
            self.staged[attempt] = which
            self.apply(self.cache.loaded(which.digest, attempt, 1, self.now))
            assert attempt not in self.staged
        else:
            self.apply(self.cache.failed(which.digest, attempt, "corrupt", "", self.now))

    @precondition(lambda self: self.waiting or self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted([*self.waiting, *self.leased])))
        self.waiting.pop(holder, None)
        self.leased.pop(holder, None)
        self.apply(self.cache.release(holder, self.now))

    @rule(which=variants)
    def pin(self, which: Variant) -> None:
        others = self.pinned - self.namesakes(which)
        if len(others) < self.slots - 1:
            self.pinned = others | {which.digest}
            self.apply(self.cache.pin(which, self.now))
        else:
            with pytest.raises(PinLimit):
                self.cache.pin(which, self.now)

    @rule(which=variants)
    def unpin(self, which: Variant) -> None:
        self.pinned.discard(which.digest)
        self.apply(self.cache.unpin(which.digest, self.now))

    @rule(which=variants)
    def unload(self, which: Variant) -> None:
        self.pinned.discard(which.digest)
        self.apply(self.cache.unload(which.digest, self.now))

    @rule(seconds=st.sampled_from((0.25, 1.0, 3.0, 9.0, 31.0)))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.cache.tick(self.now))
        assert self.cache.wake_at > self.now, "it would be woken for nothing, again and again"

    @invariant()
    def the_table_says_what_happened(self) -> None:
        places = {d: e.place for d, e in self.cache.entries.items()}
        residents = {d: p for d, p in places.items() if isinstance(p, Resident)}
        assert {p.slot: d for d, p in residents.items()} == {
            slot: v.digest for slot, v in self.bank.items()
        }
        assert {p.attempt for p in places.values() if isinstance(p, Loading)} == set(self.loads)
        assert {p.attempt for p in places.values() if isinstance(p, Staged)} == set(self.staged)
        leases = [holder for p in residents.values() for holder in p.leases]
        assert sorted(leases) == sorted(self.leased)
        waiting = {h: d for d, e in self.cache.entries.items() for h in e.waiting}
        assert waiting == {h: v.digest for h, (v, _) in self.waiting.items()}
        assert self.cache.holders == waiting | {h: v.digest for h, (v, _) in self.leased.items()}
        assert {d for d, e in self.cache.entries.items() if e.pinned} == self.pinned

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.loads) + len(self.staged) <= self.max_loads
        assert len(self.bank) <= self.slots

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """Whoever waits has a load under way, a queue ahead, or leases to outlast."""
        for which, since in self.waiting.values():
            place = self.cache.entries[which.digest].place
            assert not isinstance(place, Resident) or place.retiring != "no"
            assert self.cache.wake_at <= max(since + 30.0, self.now + 8.0)

    @invariant()
    def nobody_waits_beside_a_slot_to_be_had(self) -> None:
        entries = self.cache.entries.values()
        idle = [
            entry
            for entry in entries
            if isinstance(entry.place, Resident) and not entry.place.leases and not entry.pinned
        ]
        if self.staged:
            assert len(self.bank) == self.slots and not idle

    def teardown(self) -> None:
        """All that runs ends, time passes: every waiter is resolved and nothing is left."""
        for _ in range(200):
            for holder in list(self.leased):
                self.leased.pop(holder)
                self.apply(self.cache.release(holder, self.now))
            if not self.waiting and not self.leased:
                break
            self.now = min(max(self.cache.wake_at, self.now), self.now + 60.0)
            self.apply(self.cache.tick(self.now))
        assert not self.waiting and not self.leased
        for which in list(self.pinned):
            self.apply(self.cache.unpin(which, self.now))
        self.pinned.clear()
        for _ in range(4):
            self.now += 100.0
            self.apply(self.cache.tick(self.now))
        assert not self.loads and not self.staged
        assert all(isinstance(e.place, Resident) for e in self.cache.entries.values())
        assert self.cache.wake_at == inf


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=settings.default.max_examples * 4 // 5, stateful_step_count=40
)
