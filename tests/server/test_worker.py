"""The worker against the hand-computable model: real threads, real loader, fake device."""

import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server.inbox import InboxLimits
from server.loader import Loader
from server.requests import InboxFull, LoadRefused, Request
from server.worker import Worker
from zen_jax.residency import CacheConfig
from zen_jax.sampling import InvalidSampling

MakeRequest = Callable[..., Request]
MakeWorld = Callable[..., Any]


def test_base_and_variants_in_one_batch_answer_as_alone(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(slots=2, rows=3)
    variants = [None, *(fake.variant(letter) for letter in "abcab"), None]
    requests = [make_request(v, max_tokens=6, prompt=(40, i + 1)) for i, v in enumerate(variants)]
    callers = [world.submit(request) for request in requests]
    world.until(lambda: all(caller.ended for caller in callers))
    for request, caller in zip(requests, callers, strict=True):
        assert caller.tokens == fake.answer_of(request, 6)
        finish = caller.events[-1].finish
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 2, 6)
    assert not any(world.left())


def test_one_load_whoever_asks_and_others_go_on(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    gate = world.gates["zen4-a"] = threading.Event()
    cold = [world.submit(make_request(fake.variant("a"))) for _ in range(3)]
    assert world.answer(make_request(fake.variant("b"))).failure is None
    assert world.answer(make_request()).failure is None
    assert not any(caller.events for caller in cold)
    (status,) = [s for s in world.worker.snapshot().variants if s.variant.name == "zen4-a"]
    assert (status.state, status.waiting, status.slot) == ("loading", 3, None)
    gate.set()
    world.until(lambda: all(caller.ended for caller in cold))
    assert sorted(world.reads) == ["zen4-a", "zen4-b"]
    finish = cold[0].events[-1].finish
    assert finish.timings.load_s > 0
    timings = finish.timings
    total = timings.queued_s + timings.load_s + timings.prefill_s
    assert total == pytest.approx(timings.first_token_s)


def test_the_asker_of_a_load_may_go_away(worlds: MakeWorld, make_request: MakeRequest, fake: Any):
    world = worlds()
    gate = world.gates["zen4-a"] = threading.Event()
    first = make_request(fake.variant("a"))
    gone, stays = world.submit(first), world.submit(make_request(fake.variant("a")))
    world.worker.cancel(first.id)
    world.until(lambda: gone.ended)
    assert gone.failure.kind == "cancelled"
    gate.set()
    world.until(lambda: stays.ended)
    assert stays.failure is None and world.reads == ["zen4-a"]
    assert not any(world.left())


def test_more_variants_than_slots_all_get_their_turn_while_one_never_rests(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(slots=1, rows=2, inbox=64)
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            world.answer(make_request(fake.variant("a"), max_tokens=3))

    busy = [threading.Thread(target=keep_asking) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        request = make_request(fake.variant("b"))
        assert world.answer(request).tokens == fake.answer_of(request, 4)
    finally:
        done.set()
        for thread in busy:
            thread.join()


def test_stop_tokens_of_the_request_and_of_the_variants_own_tokenizer(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    plain = make_request(max_tokens=8)
    third = fake.answer_of(plain, 3)[2]
    caller = world.answer(make_request(max_tokens=8, stop_token_ids=(third,)))
    finish = caller.events[-1].finish
    assert (finish.reason, finish.matched_stop, finish.completion_tokens) == ("stop", third, 3)
    assert caller.tokens == fake.answer_of(plain, 3)
    shown = bytes(fake.answer_of(plain, 2)).decode("utf-8", "replace")
    assert caller.text == shown  # the token that stopped it is not

    # next token of last 51 at position 0 with seed 0 is 5 * 51 + 7 * number + 1 = 0 for the base
    ends = make_request(prompt=(51,), seed=0, max_tokens=3)
    assert fake.answer_of(ends, 1) == [fake.EOS]
    assert world.answer(ends).events[-1].finish.matched_stop == fake.EOS
    goes_on = make_request(prompt=(51,), seed=0, max_tokens=3, ignore_eos=True)
    assert world.answer(goes_on).tokens == fake.answer_of(goes_on, 3)

    # 5 * 34 + 7 * 51 + 241 + 1 = 1, which ends what version 2 says and nothing else
    ends = make_request(fake.variant("a", 2), prompt=(34,), seed=241, max_tokens=3)
    assert fake.answer_of(ends, 1) == [1]
    assert world.answer(ends).events[-1].finish.matched_stop == 1
    goes_on = make_request(prompt=(34,), seed=86, max_tokens=3)
    assert fake.answer_of(goes_on, 1) == [1]
    assert world.answer(goes_on).tokens == fake.answer_of(goes_on, 3)


def test_a_stop_string_ends_the_answer_in_front_of_it_and_frees_the_row(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(max_steps=4)
    plain = make_request(max_tokens=40, prompt=(12,), seed=1)
    whole = bytes(fake.answer_of(plain, 40))
    text = whole.decode("utf-8", "replace")
    stop = text[7:9]
    at = text.index(stop)
    caller = world.answer(make_request(max_tokens=40, prompt=(12,), seed=1, stop=("never", stop)))
    finish = caller.events[-1].finish
    assert caller.text == text[:at]
    assert (finish.reason, finish.matched_text, finish.matched_stop) == ("stop", stop, None)
    assert finish.completion_tokens == len(caller.tokens) < 40
    assert caller.tokens == list(whole[: len(caller.tokens)])
    assert stop in bytes(caller.tokens).decode("utf-8", "replace")
    world.until(lambda: not any(world.left()))
    assert world.engine.count("decode") < 8, "the row went on"


def test_a_stop_string_in_the_last_tokens_counts_before_their_end(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(max_steps=4)
    plain = make_request(max_tokens=5, prompt=(12,), seed=1)
    text = bytes(fake.answer_of(plain, 5)).decode("utf-8", "replace")
    caller = world.answer(make_request(max_tokens=5, prompt=(12,), seed=1, stop=(text[-1],)))
    finish = caller.events[-1].finish
    assert (caller.text, finish.reason) == (text[: text.index(text[-1])], "stop")
    assert finish.matched_text == text[-1] and finish.completion_tokens == len(caller.tokens)


@pytest.mark.parametrize("max_steps", [1, 4])
def test_every_token_has_its_logprobs_where_they_are_asked_for(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any, max_steps: int
):
    world = worlds(max_steps=max_steps)
    prompt = (40, 41, 42)
    asks = make_request(prompt=prompt, max_tokens=9, logprobs=2)
    callers = [world.submit(r) for r in (asks, make_request(), make_request(logprobs=0))]
    world.until(lambda: all(caller.ended for caller in callers))
    entries = [entry for event in callers[0].events for entry in event.logprobs]
    assert [entry.token_id for entry in entries] == callers[0].tokens == fake.answer_of(asks, 9)
    for i, entry in enumerate(entries):
        want = fake.logprob_of(entry.token_id, len(prompt) + i)
        assert entry.logprob == pytest.approx(want, abs=1e-4)
        assert (entry.top_ids, entry.top_logprobs) == ((0, 1), (0.0, -1.0))
    assert all(not event.logprobs for event in callers[1].events)
    bare = [entry for event in callers[2].events for entry in event.logprobs]
    assert len(bare) == 4 and all(entry.top_ids == () for entry in bare)


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_a_prompts_logprobs_come_with_the_first_token_however_it_was_cut(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any, size: int
):
    world = worlds(shapes=((1, 4),))
    prompt = tuple(range(10, 10 + size))
    caller = world.answer(make_request(prompt=prompt, prompt_logprobs=1))
    first, *rest = caller.events
    assert [entry.token_id for entry in first.prompt_logprobs] == list(prompt)
    assert first.prompt_logprobs[0].logprob is None and not first.prompt_logprobs[0].top_ids
    for position, entry in enumerate(first.prompt_logprobs[1:], 1):
        want = fake.logprob_of(entry.token_id, position)
        assert entry.logprob == pytest.approx(want, abs=1e-4)
        assert (entry.top_ids, entry.top_logprobs) == ((0,), (0.0,))
    assert all(not event.prompt_logprobs for event in rest)
    assert not world.answer(make_request(prompt=prompt)).events[0].prompt_logprobs


def test_text_never_shows_part_of_a_character(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(max_steps=1)
    tokens = "é€𝄞".encode()
    steps = iter(tokens)

    def one_byte(bank: Any, state: Any, steps_wanted: int, rows: Any, table: Any) -> Any:
        return state, SimpleNamespace(token=np.full((1, 3), next(steps, 65), np.int32))

    world.engine.decode = one_byte
    caller = world.answer(make_request(max_tokens=1 + len(tokens)))
    texts = [event.text for event in caller.events][1:]
    assert texts == ["", "é", "", "", "€", "", "", "", "𝄞"]


def test_several_tokens_come_as_one_event(worlds: MakeWorld, make_request: MakeRequest, fake: Any):
    world = worlds(start=False, clock=lambda: 0.0, max_length=1000)
    request = make_request(max_tokens=14, ignore_eos=True)
    caller = world.submit(request)
    world.run(caller)
    assert [len(event.token_ids) for event in caller.events] == [1, 1, 1, 4, 4, 3]
    assert [call[1] for call in world.engine.log if call[0] == "decode"] == [1, 1, 4, 4, 3]
    assert caller.tokens == fake.answer_of(request, 14)


def test_half_a_character_at_the_end_is_shown_as_such(worlds: MakeWorld, make_request: MakeRequest):
    world = worlds()
    half = SimpleNamespace(token=np.full((1, 3), 0xE2, np.int32))
    world.engine.decode = lambda bank, state, steps, rows, table: (state, half)
    assert world.answer(make_request(max_tokens=2)).events[-1].text == "\ufffd"


def test_the_context_ends_an_answer_as_length(worlds: MakeWorld, make_request: MakeRequest):
    world = worlds(max_length=8)
    caller = world.answer(make_request(prompt=(5,) * 5, max_tokens=100))
    finish = caller.events[-1].finish
    assert (finish.reason, finish.completion_tokens) == ("length", 3)
    for prompt in ((), (5,) * 8):
        with pytest.raises(ValueError, match=f"the prompt has {len(prompt)} tokens, expected 1 to"):
            world.submit(make_request(prompt=prompt))


def test_settings_out_of_range_reach_no_thread(worlds: MakeWorld, make_request: MakeRequest):
    world = worlds()
    with pytest.raises(InvalidSampling, match="temperature"):
        world.submit(make_request(temperature=float("nan")))
    assert world.answer(make_request()).failure is None


def test_a_cancelled_row_is_free_within_two_dispatches(
    worlds: MakeWorld, make_request: MakeRequest
):
    world = worlds(start=False, rows=1, max_length=1000, clock=lambda: 0.0)
    request, other = make_request(max_tokens=900, ignore_eos=True), make_request(max_tokens=1)
    caller = world.submit(request)
    for _ in range(5):
        world.worker.tick()
    waits = world.submit(other)
    steps = world.engine.count("decode")
    world.worker.cancel(request.id)
    world.run(waits)
    assert world.engine.count("decode") - steps <= 2
    assert caller.failure.kind == "cancelled" and waits.failure is None
    world.worker.tick()
    assert not any(world.left())


def test_a_row_that_was_given_up_decodes_no_more(worlds: MakeWorld, make_request: MakeRequest):
    world = worlds(start=False, rows=2, max_length=1000, max_steps=1)
    gone, stays = (make_request(max_tokens=900, ignore_eos=True) for _ in range(2))
    world.submit(gone)
    world.submit(stays)
    for _ in range(5):
        world.worker.tick()
    world.worker.cancel(gone.id)
    world.worker.tick()
    assert world.engine.log[-1] == ("decode", 1, (1,))
    assert [row.active for row in world.engine.state.rows] == [False, True]


def test_the_next_call_is_launched_before_the_last_is_read(
    worlds: MakeWorld, make_request: MakeRequest
):
    world = worlds(start=False, max_steps=1)
    order: list[str] = []

    class Tokens:
        """An array that tells when it is waited for."""

        def __init__(self, name: str, values: np.ndarray) -> None:
            self.name, self.values = name, values

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            order.append(f"read {self.name}")
            return self.values

    decode = world.engine.decode

    def told(*arguments: Any) -> Any:
        state, sampled = decode(*arguments)
        step = world.engine.count("decode")
        order.append(f"launch {step}")
        return state, SimpleNamespace(token=Tokens(str(step), sampled.token))

    world.engine.decode = told
    caller = world.submit(make_request(max_tokens=4))
    world.run(caller)
    assert order == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert world.engine.count("decode") == 3  # none for tokens that nobody wants


def test_prompts_are_launched_no_further_ahead_than_one_call(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(start=False, shapes=((1, 16),), max_length=512)
    request = make_request(prompt=(5,) * 200, max_tokens=2)
    caller = world.submit(request)
    for calls in range(1, 5):
        world.worker.tick()
        assert world.engine.count("prefill") == calls
        assert len(world.worker._launched) == 1
    world.worker.cancel(request.id)
    world.worker.tick()
    assert world.engine.count("prefill") == 4 and caller.failure.kind == "cancelled"


def test_a_request_that_lost_its_row_says_nothing_twice(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(start=False, rows=1, max_length=1000, max_steps=1)
    low = make_request(fake.variant("a"), max_tokens=30, prompt=(4, 5), ignore_eos=True)
    first = world.submit(low)
    world.until(lambda: world.worker.tick(0.001) or len(first.tokens) > 5)
    high = [make_request(max_tokens=3, priority=p, ignore_eos=True) for p in (1, 2)]
    callers = [world.submit(request) for request in high]
    world.run(first, *callers)
    assert first.tokens == fake.answer_of(low, 30)
    assert [c.tokens for c in callers] == [fake.answer_of(request, 3) for request in high]
    assert callers[1].events[-1].finish and first.events[-1].finish.completion_tokens == 30
    read = [call for call in world.engine.log if call[0] == "prefill"]
    assert len(read) == 4, "the low one's prompt twice, that of the others once"
    assert not any(world.left())


def test_the_snapshot_tells_how_fast_it_goes(worlds: MakeWorld, make_request: MakeRequest):
    now = 0.0
    world = worlds(start=False, clock=lambda: now, max_steps=4, max_length=100)
    assert world.worker.snapshot().step_s == float("inf")
    caller = world.submit(make_request(max_tokens=50, ignore_eos=True))
    while not caller.ended:
        world.worker.tick()
        now += 0.002
    seen = world.worker.snapshot()
    assert 0.0 < seen.step_s <= 0.002
    assert seen.compiles == 0 and seen.host_share == 0.0  # no time passes within a tick


def test_a_full_inbox_refuses_with_a_time_and_bounds_what_waits_anywhere(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(inbox=3, rows=1)
    gate = world.gates["zen4-a"] = threading.Event()
    waiting = [world.submit(make_request(fake.variant("a"))) for _ in range(3)]
    for _ in range(3):  # wherever they lie by now
        with pytest.raises(InboxFull, match="3 requests are waiting") as caught:
            world.submit(make_request())
        assert caught.value.retry_after_s > 0
        time.sleep(0.01)
    assert world.worker.snapshot().waiting == 3
    world.worker.pin(fake.variant("b"), True).result(10.0)  # operators are never refused
    gate.set()
    world.until(lambda: all(caller.ended for caller in waiting))
    assert world.answer(make_request()).failure is None


def test_the_time_to_come_again_is_that_of_the_queue_and_not_of_an_idle_night(
    make_request: MakeRequest, fake: Any
):
    now = 0.0
    loader = Loader(fake.stages())
    worker = Worker(
        fake.Engine(rows=1),
        loader,
        CacheConfig(slots=1, slot_bytes=4),
        fake.ByteTokenizer,
        InboxLimits(4),
        lambda: now,
    )
    worker.tick()
    now = 30_000.0
    callers = [fake.Caller() for _ in range(4)]
    for caller in callers:
        worker.submit(make_request(max_tokens=2), caller)
    with pytest.raises(InboxFull) as caught:
        worker.submit(make_request(), fake.Caller())
    assert caught.value.retry_after_s == 0.1
    while not callers[-1].ended:  # every request takes 20 s
        worker.tick()
        now += 10.0
    for _ in range(4):
        worker.submit(make_request(), fake.Caller())
    with pytest.raises(InboxFull) as caught:
        worker.submit(make_request(), fake.Caller())
    assert 10.0 < caught.value.retry_after_s <= 30.0
    worker.stop()


def test_a_refused_request_leaves_its_id_free(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(inbox=1)
    gate = world.gates["zen4-a"] = threading.Event()
    blocker = world.submit(make_request(fake.variant("a"), id="x"))
    with pytest.raises(ValueError, match="request x is already there"):
        world.submit(make_request(id="x"))
    with pytest.raises(InboxFull):
        world.submit(make_request(id="y"))
    gate.set()
    world.until(lambda: blocker.ended)
    assert world.answer(make_request(id="y")).failure is None
    assert world.answer(make_request(id="x")).failure is None


def test_operators_load_pin_and_unload(worlds: MakeWorld, make_request: MakeRequest, fake: Any):
    world = worlds()
    variant = fake.variant("a")
    assert world.worker.load(variant).result(10.0) is None
    world.worker.pin(variant, True).result(10.0)
    (status,) = world.worker.snapshot().variants
    assert (status.state, status.slot, status.pinned) == ("resident", 0, True)
    assert (status.bytes, status.leases) == (4, 0)
    with pytest.raises(LoadRefused, match="unpin another one first"):
        world.worker.pin(fake.variant("b"), True).result(10.0)
    world.worker.unload(variant).result(10.0)
    assert world.worker.snapshot().variants == ()
    world.errors["zen4-b"] = OSError("gone")
    with pytest.raises(LoadRefused, match="could not be loaded") as caught:
        world.worker.load(fake.variant("b")).result(10.0)
    assert caught.value.kind == "load_failed"
    (status,) = world.worker.snapshot().variants
    assert status.state == "failed" and "could not be loaded" in (status.failure or "")


def test_an_operator_who_gives_up_waiting_changes_nothing(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    gate = world.gates["zen4-a"] = threading.Event()
    future = world.worker.load(fake.variant("a"))
    world.until(lambda: bool(world.reads))
    assert future.cancel()
    gate.set()
    assert world.answer(make_request(fake.variant("a"))).failure is None
    assert world.reads == ["zen4-a"]


def test_nothing_of_a_request_is_logged(
    worlds: MakeWorld,
    make_request: MakeRequest,
    fake: Any,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG)
    world = worlds()
    request = make_request(fake.variant("a"), prompt=(201, 202, 203), max_tokens=8)
    world.answer(request)
    assert "loaded zen4-a" in caplog.text
    for token in (201, 202, 203):
        assert str(token) not in caplog.text.replace("test_worker.py:", "")
    assert "201" not in repr(request) and "max_tokens" in repr(request)
