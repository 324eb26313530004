"""Pages in the worker: found again by who begins alike, by nobody else, and lost by the last."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from server.requests import Request
from zen_jax.pages import PagePool

LONG = tuple(range(2, 42))  # two and a half pages of 16


@pytest.fixture
def world(worlds: Any) -> Any:
    return worlds(start=False, max_length=64, slots=3, page_size=16, rows=4, pages=16)


def answered(world: Any, *requests: Request) -> list[int]:
    """Runs requests together; how many tokens of each one's prompt were there already."""
    callers = [world.submit(request) for request in requests]
    world.run(*callers)
    for caller, request in zip(callers, requests, strict=True):
        limit = request.sampling.max_tokens
        assert caller.tokens == world.fake.answer_of(request, limit)
    assert world.left() == (0, 0, 0, 0) and world.worker.snapshot().pages_held == 0
    return [caller.events[-1].finish.cached_tokens for caller in callers]


def test_the_second_request_reads_what_differs(world: Any, make_request: Any) -> None:
    assert answered(world, make_request(prompt=LONG)) == [0]
    assert answered(world, make_request(prompt=(*LONG[:39], 77, 78))) == [32]
    assert answered(world, make_request(prompt=(*LONG[:31], 77, 78))) == [16]
    assert answered(world, make_request(prompt=(99, *LONG))) == [0]
    assert world.engine.read == [40, 9, 16, 1, 41]
    seen = world.worker.snapshot()
    assert (seen.found_tokens, seen.read_tokens) == (48, 107)
    assert (seen.pages, seen.pages_held) == (16, 0) and seen.pages_kept >= 5


def test_one_token_at_least_is_read(world: Any, make_request: Any) -> None:
    """The logits of the last are wanted."""
    assert answered(world, make_request(prompt=LONG[:32])) == [0]
    assert answered(world, make_request(prompt=LONG[:32], seed=9)) == [16]


def test_of_a_conversation_the_prompt_is_found_and_the_answer_read(
    world: Any, make_request: Any
) -> None:
    """A decode step sums otherwise: an answer would depend on who was here before."""
    request = make_request(prompt=LONG, max_tokens=20)
    assert answered(world, request) == [0]
    whole = (*LONG, *world.fake.answer_of(request, 20))
    assert answered(world, make_request(prompt=(*whole[:49], 5), max_tokens=2)) == [32]
    assert answered(world, make_request(prompt=(*whole[:49], 6), max_tokens=2)) == [48]


def test_the_newest_token_is_not_in_its_page_yet(world: Any, make_request: Any) -> None:
    """It would be written when the next is made: a page that it fills is not whole."""
    request = make_request(prompt=LONG[:31], max_tokens=1)
    assert answered(world, request) == [0]
    whole = (*LONG[:31], *world.fake.answer_of(request, 1))
    assert answered(world, make_request(prompt=(*whole, 5), max_tokens=1)) == [16]


@pytest.mark.parametrize("other", ["variant", "version", "tenant", "base"])
def test_nobody_else_finds_it(world: Any, make_request: Any, fake: Any, other: str) -> None:
    first = make_request(fake.variant("a"), prompt=LONG)
    assert answered(world, first) == [0]
    assert answered(world, replace(first, id="again")) == [32]
    changes: dict[str, dict[str, Any]] = {
        "variant": {"variant": fake.variant("b")},
        "version": {"variant": fake.variant("a", 2)},
        "tenant": {"tenant": "somebody"},
        "base": {"variant": None},
    }
    assert answered(world, replace(first, id="other", **changes[other])) == [0]


def test_samples_of_a_request_read_its_prompt_once(world: Any, make_request: Any) -> None:
    """They come together: who finds the prompt being read waits for it."""
    first = make_request(prompt=LONG, max_tokens=6)
    samples = [replace(first, id=f"s{i}", sample=i) for i in range(4)]
    assert answered(world, *samples) == [0, 32, 32, 32]
    assert world.engine.read[0] == 40 and sum(world.engine.read) == 40 + 3 * 8


def test_a_short_beginning_is_not_waited_for(world: Any, make_request: Any) -> None:
    """One page of three alike: to read two pages again takes longer than to read three."""
    callers = [make_request(prompt=LONG), make_request(prompt=(*LONG[:16], *range(60, 84)))]
    assert answered(world, *callers) == [0, 0]
    assert sum(world.engine.read) == 80


def test_log_probabilities_of_a_prompt_bypass_it(world: Any, make_request: Any) -> None:
    asked = make_request(prompt=LONG, prompt_logprobs=0)
    assert answered(world, asked) == [0]
    assert answered(world, make_request(prompt=LONG)) == [0], "nor is what they read kept"
    assert answered(world, replace(asked, id="again")) == [0]


def test_without_a_prefix_cache_nothing_is_found(worlds: Any, make_request: Any) -> None:
    world = worlds(start=False, max_length=64, share_prefixes=False)
    assert answered(world, make_request(prompt=LONG), make_request(prompt=LONG)) == [0, 0]
    assert world.worker.snapshot().pages_kept == 0


