"""Plans, one event at a time: no device, no thread, no clock."""

from collections.abc import Callable
from typing import Any

import pytest

from server.events import (
    Action,
    Answer,
    Arrived,
    Cancelled,
    Decode,
    Emit,
    Event,
    Fail,
    Loaded,
    LoadFailed,
    OperatorCall,
    Prefill,
    PrefillRefused,
    ReleaseRow,
    Sampled,
)
from server.requests import Failure, Request, Timings
from server.scheduler import SchedulerConfig, State, initial, plan
from zen_jax.residency import CacheConfig, Evicted, StartLoad, WriteSlot


class Plans:
    """A state that events are put to, at a time moved by hand."""

    def __init__(self, rows: int = 2, slots: int = 2, prefill_tokens: int = 100) -> None:
        cache = CacheConfig(slots=slots, patience_s=1.0, wait_s=10.0, load_timeout_s=20.0)
        self.state: State = initial(SchedulerConfig(rows, prefill_tokens), cache)
        self.now = 0.0

    def __call__(self, *events: Event) -> tuple[Action, ...]:
        self.state, actions = plan(self.state, events, self.now)
        return actions

    def arrive(
        self, request: Request, stops: frozenset[int] = frozenset(), limit: int = 4
    ) -> tuple[Action, ...]:
        return self(Arrived(request, stops, limit, self.now))

    def ticket(self, request: Request) -> int:
        return self.state.tickets[request.id]


