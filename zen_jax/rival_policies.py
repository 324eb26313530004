"""Other policies of caches, simulated: what the delta cache's is measured against.

Each is a small object with `ask(key) -> whether it was in the cache`. All of them must take in what
is asked for, as a server must: none may leave it out. The one that knows the future is `belady`.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

Key = Hashable


class Rival(Protocol):
    """A cache of a number of keys."""

    def ask(self, key: Key) -> bool:
        """Whether the key was there; it is there afterwards."""
        ...


class Lru:
    """Least recently used."""

    def __init__(self, slots: int) -> None:
        self._slots, self._held = slots, OrderedDict[Key, None]()

    def ask(self, key: Key) -> bool:
        hit = key in self._held
        if not hit and len(self._held) == self._slots:
            self._held.popitem(last=False)
        self._held[key] = None
        self._held.move_to_end(key)
        return hit


class Lfu:
    """Least frequently used: counts are kept for ever, of keys that left too."""

    def __init__(self, slots: int) -> None:
        self._slots, self._held, self._time = slots, set[Key](), 0
        self._counts, self._last = Counter[Key](), dict[Key, int]()

    def ask(self, key: Key) -> bool:
        self._time += 1
        self._counts[key] += 1
        self._last[key] = self._time
        hit = key in self._held
        if not hit and len(self._held) == self._slots:
            self._held.remove(min(self._held, key=lambda k: (self._counts[k], self._last[k])))
        self._held.add(key)
        return hit


class LfuDa:
    """LFU with dynamic ageing (Arlitt et al., 2000); with equal sizes GDSF is the same."""

    def __init__(self, slots: int) -> None:
        self._slots, self._age = slots, 0
        self._counts, self._keys, self._time = dict[Key, int](), dict[Key, tuple[int, int]](), 0

    def ask(self, key: Key) -> bool:
        self._time += 1
        hit = key in self._keys
        if not hit and len(self._keys) == self._slots:
            victim = min(self._keys, key=lambda k: self._keys[k])
            self._age = self._keys.pop(victim)[0]
            del self._counts[victim]
        self._counts[key] = self._counts.get(key, 0) + 1
        self._keys[key] = self._counts[key] + self._age, self._time
        return hit


class Arc:
    """Adaptive replacement cache (Megiddo and Modha, 2003)."""

    def __init__(self, slots: int) -> None:
        self._slots, self._aim = slots, 0.0
        self._once, self._often = OrderedDict[Key, None](), OrderedDict[Key, None]()
        self._gone_once, self._gone_often = OrderedDict[Key, None](), OrderedDict[Key, None]()

    def _replace(self, key: Key) -> None:
        many = len(self._once) > self._aim
        if self._once and (many or (key in self._gone_often and len(self._once) == self._aim)):
            victim, _ = self._once.popitem(last=False)
            self._gone_once[victim] = None
        else:
            victim, _ = self._often.popitem(last=False)
            self._gone_often[victim] = None

    def ask(self, key: Key) -> bool:
        if key in self._once or key in self._often:
            self._once.pop(key, None)
            self._often.pop(key, None)
            self._often[key] = None
            return True
        a, b = len(self._gone_once), len(self._gone_often)
        if key in self._gone_once:
            self._aim = min(self._aim + max(b / a, 1.0), self._slots)
            self._replace(key)
            del self._gone_once[key]
            self._often[key] = None
            return False
        if key in self._gone_often:
            self._aim = max(self._aim - max(a / b, 1.0), 0.0)
            self._replace(key)
            del self._gone_often[key]
            self._often[key] = None
            return False
        self._make_room(key)
        self._once[key] = None
        return False

    def _make_room(self, key: Key) -> None:
        recent = len(self._once) + len(self._gone_once)
        total = recent + len(self._often) + len(self._gone_often)
        if recent == self._slots:
            if len(self._once) < self._slots:
                self._gone_once.popitem(last=False)
                self._replace(key)
            else:
                self._once.popitem(last=False)
        elif total >= self._slots:
            if total == 2 * self._slots:
                self._gone_often.popitem(last=False)
            self._replace(key)


class Slru:
    """Segmented LRU: what is asked for again moves into a protected part, 4 of 5 places."""

    def __init__(self, slots: int) -> None:
        self._slots, self._protected = slots, max(1, slots * 4 // 5)
        self.new, self.kept = OrderedDict[Key, None](), OrderedDict[Key, None]()

    def ask(self, key: Key) -> bool:
        if key in self.kept:
            self.kept.move_to_end(key)
            return True
        if key in self.new:
            del self.new[key]
            self.kept[key] = None
            if len(self.kept) > self._protected:
                back, _ = self.kept.popitem(last=False)
                self.new[back] = None
            return True
        if len(self.new) + len(self.kept) == self._slots:
            self.evict()
        self.new[key] = None
        return False

    def victim(self) -> Key:
        """Who would leave next."""
        return next(iter(self.new or self.kept))

    def evict(self) -> Key:
        """Have that one leave."""
        return (self.new or self.kept).popitem(last=False)[0]


class Sieve:
    """SIEVE (Zhang et al., 2024): a queue with a hand that spares what was asked for again."""

    def __init__(self, slots: int) -> None:
        self._slots, self._queue, self._hand = slots, list[Key](), 0
        self._visited = set[Key]()

    def ask(self, key: Key) -> bool:
        if key in self._queue:
            self._visited.add(key)
            return True
        if len(self._queue) == self._slots:
            at = self._hand % self._slots
            while self._queue[at] in self._visited:
                self._visited.remove(self._queue[at])
                at = (at + 1) % self._slots
            del self._queue[at]
            self._hand = at
        self._queue.append(key)
        return False


class WTinyLfu:
    """W-TinyLFU (Einziger et al., 2017) with exact counts: one slot takes newcomers in, who move on
    into an SLRU if they were asked for more often than its victim; counts halve with time."""

    def __init__(self, slots: int) -> None:
        self._window: Key | None = None
        self._room, self._main = slots - 1, Slru(slots - 1)
        self._counts, self._asked, self._sample = Counter[Key](), 0, 20 * slots

    def ask(self, key: Key) -> bool:
        self._counts[key] += 1
        self._asked += 1
        if self._asked == self._sample:
            self._asked //= 2
            self._counts = Counter({k: n // 2 for k, n in self._counts.items() if n > 1})
        if key in self._main.new or key in self._main.kept:
            return self._main.ask(key)
        if key == self._window:
            return True
        leaves, self._window = self._window, key
        if leaves is not None:
            full = len(self._main.new) + len(self._main.kept) == self._room
            if full and self._counts[leaves] <= self._counts[self._main.victim()]:
                return False
            self._main.ask(leaves)
        return False


RIVALS: dict[str, Callable[[int], Rival]] = {
    "LRU": Lru,
    "LFU": Lfu,
    "LFU-DA": LfuDa,
    "ARC": Arc,
    "SLRU": Slru,
    "SIEVE": Sieve,
    "W-TinyLFU": WTinyLfu,
}


def hit_rate(rival: Rival, keys: Sequence[Key]) -> float:
    """The share of requests whose key was there."""
    return sum(rival.ask(key) for key in keys) / len(keys)


def belady(slots: int, keys: Sequence[Key]) -> float:
    """The hit rate of who knows the future: the one leaves that is asked for last (Belady, 1966).
    No cache that takes in all that is asked for has a higher one."""
    following, next_at = dict[Key, int](), [0] * len(keys)
    for i in range(len(keys) - 1, -1, -1):
        next_at[i] = following.get(keys[i], len(keys) + i)
        following[keys[i]] = i
    held, hits = dict[Key, int](), 0
    for i, key in enumerate(keys):
        hits += key in held
        if key not in held and len(held) == slots:
            del held[max(held, key=lambda k: held[k])]
        held[key] = next_at[i]
    return hits / len(keys)
