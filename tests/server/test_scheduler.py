"""Plans, one event at a time: no device, no thread, no clock."""

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from server.events import (
    Action,
    Answer,
    Arrived,
    Cancelled,
    Committed,
    Decode,
    Emit,
    Event,
    Fail,
    Fetched,
    Loaded,
    LoadFailed,
    OperatorCall,
    Part,
    Prefill,
    PrefillRefused,
    Sampled,
    Stepped,
)
from server.jobs import SchedulerConfig, State
from server.requests import Failure, Request, Timings
from server.scheduler import initial, plan
from zen_jax.chunking import Shape
from zen_jax.residency import CacheConfig, Evicted, StartLoad, StartPut, WriteSlot


class Plans:
    """A state that events are put to, at a time moved by hand."""

    def __init__(
        self,
        rows: int = 2,
        slots: int = 2,
        shapes: tuple[Shape, ...] = ((1, 100), (8, 100)),
        max_steps: int = 1,
    ) -> None:
        cache = CacheConfig(slots=slots, patience_s=1.0, wait_s=10.0, read_s=20.0, slot_bytes=4)
        self.state: State = initial(SchedulerConfig(rows, shapes, max_steps), cache)
        self.now = 0.0

    def __call__(self, *events: Event) -> tuple[Action, ...]:
        """One plan, and those that follow from it: what is to be put on the device is, and slots
        are written."""
        self.state, actions = plan(self.state, events, self.now)
        follow: list[Event] = []
        for action in actions:
            match action:
                case StartPut(variant, attempt):
                    follow.append(Loaded(variant.digest, attempt, 4))
                case WriteSlot(variant, _, attempt):
                    follow.append(Committed(variant.digest, attempt))
        actions = tuple(action for action in actions if not isinstance(action, StartPut))
        return (*actions, *self(*follow)) if follow else actions

    def arrive(
        self, request: Request, stops: frozenset[int] = frozenset(), limit: int = 4
    ) -> tuple[Action, ...]:
        return self(Arrived(request, stops, limit, self.now))

    def ticket(self, request: Request) -> int:
        return self.state.tickets[request.id]


def parts(actions: tuple[Action, ...]) -> list[Part]:
    """The parts of prompts that are read, if any are."""
    return [part for prefill in only(actions, Prefill) for part in prefill.parts]


def read(actions: tuple[Action, ...]) -> list[tuple[Request, int, int]]:
    """Whose prompts they are, in which row, with which slot."""
    return [(part.arrived.request, part.row, part.slot) for part in parts(actions)]


