"""The cache's benchmark: rivals are what they are called, and the policy as good as it says."""

import random
from itertools import combinations

import pytest

from zen_jax.benchmark_cache import Traffic, bench_cache, waits
from zen_jax.eviction import Policy
from zen_jax.rival_policies import RIVALS, belady, hit_rate


def test_known_sequences():
    rates = {name: hit_rate(make(3), "abcadaeafa") for name, make in RIVALS.items()}
    assert rates["LRU"] == 0.4  # a, each time
    keys = "aaabbbcdcdcdcdcd"
    assert hit_rate(RIVALS["LRU"](2), keys) == 12 / 16
    assert hit_rate(RIVALS["LFU"](2), keys) < 12 / 16, "it clings to what was popular once"
    assert belady(2, "abcabcabc") == pytest.approx(3 / 9)


def optimum(slots: int, keys: str) -> int:
    """The most hits that any choice of victims gives, by trying all."""
    states = {frozenset(): 0}
    for key in keys:
        following: dict[frozenset, int] = {}
        for held, hits in states.items():
            if key in held:
                choices = [(held, hits + 1)]
            elif len(held) < slots:
                choices = [(held | {key}, hits)]
            else:
                kept = combinations(held, slots - 1)
                choices = [(frozenset(k) | {key}, hits) for k in kept]
            for after, count in choices:
                following[after] = max(following.get(after, 0), count)
        states = following
    return max(states.values())


def test_belady_is_the_best_there_can_be_and_nobody_holds_too_much():
    draw = random.Random(3)
    for _ in range(30):
        keys = "".join(draw.choices("abcdef", (6, 5, 4, 3, 2, 1), k=40))
        best = belady(3, keys)
        assert best * 40 == pytest.approx(optimum(3, keys))
        for name, make in RIVALS.items():
            assert hit_rate(make(3), keys) <= best + 1e-9, name


def test_the_policy_is_at_least_lru_and_near_the_best_online_one():
    cases = bench_cache(3000, sizes=((8, 14),), exponents=(0.8, 1.2))
    assert [case.traffic for case in cases] == [
        "zipf 0.8, steady",
        "zipf 0.8, shifting",
        "zipf 1.2, steady",
        "zipf 1.2, shifting",
    ]
    for case in cases:
        assert case.lru <= case.hit_rate <= case.belady, case
        assert case.hit_rate >= 0.97 * case.best_online, case
        if case.hot_reloads is not None:
            assert case.hot_reloads == 0, case
    keys = "traffic slots variants hit_rate lru lfu best_online belady"
    assert list(cases[0].figures()) == keys.split()


def test_traffic_is_drawn_again_and_shifts():
    steady, shifting = Traffic(1.2, None, 14), Traffic(1.2, 100.0, 14)
    assert steady.requests(500) == steady.requests(500)
    times = [at for at, _ in steady.requests(500)]
    assert times == sorted(times) and 3.0 < 500 / times[-1] < 5.0
    early = [key for at, key in shifting.requests(4000) if at < 100.0]
    late = [key for at, key in shifting.requests(4000) if 100.0 < at < 200.0]
    assert max(early, key=early.count) != max(late, key=late.count)


def test_every_request_gets_a_slot_though_there_are_more_variants_than_slots():
    seen = waits("the server's", Policy())
    assert seen.refused == 0 and seen.p50 == 0.0 and seen.longest < 60.0
    assert seen.loads < waits("plain LRU", Policy(recency_s=1e-3, pinned=0)).loads


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match="requests is 0"):
        bench_cache(0)
