"""The delta cache's policy under simulated traffic, beside other policies and the best possible.

The traffic is a Poisson stream of requests whose variants follow a Zipf law, steady or with an
order of popularity that is drawn anew at times. It is put to the real table, transition by
transition, in virtual time; the others see the same requests. A hit is a request that is granted a
slot at once. What requests wait for is simulated apart, with loads that take time and leases that
last (`waits`).
"""

import bisect
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from zen_jax.checkpoint.manifest import Variant
from zen_jax.delta_cache import DeltaCache, Step
from zen_jax.eviction import Policy
from zen_jax.residency import CacheConfig, Grant, Refuse, StartLoad, StartPut, WriteSlot
from zen_jax.rival_policies import RIVALS, belady, hit_rate

# What is worked on, how many steps are done, how many there are.
Progress = Callable[[str, int, int], None]

SIZES = ((8, 14), (10, 14), (20, 100))
EXPONENTS = (0.8, 1.0, 1.2)
# Requests a second, and after how many seconds popularity shifts; see docs/cache.md.
RATE, SHIFT_S = 4.0, 1800.0
REQUESTS = 20_000
HOT = 6
# Half-lives until rates have settled: what is loaded before is the start.
_SETTLED = 3.0


@dataclass(frozen=True)
class Traffic:
    """A stream of requests.

    Attributes:
      exponent: of the Zipf law: the k-th variant is asked for in proportion to k ** -exponent.
      shift_s: after so many seconds each, which variant is the k-th is drawn anew; None: never.
      variants: how many there are.
      rate: requests a second.
      seed: of all that is drawn.
    """

    exponent: float
    shift_s: float | None
    variants: int
    rate: float = RATE
    seed: int = 1

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"zipf {self.exponent:g}, {'steady' if self.shift_s is None else 'shifting'}"

    def requests(self, count: int) -> list[tuple[float, int]]:
        """So many requests: when, and for which variant."""
        draw = random.Random(self.seed)
        shares = list(accumulate((k + 1) ** -self.exponent for k in range(self.variants)))
        order = list(range(self.variants))
        draw.shuffle(order)
        now, shift_at = 0.0, self.shift_s
        made: list[tuple[float, int]] = []
        for _ in range(count):
            now += draw.expovariate(self.rate)
            if shift_at is not None and self.shift_s is not None and now >= shift_at:
                shift_at += self.shift_s
                draw.shuffle(order)
            made.append((now, order[bisect.bisect(shares, draw.random() * shares[-1])]))
        return made


@dataclass(frozen=True)
class CacheCase:
    """One kind of traffic on one size. All but the first three are hit rates.

    Attributes:
      traffic: its name.
      slots: of the bank.
      variants: that are asked for.
      hit_rate: of the delta cache.
      lru: of the least recently used.
      lfu: of the least frequently used.
      best_online: the highest of all policies that do not know the future; `rival` is its name.
      belady: the highest that can be.
      rival: see there; not in the JSON.
      hot_reloads: how often one of the six most popular was loaded again once rates had settled,
        None where popularity shifts; not in the JSON.
    """

    traffic: str
    slots: int
    variants: int
    hit_rate: float
    lru: float
    lfu: float
    best_online: float
    belady: float
    rival: str
    hot_reloads: int | None

    def figures(self) -> dict[str, Any]:
        """What stands in the JSON."""
        hidden = ("rival", "hot_reloads")
        return {name: value for name, value in asdict(self).items() if name not in hidden}


