"""What people report of loading and evicting in systems like this one: each kind of fault, once.

The worker, scheduler, cache and loader are the real ones; the model can be worked out by hand.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from server.requests import LoadRefused, Request
from zen_jax.benchmark_cache import waits
from zen_jax.checkpoint.manifest import VariantCorrupt
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema, LeafSchema, write_slot
from zen_jax.delta.format import WeightDelta
from zen_jax.eviction import Policy
from zen_jax.layout import tensor_shapes

MakeWorld = Callable[..., Any]
MakeRequest = Callable[..., Request]


def test_report_10_one_bad_variant_fails_nobody_elses_requests(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(rows=6, slots=3)
    world.errors["zen4-b"] = VariantCorrupt("zen4-b/1", "bits", "differs")
    variants = (None, fake.variant("a"), fake.variant("b"), fake.variant("c"))
    requests = [make_request(variant) for variant in variants]
    callers = [world.submit(request) for request in requests]
    world.until(lambda: all(caller.ended for caller in callers))
    for request, caller in zip(requests, callers, strict=True):
        if request.variant == fake.variant("b"):
            assert caller.failure.kind == "corrupt"
        else:
            assert caller.tokens == fake.answer_of(request, len(caller.tokens))


@pytest.mark.parametrize("stage", ["read", "commit"])
def test_report_11_a_failed_load_leaves_nothing_and_is_tried_again_after_a_back_off(
    stage: str, worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    world.errors["zen4-a"] = OSError("no such disk")
    if stage == "commit":
        world.errors.clear()
        world.engine.broken.add("write_slot refused")
    failed = world.answer(make_request(fake.variant("a")))
    assert failed.failure.kind == "load_failed"
    (status,) = world.worker.snapshot().variants
    assert (status.state, status.slot, status.bytes, status.leases) == ("failed", None, 0, 0)
    again = world.answer(make_request(fake.variant("a")))
    assert again.failure is not None and again.failure.retry_after_s <= 0.05, "it backs off"
    world.errors.clear()
    world.engine.broken.clear()
    time.sleep(0.06)  # the back-off of 0.05 s, by the worker's own clock
    request = make_request(fake.variant("a"))
    assert world.answer(request).tokens == fake.answer_of(request, 4)
    assert world.left() == (0, 0, 0, 0)


def test_report_12_many_askers_start_one_load_and_who_leaves_stops_none(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(rows=8, inbox=16)
    gate = world.gates["zen4-a"] = threading.Event()
    requests = [make_request(fake.variant("a")) for _ in range(8)]
    callers = [world.submit(request) for request in requests]
    world.until(lambda: world.reads == ["zen4-a"])
    world.worker.cancel(requests[0].id)
    world.until(lambda: callers[0].ended)
    gate.set()
    world.until(lambda: all(caller.ended for caller in callers))
    assert world.reads == ["zen4-a"] and world.loader.started == 1
    assert all(caller.failure is None for caller in callers[1:])


def test_report_13_what_is_unloaded_serves_who_has_it_to_the_last_token(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(start=False)
    running = make_request(fake.variant("a"), max_tokens=20)
    caller = world.submit(running)
    world.until(lambda: world.worker.tick(0.001) or caller.tokens)
    unload = world.worker.unload(fake.variant("a"))
    late = make_request(fake.variant("a"))
    second = world.submit(late)
    world.worker.tick()
    assert not unload.done(), "a request still decodes with it"
    world.run(caller, second)
    assert caller.tokens == fake.answer_of(running, 20)
    assert second.tokens == fake.answer_of(late, 4) and unload.result(1.0) is None
    assert world.reads == ["zen4-a", "zen4-a"], "it was loaded again for who came later"


def test_report_14_nothing_of_a_slots_last_variant_shows_through():
    config = ModelConfig(64, 16, 32, 1, 2, 1, 8, max_position=16, tie_word_embeddings=True)
    shapes = tensor_shapes(config)
    draw = np.random.default_rng(0)

    def full(shape: tuple[int, ...]) -> WeightDelta:
        if len(shape) == 1:
            return WeightDelta(dense=np.ones(shape, np.float32))
        bits = draw.integers(0, 256, (2, shape[0], shape[1] // 8), np.uint8)
        dense = np.ones(shape, np.float32)
        return WeightDelta(bits, np.ones((2, shape[0]), np.float32), dense=dense)

    leaves = {name: LeafSchema(2 if len(s) == 2 else 0, True) for name, s in shapes.items()}
    schema = BankSchema.covering(config, 2, [leaves])
    bank = schema.empty()
    write = jax.jit(write_slot)
    bank = write(bank, 1, schema.fit({name: full(shape) for name, shape in shapes.items()}))
    assert any(np.asarray(leaf[1]).any() for leaf in jax.tree.leaves(bank.weights))
    bank = write(bank, 1, schema.fit({name: WeightDelta() for name in shapes}))
    assert not any(np.asarray(leaf[1]).any() for leaf in jax.tree.leaves(bank.weights))


def test_report_15_a_name_with_new_weights_answers_by_them_from_the_next_request_on(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(start=False, rows=2)
    old = make_request(fake.variant("a"), max_tokens=12)
    first = world.submit(old)
    world.until(lambda: world.worker.tick(0.001) or first.tokens)
    new = make_request(fake.variant("a", 2))
    second = world.submit(new)
    world.run(first, second)
    assert first.tokens == fake.answer_of(old, 12), "who had the old one keeps it"
    assert second.tokens == fake.answer_of(new, len(second.tokens))
    third = make_request(fake.variant("b"))
    world.run(world.submit(third))
    resident = {s.variant for s in world.worker.snapshot().variants if s.slot is not None}
    assert resident == {fake.variant("a", 2), fake.variant("b")}, "the old version goes first"


def test_report_16_more_variants_than_slots_do_not_chase_the_hot_one_out(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(start=False, rows=1, slots=2)
    for letter in "abacadabacadabacad":
        request = make_request(fake.variant(letter))
        caller = world.submit(request)
        world.run(caller)
        assert caller.tokens == fake.answer_of(request, 4)
    (hot,) = [s for s in world.worker.snapshot().variants if s.variant.name == "zen4-a"]
    assert hot.kept and world.engine.log.count(("write_slot", hot.slot)) == 1
    assert world.engine.count("write_slot") > 4, "the others took turns in the other slot"
    assert waits("the server's", Policy()).p50 == 0.0


def test_report_17_others_decode_while_a_variant_is_loaded(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds()
    gate = world.gates["zen4-a"] = threading.Event()
    cold = world.submit(make_request(fake.variant("a")))
    for variant in (None, fake.variant("b"), None):
        request = make_request(variant, max_tokens=9)
        assert world.answer(request).tokens == fake.answer_of(request, 9)
    assert not cold.ended
    gate.set()
    world.until(lambda: cold.ended)


def test_report_18_a_cold_variant_gets_its_turn_though_a_hot_one_never_rests(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    world = worlds(start=False, rows=2, slots=1)
    hot = [world.submit(make_request(fake.variant("a"), max_tokens=30)) for _ in range(2)]
    cold = make_request(fake.variant("b"))
    caller = world.submit(cold)

    def tick() -> bool:
        world.worker.tick(0.001)
        if hot[-1].tokens:  # another one before the last has ended, again and again
            hot.append(world.submit(make_request(fake.variant("a"), max_tokens=30)))
        return caller.ended

    world.until(tick)
    assert caller.tokens == fake.answer_of(cold, 4)


def test_report_18_waiting_for_a_slot_is_bounded_and_tells_when_to_come_again(
    worlds: MakeWorld, make_request: MakeRequest, fake: Any
):
    now = 0.0
    world = worlds(start=False, rows=1, slots=1, clock=lambda: now)
    running = world.submit(make_request(fake.variant("a"), max_tokens=50))
    world.until(lambda: world.worker.tick(0.001) or running.tokens)
    load = world.worker.load(fake.variant("b"))
    world.until(lambda: world.worker.tick(0.001) or world.loader.staged)
    now = 70.0
    world.until(lambda: world.worker.tick(0.001) or load.done())
    with pytest.raises(LoadRefused) as refused:
        load.result(0)
    assert (refused.value.kind, refused.value.retry_after_s) == ("exhausted", 0.05)