def only[T](actions: tuple[Action, ...], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def plans() -> Plans:
    return Plans()


def test_a_request_to_the_base_is_prefilled_and_joins_the_step(
    plans: Plans, make_request: Callable[..., Request]
):
    request = make_request()
    arrived = Arrived(request, frozenset(), 4, 0.0)
    part = Part(1, 1, arrived, 0, -1, request.token_ids, 0, True, pages=(0,))
    assert plans(arrived) == (Prefill((part,)), Decode(((0, 1, 1),), 1, ((0,),)))


def test_tokens_are_passed_on_and_the_last_frees_the_row(
    plans: Plans, make_request: Callable[..., Request]
):
    request = make_request(prompt=(1, 2, 3))
    plans.arrive(request, limit=2)
    plans.now = 0.5
    # The last is launched already.
    assert plans(Sampled(1, 1, (7,))) == (Emit(request.id, (7,), None),)
    (emit,) = plans(Sampled(1, 1, (8,)))
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
    assert only(plans(Sampled(1, 1, (5,))), Decode)
    (emit,) = plans(Sampled(1, 1, (9, 3)))
    assert isinstance(emit, Emit) and emit.tokens == (9,)
    assert isinstance(emit, Emit) and emit.finish is not None
    assert (emit.finish.reason, emit.finish.matched_stop) == ("stop", 9)
    assert emit.finish.completion_tokens == 2
    again = make_request(id=request.id)
    actions = plans(Sampled(1, 1, (6,)), Arrived(again, frozenset(), 4, 0.0))
    assert not only(actions, Emit)  # the late token is not the newcomer's
    assert [(part.ticket, part.row) for part in parts(actions)] == [(2, 0)]


def test_who_waits_for_a_variant_holds_up_nobody(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    cold, warm = make_request(fake.variant("a")), make_request()
    (start,) = plans.arrive(cold)
    assert isinstance(start, StartLoad) and start.variant == cold.variant
    assert read(plans.arrive(warm)) == [(warm, 0, -1)]
    plans.now = 2.0
    actions = plans(Fetched("digest-a1", start.attempt, 4))
    assert only(actions, WriteSlot) == [WriteSlot(fake.variant("a"), 0, ANY)]
    assert read(actions) == [(cold, 1, 0)]
    plans.now = 3.0
    for token in range(4):
        actions = plans(Sampled(1, 1, (token,)))
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
    plans(Fetched("digest-a1", start.attempt, 4))
    assert plans.state.queued == 2
    assert read(plans(Cancelled(running.id))) == [(cold, 0, 0)]


def test_a_long_prompt_is_read_in_parts_between_steps(make_request: Callable[..., Request]):
    plans = Plans(shapes=((1, 8), (1, 32)))
    short, long = make_request(prompt=(1,)), make_request(prompt=tuple(range(70)))
    plans.arrive(short, limit=9)
    actions = plans.arrive(long, limit=9)
    steps = [actions] + [plans(Sampled(1, 1, (token,))) for token in (7, 8, 9)]
    got = [(part.start, part.tokens, part.last) for action in steps for part in parts(action)]
    assert got == [
        (0, tuple(range(32)), False),
        (32, tuple(range(32, 64)), False),
        (64, tuple(range(64, 70)), True),
    ]
    decoding = [[row for row, _, _ in d.rows] for a in steps for d in only(a, Decode)]
    assert decoding == [[0], [0], [0, 1], [0, 1]]  # nobody waits longer than for one part
    assert [len(only(action, Prefill)) for action in steps] == [1, 1, 1, 0]


def test_prompts_of_several_are_read_together(make_request: Callable[..., Request], fake: Any):
    plans = Plans(rows=6, shapes=((1, 8), (4, 8), (1, 32)))
    lengths = (30, 5, 9, 1, 8)
    requests = [make_request(prompt=(1,) * length) for length in lengths]
    calls = [parts(plans(*(Arrived(r, frozenset(), 4, 0.0) for r in requests)))]
    while parts_now := parts(plans()):
        calls.append(parts_now)
    assert [[(p.row, len(p.tokens)) for p in call] for call in calls] == [
        [(0, 30)],
        [(1, 5), (2, 8), (3, 1), (4, 8)],
        [(2, 1)],
    ]


def test_a_higher_priority_goes_first_and_waiting_makes_up_for_it(
    make_request: Callable[..., Request],
):
    plans = Plans(rows=1)
    running = make_request(priority=9)
    plans.arrive(running)
    low, high, late = make_request(), make_request(priority=1), make_request(priority=1)
    plans.arrive(low)
    plans.now = 9.0
    plans.arrive(high)
    plans.now = 11.0
    plans.arrive(late)
    order = []
    for current in (running, high, low):
        order += [request for request, _, _ in read(plans(Cancelled(current.id)))]
    assert order == [high, low, late]  # `late` came 11 s after, a unit of priority is worth 10


def test_a_row_is_taken_for_a_higher_priority_and_its_request_goes_on_later(
    make_request: Callable[..., Request],
):
    plans = Plans(rows=1)
    low, high = make_request(prompt=(1, 2)), make_request(priority=1)
    plans.arrive(low, limit=6)
    assert only(plans(Sampled(1, 1, (5,))), Emit) == [Emit(low.id, (5,), None)]
    assert read(plans.arrive(high, limit=1)) == [(high, 0, -1)]
    assert plans.state.queued == 1
    # What was on its way when the row was lost is as good as any.
    assert only(plans(Sampled(1, 1, (6,))), Emit) == [Emit(low.id, (6,), None)]
    actions = plans(Sampled(2, 1, (9,)))
    (part,) = parts(actions)
    assert (part.ticket, part.turn, part.tokens, part.start) == (1, 2, (1, 2), 0)
    # From here on what the first turn computed comes too late.
    assert not only(plans(Sampled(1, 1, (7,))), Emit)
    # What it had is made again and told once.
    assert not only(plans(Sampled(1, 2, (5,))), Emit)
    assert only(plans(Sampled(1, 2, (6, 7))), Emit) == [Emit(low.id, (7,), None)]
    emits = [only(plans(Sampled(1, 2, (token,))), Emit)[0] for token in (8, 9, 10)]
    assert [emit.tokens for emit in emits] == [(8,), (9,), (10,)]
    assert emits[-1].finish is not None and emits[-1].finish.completion_tokens == 6


def test_no_row_is_taken_by_an_equal_or_from_one_that_waited_long(
    make_request: Callable[..., Request],
):
    plans = Plans(rows=1)
    running, equal, high = make_request(), make_request(), make_request(priority=1)
    plans.arrive(running)
    assert not read(plans.arrive(equal))
    plans.now = 10.5
    assert not read(plans.arrive(high))
    assert plans.state.rows == (1,)


def test_steps_of_a_call_are_many_only_where_nobody_waits_and_they_are_quick(
    make_request: Callable[..., Request],
):
    plans = Plans(rows=2, max_steps=8)
    first = make_request()

    def steps(actions: tuple[Action, ...]) -> list[int]:
        return [action.steps for action in only(actions, Decode)]

    assert steps(plans.arrive(first, limit=60)) == [1]  # nothing was measured yet
    assert steps(plans(Stepped(0.001))) == [8]
    assert steps(plans(Stepped(0.006))) == [3]
    assert steps(plans(Stepped(1.0))) == [1]
    second, third = make_request(prompt=(1,) * 300), make_request()
    assert steps(plans(Stepped(0.001), Arrived(second, frozenset(), 9, 0.0))) == [1]  # is read
    assert steps(plans()) == [1]
    assert steps(plans()) == [8]
    assert steps(plans(Arrived(third, frozenset(), 9, 0.0))) == [1]  # waits for a row
    plans(Cancelled(third.id), Cancelled(second.id))
    launched = 60 - plans.state.jobs[1].launched
    while launched > 8:
        assert steps(plans()) == [8]
        launched -= 8
    assert steps(plans()) == [launched] and steps(plans()) == []  # no more than is wanted


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
    plans(Fetched("digest-a1", start.attempt, 4))
    plans.now = 5.0
    emit, fail = plans(Sampled(1, 1, (7,)))
    assert emit == Emit(request.id, (7,), None)
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
            plans(Fetched("digest-a1", start.attempt, 4))
        if stage == 3:
            plans(Sampled(plans.ticket(request), 1, (7,)))
        actions = plans(Cancelled(request.id))
        assert only(actions, Fail) == [
            Fail(Failure(request.id, "cancelled", "the request was cancelled"))
        ]
        assert plans.state.rows == ((1,) if stage == 2 else (None,))
        assert not plans.state.cache.holders and request.id not in plans.state.tickets
        assert not plans.state.ready
        assert plans(Cancelled(request.id)) == plans(Sampled(99, 1, (1,))) == ()


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
    plans(Fetched("digest-a1", start.attempt, 4))
    (start,) = only(plans.arrive(waiting), StartLoad)
    plans(Fetched("digest-b1", start.attempt, 4))
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
    actions = plans(PrefillRefused(1, "no"), Sampled(1, 1, (0,)), Sampled(2, 1, (7,)))
    assert only(actions, Fail) == [Fail(Failure(bad.id, "internal", "no"))]
    assert only(actions, Emit) == [Emit(good.id, (7,), None)]
    assert plans.state.rows == (None, 2)


def test_an_operator_loads_pins_and_unloads(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    variant = fake.variant("a")
    (start,) = plans(OperatorCall(0, "load", variant))
    assert isinstance(start, StartLoad)
    actions = plans(Fetched("digest-a1", start.attempt, 4))
    assert actions == (WriteSlot(variant, 0, ANY), Answer(0))
    assert not plans.state.cache.holders
    assert plans(OperatorCall(1, "pin", variant)) == (Answer(1),)
    (refused,) = only(plans(OperatorCall(2, "pin", fake.variant("b"))), Answer)
    assert refused.refused is not None and "unpin" in refused.refused.message
    request = make_request(variant)
    plans.arrive(request)
    assert only(plans(OperatorCall(3, "unload", variant)), Answer) == []
    assert plans(Cancelled(request.id))[0] == Evicted("digest-a1", 0)
    assert only(plans(OperatorCall(4, "unload", variant)), Answer) == [Answer(4)]


def test_unloading_answers_when_the_last_that_used_it_has_ended(
    plans: Plans, make_request: Callable[..., Request], fake: Any
):
    request = make_request(fake.variant("a"))
    (start,) = plans.arrive(request)
    assert isinstance(start, StartLoad)
    plans(Fetched("digest-a1", start.attempt, 4))
    assert not only(plans(OperatorCall(5, "unload", fake.variant("a"))), Answer)
    actions = plans(Cancelled(request.id))
    assert only(actions, Answer) == [Answer(5)]


def load(plans: Plans, request: Request) -> None:
    """Has the request run with its variant in memory."""
    (start,) = only(plans.arrive(request), StartLoad)
    plans(Fetched(start.variant.digest, start.attempt, 4))


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
    with pytest.raises(ValueError, match="ageing_s 0"):
        SchedulerConfig(rows=1, ageing_s=0)
