"""Whose place in memory is worth most: the policy of the delta cache, as pure functions of numbers.

Each variant has a count of requests that decays. With half-life h, a request at time t counts

    weight(now) = sum over requests of 2 ** -((now - t) / h),       rate = weight * ln 2 / h

and what its place is worth is rate times recency, in logarithms so that nothing underflows:

    score(now) = log2 weight(now) - (now - used) / r,        recency = 2 ** -((now - used) / r)

where `used` is the last request or the end of the last lease, and r is `recency_s`. The victim is
the one with the least score. Limits: r -> 0 leaves recency alone, which is plain LRU; r and h ->
infinity leave the count of all requests, which is plain LFU; r -> infinity alone is LRFU (Lee et
al., 2001), that is LFU with ageing.

The order of two weights changes with a request only, never by time passing, since all decay alike.
So the `pinned` most asked for are chosen anew when a request comes, and one takes another's place
among them only when the difference is no accident: a decayed count of independent requests has
half its mean as variance, so it has to be ahead by

    weight(new) - weight(old) > hysteresis * sqrt((weight(new) + weight(old)) / 2)
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log, log2, sqrt

type Key = str


@dataclass(frozen=True, slots=True)
class Policy:
    """What decides over places; seconds where a name ends in _s.

    Attributes:
        half_life_s: in which a request counts half.
        recency_s: in which a place that is not used is worth half; see the module for its limits.
        pinned: how many of the most asked for stay; at most slots - 1 do.
        hysteresis: standard deviations by which one has to be ahead to be among them instead.
        idle_after_s: who was not used for so long is cold: it is not among them, and goes first.
    """

    half_life_s: float = 300.0
    recency_s: float = 300.0
    pinned: int = 6
    hysteresis: float = 2.0
    idle_after_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("half_life_s", "recency_s", "idle_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds above 0")
        if self.pinned < 0:
            raise ValueError(f"pinned is {self.pinned}, expected at least 0")
        if not self.hysteresis >= 0:
            raise ValueError(f"hysteresis is {self.hysteresis}, expected at least 0")


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a variant was asked for.

    Attributes:
        weight: the decayed count of requests as of `at`.
        at: the last request.
        used: the last request or the end of the last lease.
    """

    weight: float
    at: float
    used: float


NEVER = Traffic(0.0, 0.0, float("-inf"))


def asked(policy: Policy, traffic: Traffic, now: float) -> Traffic:
    """The traffic with one request more."""
    return Traffic(weight(policy, traffic, now) + 1.0, now, now)


def weight(policy: Policy, traffic: Traffic, now: float) -> float:
    """The decayed count of requests."""
    return traffic.weight * 2.0 ** -max((now - traffic.at) / policy.half_life_s, 0.0)


def rate(policy: Policy, traffic: Traffic, now: float) -> float:
    """Requests a second; 0 where nothing is ever forgotten."""
    return weight(policy, traffic, now) * log(2.0) / policy.half_life_s


def score(policy: Policy, traffic: Traffic, now: float) -> float:
    """What a place in memory is worth, see the module; minus infinity for one never asked for."""
    if not traffic.weight:
        return float("-inf")
    decays = (now - traffic.at) / policy.half_life_s
    return log2(traffic.weight) - decays - (now - traffic.used) / policy.recency_s


def cold(policy: Policy, traffic: Traffic, now: float) -> bool:
    """Whether it has been idle for too long to be kept."""
    return now - traffic.used >= policy.idle_after_s


def keep(
    policy: Policy,
    kept: Iterable[Key],
    candidates: Iterable[Key],
    traffic: Mapping[Key, Traffic],
    quota: int,
    now: float,
) -> frozenset[Key]:
    """The most asked for, who stay.

    Args:
        policy: see there.
        kept: those that stayed so far.
        candidates: those that may stay now; who of `kept` is not among them does not.
        traffic: of all of them; one that is missing was never asked for.
        quota: how many may stay.
        now: in seconds.
    """
    warm = {
        key: weight(policy, traffic[key], now)
        for key in candidates
        if key in traffic and not cold(policy, traffic[key], now)
    }
    staying = sorted((key for key in kept if key in warm), key=lambda key: -warm[key])[:quota]
    others = sorted((key for key in warm if key not in staying), key=lambda key: -warm[key])
    while others and len(staying) < quota:
        staying.append(others.pop(0))
    while others and staying:
        new, old = others.pop(0), min(staying, key=lambda key: warm[key])
        noise = sqrt((warm[new] + warm[old]) / 2.0)
        if warm[new] - warm[old] <= policy.hysteresis * noise:
            break
        staying[staying.index(old)] = new
    return frozenset(staying)