class Simulated:
    """The real table, whose loads and writes end at once, and which remembers what it loaded."""

    def __init__(self, slots: int, variants: int, policy: Policy) -> None:
        self.cache = DeltaCache(CacheConfig(slots=slots, policy=policy))
        self.names = [Variant(f"v{i}", 1, f"d{i}", Path("/")) for i in range(variants)]
        self.now = 0.0
        self.misses: list[tuple[float, str]] = []

    def ask(self, holder: int, variant: int, now: float) -> bool:
        """A request that is over at once; whether its variant was there."""
        self.now = now
        misses = len(self.misses)
        self._do(self.cache.request(holder, self.names[variant], now))
        self._do(self.cache.release(holder, now))
        return len(self.misses) == misses

    def _do(self, step: Step) -> None:
        self.cache, actions = step
        for action in actions:
            match action:
                case StartLoad(variant, attempt):
                    self._do(self.cache.fetched(variant.digest, attempt, 0, self.now))
                case StartPut(variant, attempt):
                    self.misses.append((self.now, variant.digest))
                    self._do(self.cache.loaded(variant.digest, attempt, 0, self.now))
                case WriteSlot(variant, _, attempt):
                    self._do(self.cache.committed(variant.digest, attempt, self.now))
                case _:
                    pass


def simulate(traffic: Traffic, slots: int, requests: int, policy: Policy) -> CacheCase:
    """One case.

    Args:
      traffic: what is asked for.
      slots: of the bank.
      requests: how many.
      policy: of the delta cache.
    """
    asked = traffic.requests(requests)
    keys = [variant for _, variant in asked]
    table = Simulated(slots, traffic.variants, policy)
    hits = sum(table.ask(i, variant, now) for i, (now, variant) in enumerate(asked))
    rates = {name: hit_rate(make(slots), keys) for name, make in RIVALS.items()}
    rival = max(rates, key=lambda name: rates[name])
    reloads = None
    if traffic.shift_s is None:
        hot = {f"d{key}" for key, _ in Counter(keys).most_common(HOT)}
        settled = _SETTLED * policy.half_life_s
        reloads = sum(at > settled and digest in hot for at, digest in table.misses)
    return CacheCase(
        traffic=traffic.name,
        slots=slots,
        variants=traffic.variants,
        hit_rate=hits / requests,
        lru=rates["LRU"],
        lfu=rates["LFU"],
        best_online=rates[rival],
        belady=belady(slots, keys),
        rival=rival,
        hot_reloads=reloads,
    )


def bench_cache(
    requests: int = REQUESTS,
    policy: Policy | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    exponents: Sequence[float] = EXPONENTS,
    progress: Progress | None = None,
) -> list[CacheCase]:
    """Every size with every kind of traffic.

    Args:
      requests: of each case, at least 1.
      policy: of the delta cache; None takes the server's.
      sizes: slots and variants.
      exponents: of the Zipf laws.
      progress: told the case, how many are done and how many there are.

    Raises:
      ValueError: a number is out of range.
    """
    if requests < 1:
        raise ValueError(f"requests is {requests}; expected at least 1")
    plans = [
        (Traffic(exponent, shift_s, variants), slots)
        for slots, variants in sizes
        for exponent in exponents
        for shift_s in (None, SHIFT_S)
    ]
    cases: list[CacheCase] = []
    for i, (traffic, slots) in enumerate(plans):
        if progress is not None:
            progress(f"{traffic.name}, {traffic.variants} on {slots}", i, len(plans))
        cases.append(simulate(traffic, slots, requests, policy or Policy()))
    return cases


@dataclass(frozen=True)
class Waits:
    """What requests wait for a slot, in seconds.

    Attributes:
      policy: what it is called.
      p50, p99, longest: of all requests.
      loads: variants brought into the bank.
      refused: requests that were told to come again.
    """

    policy: str
    p50: float
    p99: float
    longest: float
    loads: int
    refused: int


