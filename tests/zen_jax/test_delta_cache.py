"""The delta cache's table: what each transition does."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

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
    PinLimit,
    Refuse,
    StartLoad,
    StartPut,
    WriteSlot,
)

A, B, C, D = (
    Variant(f"zen4-{letter}", 1, f"digest-{letter}1", Path("/store")) for letter in "abcd"
)


class Table:
    """A table under test: applies transitions at a clock that is moved by hand.

    What follows by itself is answered at once, and is not among the actions that come back: a copy
    in host memory is put on the device, and a slot is written; not what is in `by_hand`.
    """

    def __init__(self, slots: int = 2, **settings: Any) -> None:
        settings = {"slot_bytes": 100, **settings}
        self.cache = DeltaCache(CacheConfig(slots=slots, **settings))  # pyright: ignore[reportArgumentType]
        self.now = 0.0
        self.by_hand: set[type] = set()

    def __call__(self, transition: str, *arguments: object) -> tuple[object, ...]:
        self.cache, actions = getattr(self.cache, transition)(*arguments, self.now)
        done: list[object] = []
        for action in actions:
            match action:
                case StartPut(which, attempt) if StartPut not in self.by_hand:
                    done += self("loaded", which.digest, attempt, 100)
                case WriteSlot(which, _, attempt) if WriteSlot not in self.by_hand:
                    done += [action, *self("committed", which.digest, attempt)]
                case _:
                    done.append(action)
        return tuple(done)

    def start(self, holder: int, which: Variant) -> int:
        """Request and expect a load of its own; returns the attempt."""
        (action,) = self("request", holder, which)
        assert isinstance(action, StartLoad) and action.variant == which
        return action.attempt

    def resident(self, holder: int, which: Variant) -> None:
        """Request, load and lease."""
        attempt = self.start(holder, which)
        actions = self("fetched", which.digest, attempt, 100)
        assert isinstance(actions[-1], Grant)


def test_a_miss_loads_and_then_grants_its_slot():
    table = Table()
    attempt = table.start(1, A)
    assert table("fetched", A.digest, attempt, 100) == (WriteSlot(A, 0, ANY), Grant(1, 0))
    assert table.cache.lease(1) == 0
    assert table("request", 2, A) == (Grant(2, 0),)


def test_one_load_whoever_asks_and_all_are_granted():
    table = Table()
    attempt = table.start(1, A)
    assert table("request", 2, A) == ()
    assert table("request", 3, A) == ()
    actions = table("fetched", A.digest, attempt, 100)
    assert actions == (WriteSlot(A, 0, ANY), Grant(1, 0), Grant(2, 0), Grant(3, 0))


def test_the_first_asker_going_away_cancels_nothing():
    table = Table()
    attempt = table.start(1, A)
    table("request", 2, A)
    assert table("release", 1) == ()
    assert table("fetched", A.digest, attempt, 100) == (WriteSlot(A, 0, ANY), Grant(2, 0))


def test_a_load_that_everybody_left_still_comes_in():
    table = Table()
    attempt = table.start(1, A)
    table("release", 1)
    assert table("fetched", A.digest, attempt, 100) == (WriteSlot(A, 0, ANY),)
    assert table("request", 2, A) == (Grant(2, 0),)


def test_the_least_recently_used_leaves():
    table = Table()
    table.resident(1, A)
    table.resident(2, B)
    table("release", 2)
    table.now = 1.0
    table("release", 1)  # A was used last
    attempt = table.start(3, C)
    actions = table("fetched", C.digest, attempt, 100)
    assert actions == (Evicted(B.digest, 1), WriteSlot(C, 1, ANY), Grant(3, 1))


def test_a_leased_slot_is_waited_for():
    table = Table(slots=1)
    table.resident(1, A)
    attempt = table.start(2, B)
    assert table("fetched", B.digest, attempt, 100) == ()
    assert table("release", 1) == (Evicted(A.digest, 0), WriteSlot(B, 0, ANY), Grant(2, 0))


def test_a_variant_keeps_its_slot_while_another_is_loaded_and_when_that_fails():
    table = Table(slots=1)
    table.resident(1, A)
    table("release", 1)
    attempt = table.start(2, B)
    assert table("request", 3, A) == (Grant(3, 0),)
    (refusal,) = table("failed", B.digest, attempt, "corrupt", "damaged")
    assert refusal == Refuse(2, "corrupt", "damaged", 1.0)
    assert table("request", 4, A) == (Grant(4, 0),)


def test_a_pinned_variant_stays():
    table = Table(policy=Policy(pinned=0))
    table.resident(1, A)
    table.resident(2, B)
    table("pin", A)
    table("release", 1)
    table("release", 2)
    attempt = table.start(3, C)
    assert table("fetched", C.digest, attempt, 100)[0] == Evicted(B.digest, 1)
    table.now = 1.0
    table("release", 3)
    table("unpin", A.digest)
    assert table("request", 4, B)[0] == Evicted(A.digest, 0)  # its copy was in host memory


def test_pinning_loads_and_leaves_a_slot_for_the_others():
    table = Table(slots=2)
    (start,) = table("pin", A)
    assert isinstance(start, StartLoad)
    assert table("fetched", A.digest, start.attempt, 1) == (WriteSlot(A, 0, ANY),)
    with pytest.raises(PinLimit, match="zen4-b.*1 variants are pinned"):
        table("pin", B)
    assert table("pin", A) == ()


def test_failures_back_off_twice_as_long_each_time_and_are_forgotten():
    table = Table(backoff_s=1.0, max_backoff_s=3.0, forget_after_s=10.0)
    for wait in (1.0, 2.0, 3.0, 3.0):
        attempt = table.start(1, A)
        assert table("failed", A.digest, attempt, "load_failed", "no disk")[0] == Refuse(
            1, "load_failed", "no disk", wait
        )
        table.now += wait / 2
        assert table("request", 2, A) == (Refuse(2, "load_failed", "no disk", wait / 2),)
        table.now += wait / 2
    assert table.cache.wake_at == table.now + 10.0
    table.now += 10.0
    table("tick")
    assert not table.cache.entries
    attempt = table.start(3, A)
    assert table("failed", A.digest, attempt, "load_failed", "")[0] == Refuse(
        3, "load_failed", "", 1.0
    )


def test_a_success_ends_the_count_of_failures():
    table = Table()
    table("failed", A.digest, table.start(1, A), "load_failed", "")
    table.now = 1.0
    table.resident(1, A)
    assert table.cache.entries[A.digest].failure is None


def test_a_load_that_hangs_is_given_up_and_its_late_answer_dropped():
    table = Table(read_s=5.0, max_loads=1)
    attempt = table.start(1, A)
    table("request", 2, B)
    assert table.cache.wake_at == 5.0
    table.now = 5.0
    abandon, refuse, start = table("tick")
    assert abandon == AbandonLoad(A.digest, attempt)
    assert isinstance(refuse, Refuse) and refuse.holder == 1 and "longer than 5 s" in refuse.message
    assert isinstance(start, StartLoad) and start.variant == B
    assert table("fetched", A.digest, attempt, 100) == ()  # the loader frees what it brought
    assert not table.cache.host
    assert table("failed", A.digest, attempt, "load_failed", "") == ()


def test_loads_at_a_time_are_bounded_and_the_rest_go_in_turn():
    table = Table(slots=4, max_loads=2)
    first = table.start(1, A)
    table.start(2, B)
    assert table("request", 3, D) == ()
    assert table("request", 4, C) == ()
    actions = table("fetched", A.digest, first, 100)
    assert [a.variant for a in actions if isinstance(a, StartLoad)] == [D]


def test_a_queued_load_that_everybody_left_is_not_begun():
    table = Table(slots=4, max_loads=1)
    attempt = table.start(1, A)
    table("request", 2, B)
    table("release", 2)
    assert not any(isinstance(a, StartLoad) for a in table("fetched", A.digest, attempt, 1))
    assert B.digest not in table.cache.entries


def test_patience_takes_a_slot_from_a_variant_that_is_never_idle():
    table = Table(slots=1, patience_s=2.0, wait_s=60.0)
    table.resident(1, A)
    attempt = table.start(2, B)
    assert table("fetched", B.digest, attempt, 100) == ()
    assert table("request", 3, A) == (Grant(3, 0),)
    assert table.cache.wake_at == 2.0
    table.now = 2.0
    table("tick")
    assert table("request", 4, A) == ()  # A gives no new lease, B's wait is bounded
    table("release", 1)
    actions = table("release", 3)
    assert actions == (Evicted(A.digest, 0), WriteSlot(B, 0, ANY), Grant(2, 0))
    assert table("release", 2)[-1] == Grant(4, 0), "and then A again, from host memory"


def test_a_slot_that_was_to_make_room_stays_when_nobody_needs_the_room():
    table = Table(slots=1, patience_s=2.0)
    table.resident(1, A)
    attempt = table.start(2, B)
    table("fetched", B.digest, attempt, 100)
    table.now = 2.0
    table("tick")
    assert table("request", 3, A) == ()
    assert table("release", 2) == (DropStaged(B.digest, ANY), Grant(3, 0))


def test_waiting_for_a_slot_ends_as_exhausted():
    table = Table(slots=1, patience_s=2.0, wait_s=10.0)
    table.resident(1, A)
    attempt = table.start(2, B)
    table("fetched", B.digest, attempt, 100)
    table.now = 10.0
    drop, refuse = sorted(table("tick"), key=lambda action: type(action).__name__)
    assert drop == DropStaged(B.digest, ANY)
    assert isinstance(refuse, Refuse) and (refuse.holder, refuse.kind) == (2, "exhausted")
    assert refuse.retry_after_s == 2.0


def test_unload_waits_for_the_leases_and_then_the_variant_may_come_again():
    table = Table()
    table.resident(1, A)
    table("pin", A)
    assert table("unload", A.digest) == (DropHost(A.digest),)
    assert table("request", 2, A) == ()
    evicted, start = table("release", 1)
    assert evicted == Evicted(A.digest, 0)
    assert isinstance(start, StartLoad)
    assert not table.cache.entries[A.digest].pinned


def test_unload_of_an_idle_variant_frees_its_slot_at_once():
    table = Table()
    table.resident(1, A)
    table("release", 1)
    assert table("unload", A.digest) == (DropHost(A.digest), Evicted(A.digest, 0))
    assert not table.cache.entries
    assert table("unload", A.digest) == ()


def test_unload_withdraws_what_is_not_there_yet():
    table = Table(slots=1)
    attempt = table.start(1, A)
    abandon, refuse = table("unload", A.digest)
    assert abandon == AbandonLoad(A.digest, attempt)
    assert isinstance(refuse, Refuse) and refuse.kind == "withdrawn"
    table.resident(2, B)
    attempt = table.start(3, A)
    table("fetched", A.digest, attempt, 1)
    assert table("unload", A.digest)[:2] == (DropHost(A.digest), DropStaged(A.digest, ANY))


def test_a_name_with_new_weights_is_another_entry():
    table = Table()
    table.resident(1, A)
    newer = replace(A, version=2, digest="digest-a2")
    attempt = table.start(2, newer)
    assert table("fetched", newer.digest, attempt, 1) == (WriteSlot(newer, 1, ANY), Grant(2, 1))
    assert table.cache.lease(1) == 0


def test_a_holder_asks_once_and_is_released_once():
    table = Table()
    table.resident(1, A)
    with pytest.raises(ValueError, match="holder 1 already holds"):
        table("request", 1, B)
    table("release", 1)
    with pytest.raises(ValueError, match="holder 1 has no lease"):
        table("release", 1)


def test_a_transition_leaves_the_table_before_it_as_it_was():
    table = Table()
    before = table.cache
    table.resident(1, A)
    assert not before.entries and not before.holders
    with pytest.raises(TypeError):
        table.cache.entries[B.digest] = table.cache.entries[A.digest]  # pyright: ignore[reportIndexIssue]


def test_what_is_queued_is_read_into_host_memory_while_no_slot_is_free():
    table = Table(slots=1, max_staged=1)
    table.resident(1, A)
    table("fetched", B.digest, table.start(2, B), 100)  # staged, waits for A's slot
    attempt = table.start(3, C)
    assert table("fetched", C.digest, attempt, 100) == ()
    assert C.digest in table.cache.host
    actions = table("release", 1)
    assert actions[:3] == (Evicted(A.digest, 0), WriteSlot(B, 0, ANY), Grant(2, 0))
    assert not any(isinstance(action, StartLoad) for action in table("release", 2))


def test_who_leaves_the_device_keeps_its_copy_and_comes_back_without_the_disk():
    table = Table(slots=1)
    table.resident(1, A)
    table("release", 1)
    table.resident(2, B)
    table("release", 2)
    actions = table("request", 3, A)
    assert actions == (Evicted(B.digest, 0), WriteSlot(A, 0, ANY), Grant(3, 0))


def test_host_memory_never_passes_its_budget_and_the_least_worth_makes_room():
    load = 2 * 100  # of the shapes as fused and as fitted
    table = Table(slots=3, host_bytes=load + 100, policy=Policy(pinned=0))
    table.resident(1, A)
    table.now = 1.0
    table.resident(2, B)  # beside A's copy there is room for one load
    table.now = 2.0
    drop, start = table("request", 3, C)
    assert (drop, start) == (DropHost(A.digest), StartLoad(C, ANY))
    assert table.cache.host_used == load + 100


def test_a_variant_that_host_memory_has_no_room_for_is_refused_by_name_and_size():
    table = Table(slots=1, host_bytes=199)
    (refusal,) = table("request", 1, A)
    assert isinstance(refusal, Refuse) and refusal.kind == "does_not_fit"
    assert "zen4-a takes 200 bytes" in refusal.message and "--host-bytes" in refusal.message


@pytest.mark.parametrize("stage", ["read", "verify", "put", "commit"])
def test_each_stage_has_a_deadline_of_its_own(stage: str):
    settings = {"read_s": 1.0, "verify_s": 2.0, "put_s": 3.0, "commit_s": 4.0}
    table = Table(slots=1, **settings)
    table.by_hand = {StartPut, WriteSlot}
    attempt = table.start(1, A)
    if stage != "read":
        table("advanced", A.digest, attempt, "verify")
    if stage in ("put", "commit"):
        (put,) = table("fetched", A.digest, attempt, 100)
        assert isinstance(put, StartPut)
        attempt = put.attempt
    if stage == "commit":
        assert table("loaded", A.digest, attempt, 100) == (WriteSlot(A, 0, attempt),)
    assert table.cache.wake_at == settings[f"{stage}_s"]
    table.now = table.cache.wake_at
    (*given_up, refusal) = table("tick")
    assert isinstance(refusal, Refuse) and (refusal.holder, refusal.kind) == (1, "timed_out")
    assert f"longer than {settings[f'{stage}_s']:g} s" in refusal.message
    assert given_up == ([] if stage == "commit" else [AbandonLoad(A.digest, attempt)])
    assert table.cache.slot(A.digest) is None
    table.by_hand.clear()
    table.now += 1.0
    assert table("request", 2, A), "it is tried again"


def test_a_load_that_was_given_up_counts_until_it_has_ended():
    table = Table(slots=2, read_s=1.0, host_bytes=399)
    attempt = table.start(1, A)
    table.now = 1.0
    table("tick")
    assert table.cache.host_used == 200
    assert table("request", 2, B) == (), "there is no room beside what may hang"
    (start,) = table("ended", attempt)
    assert start == StartLoad(B, ANY)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 0},
        {"slots": 1, "max_loads": 0},
        {"slots": 1, "read_s": 0.0},
        {"slots": 1, "backoff_s": float("nan")},
        {"slots": 1, "patience_s": -1.0},
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, float]):
    name = list(settings)[-1]
    with pytest.raises(ValueError, match=f"{name} is {settings[name]}"):
        CacheConfig(**settings)  # pyright: ignore[reportArgumentType]


def test_no_more_than_max_staged_lie_beside_the_bank():
    table = Table(slots=4, max_loads=3, max_staged=1)
    table.by_hand = {StartPut, WriteSlot}
    attempts = [table.start(i, which) for i, which in enumerate((A, B, C))]
    (put,) = table("fetched", A.digest, attempts[0], 100)
    assert put == StartPut(A, ANY)
    assert table("fetched", B.digest, attempts[1], 100) == ()
    assert table("fetched", C.digest, attempts[2], 100) == ()


def test_the_most_asked_for_stays_though_it_was_used_last_of_all():
    table = Table(slots=2, policy=Policy(pinned=1))
    table.resident(0, A)
    table("release", 0)
    for holder in range(1, 20):
        assert table("request", holder, A) == (Grant(holder, 0),)
        table("release", holder)
    assert table.cache.kept == {A.digest}
    table.now = 300.0
    table.resident(30, B)
    table("release", 30)
    attempt = table.start(31, C)
    assert table("fetched", C.digest, attempt, 100)[0] == Evicted(B.digest, 1)


def test_a_version_that_another_took_over_from_is_the_next_to_go():
    table = Table(slots=3, policy=Policy(pinned=0))
    newer = replace(A, version=2, digest="digest-a2")
    table.resident(1, A)
    table.resident(2, newer)
    table.now = 1.0
    table("release", 1)
    table("release", 2)
    table.resident(3, B)
    table("release", 3)
    attempt = table.start(4, C)
    assert table("fetched", C.digest, attempt, 100)[0] == Evicted(A.digest, 0)


def test_what_is_kept_stays_though_its_place_is_worth_less_by_now():
    table = Table(slots=2, policy=Policy(half_life_s=300.0, recency_s=300.0, pinned=1))
    table.resident(0, A)
    table("release", 0)
    for holder in range(1, 8):
        assert table("request", holder, A) == (Grant(holder, 0),)
        table("release", holder)
    table.now = 300.0  # four of its eight requests count still, and it was used that long ago
    table.resident(10, B)
    table("release", 10)
    for holder in (11, 12):
        assert table("request", holder, B) == (Grant(holder, 1),)
        table("release", holder)
    assert table.cache.kept == {A.digest}
    attempt = table.start(20, C)
    assert table("fetched", C.digest, attempt, 100)[0] == Evicted(B.digest, 1)


def test_an_old_version_goes_before_one_that_was_never_asked_for():
    table = Table(slots=3, policy=Policy(pinned=0))
    newer = replace(A, version=2, digest="digest-a2")
    (start,) = table("pin", D)
    assert isinstance(start, StartLoad)
    table("fetched", D.digest, start.attempt, 100)
    table.resident(1, A)
    table.resident(2, newer)
    table("release", 1)
    table("release", 2)
    table("unpin", D.digest)
    attempt = table.start(3, C)
    assert table("fetched", C.digest, attempt, 100)[0] == Evicted(A.digest, 1)
