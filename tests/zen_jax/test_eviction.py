"""The policy: what a place is worth, in its limits LRU and LFU, and who stays."""

import math
import random

import pytest

from zen_jax.eviction import NEVER, Policy, Traffic, asked, cold, keep, rate, score, weight


def traffic(policy: Policy, *times: float) -> Traffic:
    """Of requests at these times."""
    made = NEVER
    for at in times:
        made = asked(policy, made, at)
    return made


def test_a_request_counts_half_after_a_half_life():
    policy = Policy(half_life_s=10.0)
    one = traffic(policy, 0.0)
    assert weight(policy, one, 10.0) == 0.5
    assert weight(policy, traffic(policy, 0.0, 10.0), 20.0) == 0.75
    assert rate(policy, one, 0.0) == pytest.approx(math.log(2) / 10.0)


def test_a_steady_stream_has_its_own_rate():
    policy = Policy(half_life_s=50.0)
    stream = traffic(policy, *(0.25 * i for i in range(4000)))
    assert rate(policy, stream, 1000.0) == pytest.approx(4.0, rel=0.01)


def test_what_a_place_is_worth_is_rate_times_recency():
    policy = Policy(half_life_s=10.0, recency_s=20.0)
    one = Traffic(8.0, at=0.0, used=5.0)
    assert score(policy, one, 10.0) == pytest.approx(math.log2(8.0 * 0.5 * 2 ** (-5.0 / 20.0)))
    assert score(policy, NEVER, 10.0) == -math.inf
    assert score(policy, Traffic(1.0, 0.0, 0.0), 1e9) < -1e6, "far below what a float holds"


@pytest.mark.parametrize(
    ("policy", "by"),
    [
        (Policy(recency_s=1e-6), "recency"),
        (Policy(half_life_s=1e12, recency_s=1e12), "count"),
    ],
)
def test_the_limits_are_plain_lru_and_plain_lfu(policy: Policy, by: str):
    draw = random.Random(5)
    for _ in range(100):
        times = {
            key: sorted(draw.uniform(0, 100) for _ in range(n)) for n, key in enumerate("abcde", 1)
        }
        known = {key: traffic(policy, *at) for key, at in times.items()}
        order = sorted(known, key=lambda key: score(policy, known[key], 100.0))
        if by == "recency":
            assert order == sorted(times, key=lambda key: times[key][-1])
        else:
            assert order == sorted(times, key=lambda key: len(times[key]))


def test_the_order_of_rates_changes_with_requests_only():
    policy = Policy(half_life_s=10.0)
    a, b = traffic(policy, 0.0, 1.0, 2.0), traffic(policy, 3.0, 4.0)
    assert len({weight(policy, a, t) > weight(policy, b, t) for t in (5.0, 50.0, 500.0)}) == 1


def of_weight(**weights: float) -> dict[str, Traffic]:
    return {key: Traffic(w, 0.0, 0.0) for key, w in weights.items()}


def test_the_most_asked_for_stay_and_neighbours_do_not_flap():
    policy = Policy(hysteresis=2.0)
    start = of_weight(a=100.0, b=90.0, c=80.0, d=1.0)
    kept = keep(policy, (), start, start, 2, 0.0)
    assert kept == {"a", "b"}
    close = of_weight(a=100.0, b=90.0, c=105.0, d=1.0)  # 15 ahead; 2 sigma are 19.7
    assert keep(policy, kept, close, close, 2, 0.0) == kept
    ahead = of_weight(a=100.0, b=90.0, c=112.0, d=1.0)
    assert keep(policy, kept, ahead, ahead, 2, 0.0) == {"a", "c"}
    assert keep(policy, kept, ahead, ahead, 1, 0.0) == {"a"}
    assert keep(policy, kept, ahead, ahead, 0, 0.0) == frozenset()


def test_who_left_or_is_cold_does_not_stay():
    policy = Policy(idle_after_s=10.0)
    known = of_weight(a=100.0, b=50.0, c=10.0)
    assert keep(policy, {"a", "b"}, {"b", "c"}, known, 2, 0.0) == {"b", "c"}
    known["a"] = Traffic(100.0, 0.0, used=-5.0)
    assert cold(policy, known["a"], 5.0) and not cold(policy, known["b"], 5.0)
    assert keep(policy, {"a", "b"}, known, known, 2, 5.0) == {"b", "c"}


@pytest.mark.parametrize(
    "settings",
    [
        {"half_life_s": 0.0},
        {"recency_s": -1.0},
        {"idle_after_s": float("nan")},
        {"pinned": -1},
        {"hysteresis": float("nan")},
    ],
)
def test_settings_out_of_range_are_named(settings: dict):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        Policy(**settings)