def only[T](actions: tuple[Action, ...], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def plans() -> Plans:
    return Plans()


def test_a_request_to_the_base_is_prefilled_and_joins_the_step(
    plans: Plans, make_request: Callable[..., Request]
):
    request = make_request()
    assert plans.arrive(request) == (Prefill(1, request, 0, -1), Decode(((0, 1),)))


def test_tokens_are_passed_on_and_the_last_frees_the_row(
    plans: Plans, make_request: Callable[..., Request]
):
    request = make_request(prompt=(1, 2, 3))
    plans.arrive(request, limit=2)
    plans.now = 0.5
    assert plans(Sampled(1, 7)) == (Emit(request.id, 7, None),)  # the last is launched already
    release, emit = plans(Sampled(1, 8))
    assert release == ReleaseRow(0)
    assert isinstance(emit, Emit) and emit.finish is not None
    assert (emit.finish.reason, emit.finish.matched_stop) == ("length", None)
    assert (emit.finish.prompt_tokens, emit.finish.completion_tokens) == (3, 2)
    assert emit.finish.timings == Timings(0.0, 0.0, 0.5, 0.5)
    assert not plans.state.jobs and not plans.state.tickets and plans.state.running == 0


def test_a_stop_token_ends_it_and_a_token_too_many_is_dropped(
    plans: Plans, make_request: Callable[..., Request]
):
    request = make_request()
    plans.arrive(request, stops=frozenset({9}))
    assert only(plans(Sampled(1, 5)), Decode)
    release, emit = plans(Sampled(1, 9))
    assert isinstance(emit, Emit) and emit.finish is not None
    assert (emit.finish.reason, emit.finish.matched_stop) == ("stop", 9)
    assert emit.finish.completion_tokens == 2
    again = make_request(id=request.id)
    actions = plans(Sampled(1, 6), Arrived(again, frozenset(), 4, 0.0))
    assert not only(actions, Emit)  # the late token is not the newcomer's
    assert only(actions, Prefill) == [Prefill(2, again, 0, -1)]


def test_who_waits_for_a_variant_holds_up_nobody(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    cold, warm = make_request(fake.variant("a")), make_request()
    (start,) = plans.arrive(cold)
    assert isinstance(start, StartLoad) and start.variant == cold.variant
    assert only(plans.arrive(warm), Prefill) == [Prefill(2, warm, 0, -1)]
    plans.now = 2.0
    actions = plans(Loaded("digest-a1", start.attempt, 4))
    assert actions[:2] == (WriteSlot(fake.variant("a"), 0, start.attempt), Prefill(1, cold, 1, 0))
    plans.now = 3.0
    for token in range(4):
        actions = plans(Sampled(1, token))
    (emit,) = only(actions, Emit)
    assert emit.finish is not None and emit.finish.timings == Timings(0.0, 2.0, 1.0, 3.0)


def test_rows_are_given_in_the_order_of_arrival_loads_or_not(
    make_request: Callable[..., Request], fake: Any
):
    plans = Plans(rows=1)
    running, cold, later = make_request(), make_request(fake.variant("a")), make_request()
    plans.arrive(running)
    (start,) = only(plans.arrive(cold), StartLoad)
    plans.arrive(later)
    plans(Loaded("digest-a1", start.attempt, 4))
    assert plans.state.queued == 2
    actions = plans(Cancelled(running.id))
    assert actions[:2] == (ReleaseRow(0), Prefill(2, cold, 0, 0))


def test_prompts_share_a_budget_between_two_steps(make_request: Callable[..., Request]):
    plans = Plans(rows=4, prefill_tokens=10)
    requests = [make_request(prompt=(1,) * length) for length in (30, 6, 4, 1)]
    actions = plans(*(Arrived(request, frozenset(), 4, 0.0) for request in requests))
    assert [p.request for p in only(actions, Prefill)] == requests[:1]
    assert [p.request for p in only(plans(), Prefill)] == requests[1:3]
    assert [p.request for p in only(plans(), Prefill)] == requests[3:]


def test_a_deadline_in_the_queue_fails_before_any_prefill(make_request: Callable[..., Request]):
    plans = Plans(rows=1)
    running, late = make_request(), make_request(deadline=5.0)
    plans.arrive(running)
    plans.arrive(late)
    assert plans.state.wake_at == 5.0
    plans.now = 5.0
    actions = plans(Cancelled(running.id))
    assert not only(actions, Prefill)
    assert [f.failure.kind for f in only(actions, Fail)] == ["cancelled", "deadline"]
    assert plans.state.wake_at == float("inf")


def test_a_deadline_that_is_over_on_arrival_loads_nothing(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    plans.now = 5.0
    late = make_request(fake.variant("a"), deadline=5.0)
    (fail,) = plans.arrive(late)
    assert isinstance(fail, Fail) and fail.failure.kind == "deadline"
    assert not plans.state.jobs and not plans.state.cache.entries


def test_a_deadline_in_mid_stream_frees_the_row_and_the_lease(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    request = make_request(fake.variant("a"), deadline=5.0)
    (start,) = plans.arrive(request)
    assert isinstance(start, StartLoad)
    plans(Loaded("digest-a1", start.attempt, 4))
    plans.now = 5.0
    release, emit, fail = plans(Sampled(1, 7))
    assert (release, emit) == (ReleaseRow(0), Emit(request.id, 7, None))
    assert isinstance(fail, Fail) and fail.failure.kind == "deadline"
    assert not plans.state.cache.holders and plans.state.running == 0


def test_cancelling_at_each_stage_gives_everything_back(
    make_request: Callable[..., Request], fake: Any
):
    for stage in range(4):
        plans = Plans(rows=1)
        blocker, request = make_request(), make_request(fake.variant("a"))
        if stage == 2:
            plans.arrive(blocker)
        (start,) = only(plans.arrive(request), StartLoad)
        if stage >= 1:
            plans(Loaded("digest-a1", start.attempt, 4))
        if stage == 3:
            plans(Sampled(plans.ticket(request), 7))
        actions = plans(Cancelled(request.id))
        assert only(actions, Fail) == [
            Fail(Failure(request.id, "cancelled", "the request was cancelled"))
        ]
        assert len(only(actions, ReleaseRow)) == (stage in (1, 3))
        assert not plans.state.cache.holders and request.id not in plans.state.tickets
        assert not plans.state.ready
        assert plans(Cancelled(request.id)) == plans(Sampled(99, 1)) == ()


def test_a_failed_load_fails_those_who_waited_and_no_others(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    first, second, other = (make_request(fake.variant(letter)) for letter in "aab")
    (start,) = plans.arrive(first)
    plans.arrive(second)
    plans.arrive(other)
    assert isinstance(start, StartLoad)
    actions = plans(LoadFailed("digest-a1", start.attempt, "corrupt", "damaged"))
    assert actions == tuple(
        Fail(Failure(request.id, "corrupt", "damaged", 1.0)) for request in (first, second)
    )
    assert list(plans.state.tickets) == [other.id]
    third = make_request(fake.variant("a"))
    assert plans.arrive(third) == (Fail(Failure(third.id, "corrupt", "damaged", 1.0)),)


def test_no_slot_within_the_wait_is_exhausted_with_a_time(
    make_request: Callable[..., Request], fake: Any
):
    plans = Plans(slots=1)
    running, waiting = make_request(fake.variant("a")), make_request(fake.variant("b"))
    (start,) = plans.arrive(running)
    assert isinstance(start, StartLoad)
    plans(Loaded("digest-a1", start.attempt, 4))
    (start,) = only(plans.arrive(waiting), StartLoad)
    plans(Loaded("digest-b1", start.attempt, 4))
    plans.now = 10.0
    (fail,) = only(plans(), Fail)
    assert (fail.failure.request_id, fail.failure.kind) == (waiting.id, "exhausted")
    assert fail.failure.retry_after_s == 1.0


def test_a_refused_prompt_fails_its_request_alone(
    plans: Plans, make_request: Callable[..., Request]
):
    bad, good = make_request(), make_request()
    plans.arrive(bad)
    plans.arrive(good)
    actions = plans(PrefillRefused(1, "no"), Sampled(1, 0), Sampled(2, 7))
    assert only(actions, Fail) == [Fail(Failure(bad.id, "internal", "no"))]
    assert only(actions, Emit) == [Emit(good.id, 7, None)]
    assert not only(actions, ReleaseRow)  # nothing was inserted there
    assert plans.state.rows == (None, 2)


def test_an_operator_loads_pins_and_unloads(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    variant = fake.variant("a")
    (start,) = plans(OperatorCall(0, "load", variant))
    assert isinstance(start, StartLoad)
    actions = plans(Loaded("digest-a1", start.attempt, 4))
    assert actions == (WriteSlot(variant, 0, start.attempt), Answer(0))
    assert not plans.state.cache.holders
    assert plans(OperatorCall(1, "pin", variant)) == (Answer(1),)
    (refused,) = only(plans(OperatorCall(2, "pin", fake.variant("b"))), Answer)
    assert refused.refused is not None and "unpin" in refused.refused.message
    request = make_request(variant)
    plans.arrive(request)
    assert only(plans(OperatorCall(3, "unload", variant)), Answer) == []
    assert plans(Cancelled(request.id))[:2] == (ReleaseRow(0), Evicted("digest-a1", 0))
    assert only(plans(OperatorCall(4, "unload", variant)), Answer) == [Answer(4)]


def test_unloading_answers_when_the_last_that_used_it_has_ended(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    request = make_request(fake.variant("a"))
    (start,) = plans.arrive(request)
    assert isinstance(start, StartLoad)
    plans(Loaded("digest-a1", start.attempt, 4))
    assert not only(plans(OperatorCall(5, "unload", fake.variant("a"))), Answer)
    actions = plans(Cancelled(request.id))
    assert only(actions, Answer) == [Answer(5)]


def load(plans: Plans, request: Request) -> None:
    """Has the request run with its variant in memory."""
    (start,) = only(plans.arrive(request), StartLoad)
    plans(Loaded(start.variant.digest, start.attempt, 4))


def test_a_pin_ends_an_unload_that_waits(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    request = make_request(fake.variant("a"))
    load(plans, request)
    plans(OperatorCall(1, "unload", fake.variant("a")))
    withdrawn, pinned = only(plans(OperatorCall(2, "pin", fake.variant("a"))), Answer)
    assert (withdrawn.call, withdrawn.refused.kind) == (1, "withdrawn")
    assert "zen4-a was pinned" in withdrawn.refused.message
    assert pinned == Answer(2)
    assert not only(plans(Cancelled(request.id)), Answer)
    assert plans.state.cache.slot("digest-a1") is not None


def test_unloading_a_name_waits_for_all_its_versions(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    first, second = make_request(fake.variant("a", 1)), make_request(fake.variant("a", 2))
    load(plans, first)
    load(plans, second)
    assert not only(plans(OperatorCall(1, "unload", fake.variant("a", 2))), Answer)
    actions = plans(Cancelled(second.id))
    assert only(actions, Evicted) and not only(actions, Answer)
    assert only(plans(Cancelled(first.id)), Answer) == [Answer(1)]


def test_unpinning_a_name_lets_an_older_version_go(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    load(plans, make_request(fake.variant("a", 1)))
    plans(OperatorCall(1, "pin", fake.variant("a", 1)))
    assert only(plans(OperatorCall(2, "unpin", fake.variant("a", 2))), Answer) == [Answer(2)]
    assert not any(entry.pinned for entry in plans.state.cache.entries.values())


def test_a_pin_follows_a_name_to_its_newer_version(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    old, new = fake.variant("a", 1), fake.variant("a", 2)
    load(plans, make_request(old))
    plans(OperatorCall(1, "pin", old))
    load(plans, make_request(new))
    pinned = {d for d, e in plans.state.cache.entries.items() if e.pinned}
    assert pinned == {new.digest}
    # A pin of the newest takes the place of the older one's, and is no second pin.
    newest = fake.variant("a", 3)
    assert Answer(2) in plans(OperatorCall(2, "pin", newest))
    assert {d for d, e in plans.state.cache.entries.items() if e.pinned} == {newest.digest}


def test_an_operators_load_that_fails_is_answered_with_the_reason(plans: Plans, fake: Any):
    (start,) = plans(OperatorCall(0, "load", fake.variant("a")))
    assert isinstance(start, StartLoad)
    (answer,) = plans(LoadFailed("digest-a1", start.attempt, "does_not_fit", "2 levels"))
    assert isinstance(answer, Answer) and answer.refused is not None
    assert (answer.refused.kind, answer.refused.message) == ("does_not_fit", "2 levels")


def test_two_requests_of_one_id_are_refused(plans: Plans, make_request: Callable[..., Request]):
    request = make_request()
    plans.arrive(request)
    with pytest.raises(ValueError, match=f"request {request.id} is already there"):
        plans.arrive(request)


def test_a_plan_leaves_the_state_before_it_as_it_was(make_request: Callable[..., Request]):
    before = initial(SchedulerConfig(2), CacheConfig(slots=1))
    after, _ = plan(before, [Arrived(make_request(), frozenset(), 4, 0.0)], 0.0)
    assert before == initial(SchedulerConfig(2), CacheConfig(slots=1))
    assert after.running == 1 and before.running == 0


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="rows is 0"):
        SchedulerConfig(rows=0)
