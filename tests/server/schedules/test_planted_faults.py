"""Whether the schedules find faults: each is put in by hand, and has to be found."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server import scheduler
from server.holdings import Holdings
from server.inbox import Inbox
from zen_jax import cache_loads, cache_slots, prefix_cache
from zen_jax.cache_draft import Draft
from zen_jax.pages import PagePool
from zen_jax.residency import Absent, Resident, Writing

# Faults that such systems have had, each put in by hand: the schedules have to find every one.


def evicts_under_lease(patch: pytest.MonkeyPatch) -> None:
    def victim(draft: Any) -> str | None:
        return min(draft.residents(), default=None)

    def evict(draft: Any, digest: str) -> None:
        draft.put(digest, Absent())

    patch.setattr(cache_slots, "victim", victim)
    patch.setattr(cache_slots, "evict", evict)


def forgets_who_waits_behind_the_first(patch: pytest.MonkeyPatch) -> None:
    grant = Draft.grant

    def first_only(draft: Any, digest: str) -> None:
        count = len(draft.actions)
        grant(draft, digest)
        del draft.actions[count + 1 :]

    patch.setattr(Draft, "grant", first_only)


def loads_end_with_their_first_asker(patch: pytest.MonkeyPatch) -> None:
    release = Draft.release

    def and_gives_up(draft: Any, holder: int) -> None:
        digest = draft.holders[holder]
        first = next(iter(draft.entries[digest].waiting), None)
        release(draft, holder)
        if holder == first and not isinstance(draft.entries[digest].place, Resident):
            draft.entries[digest] = replace(draft.entries[digest], place=Absent())

    patch.setattr(Draft, "release", and_gives_up)


def keeps_the_lease_of_who_cancels(patch: pytest.MonkeyPatch) -> None:
    fail = scheduler._Draft.fail

    def and_leaks(draft: Any, ticket: int, kind: Any, *rest: Any, **named: Any) -> None:
        step, draft.cache_step = draft.cache_step, lambda step: None
        fail(draft, ticket, kind, *rest, **named)
        draft.cache_step = step

    patch.setattr(scheduler._Draft, "fail", and_leaks)


def pins_what_is_to_be_unloaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler._Draft, "withdraw_unloads", lambda draft, pinned: None)


def forgets_the_answer_of_who_is_displaced(patch: pytest.MonkeyPatch) -> None:
    give = scheduler._Draft.give

    def prompt_alone(draft: Any, ticket: int, row: int) -> None:
        give(draft, ticket, row)
        job = draft.jobs[draft.rows[row]]
        draft.jobs[draft.rows[row]] = replace(job, unread=job.request.token_ids, tokens=())

    patch.setattr(scheduler._Draft, "give", prompt_alone)


def shares_pages_between_variants(patch: pytest.MonkeyPatch) -> None:
    root = prefix_cache.root
    patch.setattr(prefix_cache, "root", lambda tenant, variant, *rest: root(tenant, "", *rest))


def keeps_pages_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    admit = Holdings.admit

    def at_once(held: Holdings, job: Any) -> Any:
        job = admit(held, job)
        return held.confirm(replace(job, tokens=(*job.tokens, 0)))

    patch.setattr(Holdings, "admit", at_once)


def gives_a_page_back_that_another_holds(patch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def uncounted(pool: PagePool, pages: Any) -> None:
        pages = list(pages)
        share(pool, pages)
        for page in pages:
            pool._holders[page] = 1

    patch.setattr(PagePool, "share", uncounted)


def reserves_pages_for_one_step_of_several(patch: pytest.MonkeyPatch) -> None:
    grow = Holdings.grow

    def one(held: Holdings, job: Any, position: int, end: int) -> Any:
        return grow(held, job, position, end if job.unread else position + 1)

    patch.setattr(Holdings, "grow", one)


def forgets_the_pages_of_who_ends(patch: pytest.MonkeyPatch) -> None:
    forget = scheduler._Draft.forget

    def without(draft: Any, ticket: int) -> Any:
        return replace(forget(draft, ticket), pages=())

    patch.setattr(scheduler._Draft, "forget", without)


def passes_the_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_loads, "_make_room", lambda draft, need: True)


def grants_before_the_slot_is_written(patch: pytest.MonkeyPatch) -> None:
    settle = cache_slots.settle

    def and_commits(draft: Any) -> None:
        settle(draft)
        for digest, place in draft.places(Writing):
            cache_slots.committed(draft, digest, place)

    patch.setattr(cache_slots, "settle", and_commits)


def makes_no_room_in_the_inbox(patch: pytest.MonkeyPatch) -> None:
    planned = Inbox.planned

    def never_less(inbox: Any, queue: Any) -> None:
        planned(inbox, max(queue, inbox._planned, key=lambda either: either.requests))

    patch.setattr(Inbox, "planned", never_less)


@pytest.mark.parametrize(
    "plant, schedules",
    [
        (evicts_under_lease, 100),
        (forgets_who_waits_behind_the_first, 20),
        (loads_end_with_their_first_asker, 20),
        (keeps_the_lease_of_who_cancels, 20),
        (makes_no_room_in_the_inbox, 20),
        (shares_pages_between_variants, 50),
        (keeps_pages_before_they_are_read, 50),
        (gives_a_page_back_that_another_holds, 50),
        (reserves_pages_for_one_step_of_several, 20),
        (forgets_the_pages_of_who_ends, 20),
        (passes_the_budget, 20),
        (grants_before_the_slot_is_written, 200),
        (forgets_the_answer_of_who_is_displaced, 200),
        (pins_what_is_to_be_unloaded, 400),  # operators seldom meet
    ],
)
def test_the_schedules_find_a_fault_that_is_planted(
    plant: Callable[[pytest.MonkeyPatch], None],
    schedules: int,
    new_world: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.CRITICAL)
    plant(monkeypatch)
    found = 0
    for seed in range(schedules):
        try:
            new_world(seed).run()
        except (AssertionError, RuntimeError, LookupError, ValueError):
            found += 1
    assert found >= 5, f"found in {found} of {schedules} schedules"
