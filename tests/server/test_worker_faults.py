"""The worker when a part of it fails, when time runs out and when it is to end."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.requests import Draining, Failure, LoadRefused, Request, TokenEvent
from zen_jax.checkpoint.manifest import VariantCorrupt

MakeRequest = Callable[..., Request]
MakeWorld = Callable[..., Any]


def test_a_damaged_variant_fails_its_own_requests_and_is_tried_again_later(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    world.errors["zen4-a"] = VariantCorrupt("zen4-a/1", "bits/0.0", "differs")
    bad, good = world.submit(make_request(fake.variant("a"))), world.answer(make_request())
    world.until(lambda: bad.ended)
    assert (bad.failure.kind, bad.failure.retry_after_s) == ("corrupt", 0.05)
    assert good.failure is None
    del world.errors["zen4-a"]
    time.sleep(0.06)
    assert world.answer(make_request(fake.variant("a"))).failure is None


@pytest.mark.parametrize("broken", ["prefill", "decode", "write_slot"])
def test_a_broken_engine_answers_everyone_and_tells_nothing(
    broken: str,
    worlds: MakeWorld,
    make_request: MakeRequest,
    fake: Any,
    caplog: pytest.LogCaptureFixture,
):
    world = worlds(start=False)
    gate = world.gates["zen4-b"] = threading.Event()
    world.engine.broken.add(broken)
    requests = [make_request(fake.variant("a")), make_request(), make_request(fake.variant("b"))]
    callers = [world.submit(request) for request in requests]
    operator = world.worker.load(fake.variant("b"))
    world.worker.start()
    world.until(lambda: all(caller.ended for caller in callers))
    world.until(lambda: not world.worker.alive)
    for caller in callers:
        if caller.failure is None:  # it ended well before anything broke
            assert broken == "write_slot"
            continue
        assert caller.failure.kind == "internal"
        assert "secret" not in caller.failure.message
        error_id = caller.failure.message.split()[-1]
        assert f"error {error_id}: RuntimeError" in caplog.text
    assert any(caller.failure for caller in callers)
    assert "secret" not in caplog.text
    with pytest.raises(LoadRefused, match="internal error"):
        operator.result(10.0)
    with pytest.raises(Draining):
        world.submit(make_request())
    with pytest.raises(Draining):
        world.worker.load(fake.variant("a"))
    gate.set()


@pytest.mark.parametrize("hanging", ["prefill", "decode", "write_slot"])
def test_a_hanging_engine_is_given_up_and_everyone_answered(
    hanging: str,
    worlds: MakeWorld,
    make_request: MakeRequest,
    fake: Any,
    caplog: pytest.LogCaptureFixture,
):
    world = worlds(rows=1)
    release = world.engine.hangs[hanging] = threading.Event()
    world.gates["zen4-b"] = threading.Event()
    callers = [world.submit(make_request(fake.variant(letter))) for letter in "aab"]
    operator = world.worker.load(fake.variant("b"))
    world.until(lambda: any(call[0] == hanging for call in world.engine.log))
    pulse = world.worker.pulse
    assert pulse is not None and pulse == world.worker.pulse, "it goes round no more"
    world.worker.abandon("it hangs")
    for caller in callers:
        assert caller.ended
        assert (caller.failure.kind, caller.failure.message) == ("unavailable", "it hangs")
    with pytest.raises(LoadRefused, match="it hangs"):
        operator.result(1.0)
    assert not world.worker.alive
    with pytest.raises(Draining):
        world.submit(make_request())
    # Should it come back after all, and break, nobody hears of it and no fault is logged.
    world.engine.broken.add(hanging)
    release.set()
    assert world.worker.stop()
    assert "error" not in caplog.text
    assert all(len(caller.events) == 1 for caller in callers)


def test_a_worker_with_nothing_to_do_has_no_pulse(worlds: MakeWorld, make_request: MakeRequest):
    world = worlds()
    assert world.answer(make_request()).failure is None
    world.until(lambda: world.worker.pulse is None)


def test_a_slot_that_cannot_be_written_is_its_own_variants_affair(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any, caplog: pytest.LogCaptureFixture
):
    world = worlds()
    world.engine.broken.add("write_slot refused")
    bad = world.answer(make_request(fake.variant("a")))
    assert bad.failure.kind == "load_failed" and "error " in bad.failure.message
    assert bad.failure.retry_after_s == 0.05
    assert world.answer(make_request()).failure is None
    world.engine.broken.clear()
    time.sleep(0.06)
    assert world.answer(make_request(fake.variant("a"))).failure is None
    assert world.reads == ["zen4-a"], "the copy in host memory was as good as before"
    assert world.left() == (0, 0, 0, 0)


def test_a_prompt_that_the_engine_refuses_fails_alone(
    worlds: MakeWorld, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
):
    world = worlds()
    good = world.submit(make_request(max_tokens=20))
    bad = world.answer(make_request(prompt=(31337,)))
    assert bad.failure.kind == "internal" and bad.tokens == []
    assert "31337" not in bad.failure.message + caplog.text
    world.until(lambda: good.ended)
    assert good.failure is None
    assert world.answer(make_request()).failure is None
    world.until(lambda: not world.worker.snapshot().rows_in_use)


def test_a_callback_that_raises_harms_only_its_own_request(
    worlds: MakeWorld, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
):
    world = worlds(max_length=1000)
    calls: list[TokenEvent | Failure] = []

    def raises(event: TokenEvent | Failure) -> None:
        calls.append(event)
        raise ValueError(f"cannot pass on {event!r}")

    other = world.submit(make_request(max_tokens=30, ignore_eos=True))
    world.worker.submit(make_request(max_tokens=900, ignore_eos=True), raises)
    world.until(lambda: other.ended)
    assert other.failure is None
    world.until(lambda: not any(world.left()))
    assert len(calls) == 1
    assert "ValueError" in caplog.text and "cannot pass on" not in caplog.text
    assert world.worker.alive


def test_a_tokenizer_that_fails_harms_only_its_own_request(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()

    class Fails(fake.ByteTokenizer):
        def token_bytes(self, token_id: int, first: bool = False) -> bytes | None:
            raise KeyError(f"no token {token_id}")

    tokenizers = world.worker._tokenizers
    world.worker._tokenizers = lambda variant: (Fails if variant else tokenizers)(variant)
    bad = world.answer(make_request(fake.variant("a")))
    assert bad.failure.kind == "internal"
    assert world.answer(make_request()).failure is None
    world.until(lambda: not any(world.left()))


def test_deadlines_queued_and_running(worlds: MakeWorld, make_request: MakeRequest, fake: Any):
    now = 0.0
    world = worlds(start=False, clock=lambda: now, max_length=1000, max_steps=1)
    world.gates["zen4-a"] = threading.Event()
    queued = world.submit(make_request(fake.variant("a"), deadline=5.0))
    running = world.submit(make_request(max_tokens=900, ignore_eos=True, deadline=6.0))
    for _ in range(4):
        world.worker.tick()
    now = 5.0
    world.worker.tick()
    assert queued.failure.kind == "deadline" and queued.tokens == []
    assert len(running.tokens) == 4 and not running.ended
    now = 6.0
    world.worker.tick()
    assert running.failure.kind == "deadline"
    assert world.engine.count("prefill") == 1
    world.worker.tick()
    assert not any(world.left())


def test_an_idle_worker_wakes_for_a_deadline_alone(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    world.gates["zen4-a"] = threading.Event()
    assert world.answer(
        make_request(fake.variant("a"), deadline=time.monotonic() + 0.05)
    ).failure.kind == ("deadline")


def test_draining_finishes_what_was_accepted_and_refuses_the_rest(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(rows=1)
    gate = world.gates["zen4-a"] = threading.Event()
    callers = [world.submit(make_request(fake.variant("a"))), world.submit(make_request())]
    outcome: list[bool] = []
    drainer = threading.Thread(target=lambda: outcome.append(world.worker.drain(30.0)))
    drainer.start()

    def refuses() -> bool:
        try:
            world.submit(make_request())
        except Draining:
            return True
        return False

    world.until(refuses)
    assert world.worker.alive
    gate.set()
    drainer.join(30.0)
    assert outcome == [True]
    assert [caller.failure for caller in callers] == [None, None]
    assert not world.worker.alive


def test_draining_too_long_ends_what_is_left(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    world.gates["zen4-a"] = threading.Event()
    caller = world.submit(make_request(fake.variant("a")))
    assert not world.worker.drain(0.05)
    assert caller.failure.kind == "unavailable"
    assert not world.worker.alive


def test_stopping_before_the_start_answers_too(worlds: MakeWorld, make_request: MakeRequest):
    world = worlds(start=False)
    caller = world.submit(make_request())
    assert not world.worker.alive
    assert world.worker.stop()
    assert caller.failure.kind == "unavailable"