def test_an_aborted_prompt_is_not_found(worlds: Any, make_request: Any) -> None:
    world = worlds(start=False, max_length=64, shapes=((1, 16),))
    caller = world.submit(make_request(prompt=LONG, id="gone"))
    world.worker.tick()
    world.worker.tick()
    assert world.engine.read == [16, 16], "two whole pages"
    world.worker.cancel("gone")
    world.run(caller)
    seen = world.worker.snapshot()
    assert (seen.pages_held, seen.pages_kept) == (0, 0)
    assert answered(world, make_request(prompt=LONG)) == [0]


def test_a_refused_prompt_is_not_found(world: Any, make_request: Any) -> None:
    caller = world.submit(make_request(prompt=(*LONG, 1000)))
    world.run(caller)
    assert caller.failure.kind == "internal"
    assert world.worker.snapshot().pages_kept == 0


def test_who_waits_for_a_prompt_that_is_aborted_reads_it(worlds: Any, make_request: Any) -> None:
    world = worlds(start=False, max_length=64, shapes=((1, 16),))
    first = world.submit(make_request(prompt=LONG, id="gone"))
    second = world.submit(make_request(prompt=LONG))
    world.worker.tick()
    assert world.worker.snapshot().rows_in_use == 1
    world.worker.cancel("gone")
    world.run(first, second)
    assert second.tokens and second.events[-1].finish.cached_tokens == 0


def test_the_longest_unused_is_forgotten_first(worlds: Any, make_request: Any) -> None:
    world = worlds(start=False, max_length=64, rows=1, page_size=16, pages=7)
    prompts = [tuple(range(start, start + 33)) for start in (2, 50, 100)]
    for prompt in prompts:
        assert answered(world, make_request(prompt=prompt, max_tokens=1)) == [0]
    assert answered(world, make_request(prompt=prompts[1], max_tokens=1)) == [32]
    assert answered(world, make_request(prompt=tuple(range(150, 190)), max_tokens=1)) == [0]
    found = [answered(world, make_request(prompt=p, max_tokens=1))[0] for p in (prompts[1],)]
    assert found == [32]
    assert answered(world, make_request(prompt=prompts[0], max_tokens=1)) == [0]


def rounds(world: Any, *callers: Any) -> Iterator[Any]:
    """Ticks until all have ended, with what is seen after each."""
    while not all(caller.ended for caller in callers):
        world.worker.tick()
        yield world.worker.snapshot()


def test_when_pages_run_out_the_last_in_line_goes_on_later(
    worlds: Any, make_request: Callable[..., Request]
) -> None:
    """Three want four pages each at their end; there are seven."""
    world = worlds(start=False, rows=3, max_length=64, page_size=16, pages=7)
    requests = [make_request(prompt=(i, 1), max_tokens=61, ignore_eos=True) for i in (20, 30, 40)]
    callers = [world.submit(request) for request in requests]
    running = [seen.rows_in_use for seen in rounds(world, *callers)]
    assert max(running) == 3 and min(running[:-3]) >= 1
    for caller, request in zip(callers, requests, strict=True):
        assert caller.tokens == world.fake.answer_of(request, 61)
    ends = [caller.events[-1].finish for caller in callers]
    assert all(finish.completion_tokens == 61 for finish in ends)
    assert all(finish.cached_tokens == 0 for finish in ends), "what it had itself does not count"
    seen = world.worker.snapshot()
    assert seen.rows_lost >= 2 and seen.pages_held == 0


def test_a_request_with_priority_takes_pages(worlds: Any, make_request: Any) -> None:
    """Though a row is free: pages of one with less, the last in line."""
    world = worlds(start=False, rows=4, max_length=64, page_size=16, pages=5)
    low = [
        world.submit(make_request(prompt=(i, 1), max_tokens=60, ignore_eos=True)) for i in (20, 30)
    ]
    for _ in range(3):
        world.worker.tick()
    high = world.submit(make_request(prompt=range(50, 95), max_tokens=1, priority=5))
    for seen in rounds(world, high):
        assert seen.pages_held <= 5
    assert not low[0].ended and not low[1].ended
    assert world.worker.snapshot().rows_lost >= 1
    world.run(*low)
    assert [len(caller.tokens) for caller in low] == [60, 60]


def test_pages_behind_a_window_are_given_back(worlds: Any, make_request: Any) -> None:
    """A prompt of 200 tokens and an answer of 300 need 4 pages of 16 at a time with 40 in sight."""
    world = worlds(
        start=False, rows=1, max_length=512, page_size=16, pages=32, reach=40, shapes=((1, 16),)
    )
    prompt = tuple(i % 200 + 2 for i in range(200))
    caller = world.submit(make_request(prompt=prompt, max_tokens=300, ignore_eos=True))
    most = max(seen.pages_held for seen in rounds(world, caller))
    assert most <= 5 and len(caller.tokens) == 300
    assert answered(world, make_request(prompt=prompt[:40], max_tokens=1)) == [0]
    assert answered(world, make_request(prompt=(*prompt[:39], 7), max_tokens=1)) == [32]


def test_a_plan_leaves_the_state_before_it_as_it_was(world: Any, make_request: Any) -> None:
    caller = world.submit(make_request(prompt=LONG, max_tokens=30))
    states = []
    while not caller.ended:
        world.worker.tick()
        pages: PagePool = world.worker._plan.pages
        states.append((pages, pages.copy()))
    assert all(pages == as_it_was for pages, as_it_was in states)
