"""What operators see of the calls of late, in numbers worked out by hand."""

import pytest

from server.recent import WINDOW_S, Quantiles, Recent
from server.records import CallRecord
from server.requests import Finish, Timings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ended(model: str, ttft_s: float, code: str = "OK", tpot_s: float = 0.5) -> CallRecord:
    timings = Timings(0.0, 0.0, ttft_s, ttft_s)
    return CallRecord(
        "x",
        model=model,
        queued_s=1.0,
        prompt_tokens=10,
        samples=1,
        pieces=[(ttft_s, 1), (ttft_s + 4 * tpot_s, 4)],
        finishes=[Finish("stop", None, 10, 5, timings)] if code == "OK" else [],
        code=code,
    )


def test_nothing_yet(clock):
    seen = Recent(clock).summary()
    assert (seen.finished, seen.failed, seen.ttft, seen.tpot) == (0, 0, None, None)
    assert seen.prompt_tokens_per_s == seen.answer_tokens_per_s == 0


def test_times_are_by_nearest_rank_and_rates_by_the_window(clock):
    recent = Recent(clock)
    for i in range(1, 101):
        recent.observe(ended("a" if i > 50 else "b", float(i), tpot_s=i / 100))
    recent.observe(ended("a", 1e6, code="CANCELLED"))
    clock.now += 50
    seen = recent.summary()
    assert seen.window_s == 50 and (seen.finished, seen.failed) == (100, 1)
    assert seen.ttft == Quantiles(51.0, 100.0)  # from the call's arrival, 1 s before it was queued
    assert seen.ttft_by_model == {"a": Quantiles(76.0, 101.0), "b": Quantiles(26.0, 51.0)}
    assert seen.tpot is not None
    assert (seen.tpot.p50, seen.tpot.p99) == pytest.approx((0.51, 1.0), abs=0.011)
    assert seen.prompt_tokens_per_s == 10 * 101 / 50
    assert seen.answer_tokens_per_s == 5 * 101 / 50


def test_old_calls_are_forgotten_and_the_window_says_how_far_back_it_reaches(clock):
    recent = Recent(clock)
    recent.observe(ended("a", 1.0))
    clock.now += WINDOW_S + 1
    recent.observe(ended("a", 2.0))
    seen = recent.summary()
    assert (seen.finished, seen.window_s, seen.ttft) == (1, WINDOW_S, Quantiles(3.0, 3.0))
    for _ in range(5000):  # more than are remembered
        recent.observe(ended("b", 1.0))
    clock.now += 2
    seen = recent.summary()
    assert seen.window_s == 2 and set(seen.ttft_by_model) == {"b"}
    assert seen.answer_tokens_per_s == seen.finished * 5 / 2