def waits(
    name: str, policy: Policy, *, slots: int = 8, load_s: float = 0.5, hold_s: float = 2.0
) -> Waits:
    """More variants than slots, with loads that take time and leases that last.

    Args:
      name: what the policy is called.
      policy: of the delta cache.
      slots: for 14 variants, asked for by a Zipf law of exponent 1, twice a second.
      load_s: what a load takes.
      hold_s: what a lease lasts on average; they are drawn from an exponential distribution.
    """
    asked = Traffic(1.0, None, 14, rate=2.0).requests(4000)
    world = _Timed(slots, policy, load_s, hold_s)
    for i, (now, variant) in enumerate(asked):
        world.until(now)
        world.ask(i, variant)
    world.until(asked[-1][0] + 600.0)
    spent = sorted(world.waited)
    at = lambda share: spent[min(int(share * len(spent)), len(spent) - 1)]  # noqa: E731
    return Waits(name, at(0.5), at(0.99), spent[-1], world.loads, world.refused)


class _Timed:
    """The real table in virtual time."""

    def __init__(self, slots: int, policy: Policy, load_s: float, hold_s: float) -> None:
        self.cache = DeltaCache(CacheConfig(slots=slots, policy=policy))
        self.variants = [Variant(f"v{i}", 1, f"d{i}", Path("/")) for i in range(14)]
        self.load_s, self.hold_s, self.draw = load_s, hold_s, random.Random(2)
        self.now, self.count, self.loads, self.refused = 0.0, 0, 0, 0
        self.due: list[tuple[float, int, Callable[[], Step]]] = []
        self.asked_at: dict[int, float] = {}
        self.waited: list[float] = []

    def ask(self, holder: int, variant: int) -> None:
        self.asked_at[holder] = self.now
        self._do(self.cache.request(holder, self.variants[variant], self.now))

    def until(self, now: float) -> None:
        """Let everything happen that is due by then."""
        while True:
            at = min(self.due[0][0] if self.due else now, self.cache.wake_at)
            if at > now or (not self.due and self.cache.wake_at > now):
                break
            self.now = max(at, self.now)
            if self.due and self.due[0][0] <= self.now:
                self._do(heapq.heappop(self.due)[2]())
            else:
                self._do(self.cache.tick(self.now))
        self.now = now

    def _later(self, seconds: float, what: Callable[[], Step]) -> None:
        self.count += 1
        heapq.heappush(self.due, (self.now + seconds, self.count, what))

    def _do(self, step: Step) -> None:
        self.cache, actions = step
        for action in actions:
            match action:
                case StartLoad(variant, attempt):
                    self._do(self.cache.fetched(variant.digest, attempt, 0, self.now))
                case StartPut(variant, attempt):
                    self.loads += 1
                    which = variant.digest, attempt
                    self._later(self.load_s, lambda w=which: self.cache.loaded(*w, 0, self.now))
                case WriteSlot(variant, _, attempt):
                    self._do(self.cache.committed(variant.digest, attempt, self.now))
                case Grant(holder, _):
                    self.waited.append(self.now - self.asked_at.pop(holder))
                    lasts = self.draw.expovariate(1 / self.hold_s)
                    self._later(lasts, lambda h=holder: self.cache.release(h, self.now))
                case Refuse():
                    self.refused += 1
                case _:
                    pass


def all_waits(policy: Policy) -> list[Waits]:
    """Of a policy, of it with fewer that stay, and of plain LRU in the same table."""
    return [
        waits(f"{policy.pinned} kept", policy),
        waits("3 kept", replace(policy, pinned=3)),
        waits("none kept", replace(policy, pinned=0)),
        waits("plain LRU", replace(policy, pinned=0, recency_s=1e-3)),
    ]


def sensitivity(
    half_lives: Sequence[float] = (60.0, 300.0, 1800.0),
    shifts: Sequence[float] = (600.0, 1800.0, 7200.0),
    requests: int = REQUESTS,
) -> Iterator[tuple[float, float, float]]:
    """How much the half-life matters: it, the time between shifts, and the hit rate over that of
    the best other online policy, for 100 variants on 20 slots, exponent 1."""
    for half_life in half_lives:
        for shift_s in shifts:
            policy = Policy(half_life_s=half_life, recency_s=half_life)
            case = simulate(Traffic(1.0, shift_s, 100), 20, requests, policy)
            yield half_life, shift_s, case.hit_rate / case.best_online
