"""The delta cache's table: what no sequence of transitions may do."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from zen_jax.checkpoint.manifest import Variant
from zen_jax.delta_cache import DeltaCache
from zen_jax.eviction import Policy
from zen_jax.residency import (
    AbandonLoad,
    CacheConfig,
    DropHost,
    DropStaged,
    Evicted,
    Grant,
    Loading,
    PinLimit,
    Queued,
    Refuse,
    Resident,
    Staged,
    StartLoad,
    StartPut,
    WriteSlot,
    Writing,
)


@dataclass
class Task:
    """A load that runs: what of it, and since when; given up when it is not wanted."""

    variant: Variant
    stage: str
    since: float
    wanted: bool = True


SLOT, FILES = 10, 6  # bytes of a variant in the bank's shapes, and of its files
LOAD = FILES + 2 * SLOT


class TableMachine(RuleBasedStateMachine):
    """Any sequence of transitions, with a bank, loads and memory beside the table that believe
    nothing.

    `bank` is what the slots hold and answer by, `writing` what is being written into them, `tasks`
    the loads that run, given up or not, `host` the copies in host memory, `staged` what lies beside
    the bank, `waiting` and `leased` what each holder was told.
    """

    slots, max_loads, max_staged, host_bytes = 2, 2, 2, 2 * LOAD + 15
    variants = Bundle("variants")

    def __init__(self) -> None:
        super().__init__()
        policy = Policy(half_life_s=10.0, recency_s=5.0, pinned=1, idle_after_s=25.0)
        self.cache = DeltaCache(
            CacheConfig(
                slots=self.slots,
                policy=policy,
                max_loads=self.max_loads,
                max_staged=self.max_staged,
                slot_bytes=SLOT,
                host_bytes=self.host_bytes,
                read_s=8.0,
                verify_s=4.0,
                put_s=5.0,
                commit_s=2.0,
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
        self.tasks: dict[int, Task] = {}
        self.host: dict[str, int] = {}
        self.staged: dict[int, Variant] = {}
        self.writing: dict[int, tuple[Variant, int]] = {}
        self.bank: dict[int, Variant] = {}
        self.pinned: set[str] = set()
        self.known: dict[str, Variant] = {}
        self.failed_at: dict[str, float] = {}

    def apply(self, step: tuple[DeltaCache, tuple[object, ...]]) -> None:
        self.cache, actions = step
        for action in actions:
            self.carry_out(action)

    def begin(self, which: Variant, attempt: int, stage: str) -> None:
        under_way = {t.variant.digest for t in self.tasks.values() if t.wanted}
        under_way |= {v.digest for v in self.staged.values()}
        under_way |= {self.writing[a][0].digest for a in self.written_to()}
        assert which.digest not in under_way, "a second load of one variant"
        assert attempt not in self.tasks and attempt not in self.staged
        self.tasks[attempt] = Task(which, stage, self.now)

    def carry_out(self, action: object) -> None:
        match action:
            case StartLoad(which, attempt):
                assert which.digest not in self.host, "read though it is in host memory"
                assert self.now >= self.failed_at.get(which.digest, self.now), "no back-off"
                self.begin(which, attempt, "read")
            case StartPut(which, attempt):
                assert which.digest in self.host, "put without a copy"
                self.begin(which, attempt, "put")
            case AbandonLoad(_, attempt):
                self.tasks[attempt].wanted = False
            case DropStaged(_, attempt):
                del self.staged[attempt]
            case DropHost(digest):
                put = [t.variant.digest for t in self.tasks.values() if t.stage == "put"]
                assert digest not in put, "dropped while it is read from"
                del self.host[digest]
            case WriteSlot(which, slot, attempt):
                assert 0 <= slot < self.slots
                assert slot not in [*self.bank, *self.written_to().values()], "written over"
                assert self.staged.pop(attempt) == which
                self.writing[attempt] = which, slot
                self.started_writing = self.now
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

    def written_to(self) -> dict[int, int]:
        """The slots that are being written, by attempt, but those that were given up."""
        places = [entry.place for entry in self.cache.entries.values()]
        wanted = {place.attempt for place in places if isinstance(place, Writing)}
        return {a: slot for a, (_, slot) in self.writing.items() if a in wanted}

    @rule(target=variants, letter=st.sampled_from("abcd"), version=st.integers(1, 2))
    def publish(self, letter: str, version: int) -> Variant:
        which = Variant(
            f"zen4-{letter}", version, f"digest-{letter}{version}", Path("/store"), FILES
        )
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

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), good=st.integers(0, 3))
    def end_stage(self, data: st.DataObject, good: int) -> None:
        """A stage ends, three times in four well; of one given up only that is told."""
        attempt = data.draw(st.sampled_from(sorted(self.tasks)))
        task = self.tasks[attempt]
        digest = task.variant.digest
        if not task.wanted:
            del self.tasks[attempt]
            self.apply(self.cache.ended(attempt, self.now))
        elif not good:
            del self.tasks[attempt]
            self.note_failure(digest)
            self.apply(self.cache.failed(digest, attempt, "load_failed", "", self.now))
        elif task.stage == "read":
            task.stage = "verify"
            self.apply(self.cache.advanced(digest, attempt, "verify", self.now))
        elif task.stage == "verify":
            del self.tasks[attempt]
            self.host[digest] = SLOT
            self.apply(self.cache.fetched(digest, attempt, SLOT, self.now))
        else:
            del self.tasks[attempt]
            self.staged[attempt] = task.variant
            self.apply(self.cache.loaded(digest, attempt, SLOT, self.now))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.integers(0, 3))
    def end_write(self, data: st.DataObject, good: int) -> None:
        """A slot is written or could not be; one that was given up meanwhile changes nothing."""
        attempt = data.draw(st.sampled_from(sorted(self.writing)))
        wanted = attempt in self.written_to()
        which, slot = self.writing.pop(attempt)
        if not good:
            if wanted:
                self.note_failure(which.digest)
            self.apply(self.cache.failed(which.digest, attempt, "load_failed", "", self.now))
            return
        if wanted:
            self.bank[slot] = which
            before = {d for d in self.namesakes(which) if self.known[d].version <= which.version}
            if before:  # the pin goes over
                self.pinned = self.pinned - before | {which.digest}
        self.apply(self.cache.committed(which.digest, attempt, self.now))

    def note_failure(self, digest: str) -> None:
        self.failed_at[digest] = self.now + 1.0

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
        wanted = {attempt for attempt, task in self.tasks.items() if task.wanted}
        assert {p.attempt for p in places.values() if isinstance(p, Loading)} == wanted
        assert set(self.cache.lingering) == set(self.tasks) - wanted
        assert {p.attempt for p in places.values() if isinstance(p, Staged)} == set(self.staged)
        assert {d: copy.bytes for d, copy in self.cache.host.items()} == self.host
        leases = [holder for p in residents.values() for holder in p.leases]
        assert sorted(leases) == sorted(self.leased)
        waiting = {h: d for d, e in self.cache.entries.items() for h in e.waiting}
        assert waiting == {h: v.digest for h, (v, _) in self.waiting.items()}
        assert self.cache.holders == waiting | {h: v.digest for h, (v, _) in self.leased.items()}
        assert {d for d, e in self.cache.entries.items() if e.pinned} == self.pinned

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.bank) + len(self.written_to()) <= self.slots
        reading = [task for task in self.tasks.values() if task.stage != "put"]
        assert sum(task.wanted for task in reading) <= self.max_loads
        used = sum(self.host.values()) + LOAD * len(reading)
        assert used == self.cache.host_used <= self.host_bytes
        puts = len(self.tasks) - len(reading)
        assert puts + len(self.staged) + len(self.written_to()) <= self.max_staged
        assert len(self.cache.kept | self.pinned & set(self.known)) <= self.slots
        assert len(self.cache.kept) + len(self.pinned) <= self.slots - 1 or not self.cache.kept

    @invariant()
    def every_stage_has_a_deadline(self) -> None:
        for entry in self.cache.entries.values():
            if isinstance(entry.place, Loading | Writing):
                assert self.cache.wake_at <= entry.place.since + 8.0

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """Whoever waits has a load under way, a queue ahead, or leases to outlast."""
        for which, since in self.waiting.values():
            place = self.cache.entries[which.digest].place
            assert not isinstance(place, Resident) or place.retiring != "no"
            assert self.cache.wake_at <= max(since + 30.0, self.now + 8.0)
            if isinstance(place, Queued | Staged | Resident):
                assert self.now - since < 30.0 + 100.0, "waited without end"

    @invariant()
    def nobody_waits_beside_a_slot_to_be_had(self) -> None:
        idle = [
            digest
            for digest, entry in self.cache.entries.items()
            if isinstance(entry.place, Resident) and not entry.place.leases and not entry.pinned
        ]
        if self.staged:
            assert len(self.bank) + len(self.written_to()) == self.slots
            assert set(idle) <= self.cache.kept

    @invariant()
    def a_variant_stays_while_something_queued_for_it_is_not_served(self) -> None:
        for which, slot in self.leased.values():
            assert self.bank[slot] == which

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
        for attempt, task in list(self.tasks.items()):
            if not task.wanted:
                del self.tasks[attempt]
                self.apply(self.cache.ended(attempt, self.now))
        for _ in range(4):
            self.now += 100.0
            self.apply(self.cache.tick(self.now))
        assert not any(task.wanted for task in self.tasks.values()) and not self.staged
        assert all(isinstance(e.place, Resident) for e in self.cache.entries.values())
        assert self.cache.wake_at == inf


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=settings.default.max_examples * 4 // 5, stateful_step_count=40
)
