"""Pages: any order of takes, shares, returns and keeps; and the keys of what they hold."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zen_jax import prefix_cache
from zen_jax.pages import NO_PAGE, PagePool

SIZE = 12


class Pools(RuleBasedStateMachine):
    """Sequences of pages come, share their beginnings, and go.

    The model: each sequence's pages, and which pages have which key, in the order of their use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(SIZE)
        self.sequences: list[tuple[bytes, list[int]]] = []
        self.keys: dict[bytes, int] = {}
        self.idle: list[int] = []
        self.names = 0

    def held(self) -> Counter[int]:
        return Counter(page for _, pages in self.sequences for page in pages if page != NO_PAGE)

    @rule(count=st.integers(0, SIZE + 2))
    def take(self, count: int) -> None:
        before, held = self.pool.copy(), self.held()
        pages = self.pool.take(count)
        if count > SIZE - len(held):
            assert pages is None and self.pool == before, "all or nothing"
            return
        assert pages is not None and len(set(pages)) == count
        assert not set(pages) & set(held), "a page that somebody holds was given away"
        lost = max(0, count - (SIZE - len(held) - len(self.idle)))
        gone, self.idle = self.idle[:lost], self.idle[lost:]
        assert set(gone) <= set(pages), "what was used longest ago is forgotten first"
        self.keys = {key: page for key, page in self.keys.items() if page not in gone}
        self.names += 1
        self.sequences.append((b"s%d" % self.names, list(pages)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        name, pages = data.draw(st.sampled_from(self.sequences))
        for i, page in enumerate(pages):
            key = next((k for k, p in self.keys.items() if p == page), b"%s:%d" % (name, i))
            if page != NO_PAGE:
                self.pool.keep(key, page)
                self.keys.setdefault(key, page)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        """A sequence begins as one before it did, with as much as is there."""
        number = data.draw(st.integers(1, self.names))
        window = data.draw(st.none() | st.integers(1, 3))
        keys = [b"s%d:%d" % (number, i) for i in range(SIZE)]
        first = None if window is None else [max(0, n - window) for n in range(1, SIZE + 1)]
        found = self.pool.find(keys, first)
        there = [key in self.keys for key in keys]
        for length in range(len(found) + 1, SIZE + 1):
            needed = range(0 if first is None else first[length - 1], length)
            assert not all(there[i] for i in needed), "a longer beginning is there"
        start = 0 if first is None or not found else first[len(found) - 1]
        assert list(found[:start]) == [NO_PAGE] * start
        assert list(found[start:]) == [self.keys[key] for key in keys[start : len(found)]]
        if found:
            shared = [page for page in found if page != NO_PAGE]
            self.pool.share(shared)
            self.idle = [page for page in self.idle if page not in shared]
            self.sequences.append((b"s%d" % number, list(found)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.sequences) - 1))
        name, pages = self.sequences[place]
        part = data.draw(st.integers(0, len(pages)))
        self.pool.give_back(pages[:part])
        left = [NO_PAGE] * part + pages[part:]
        self.sequences[place] = (name, left)
        if part == len(pages):
            del self.sequences[place]
        held = self.held()
        kept = set(self.keys.values())
        self.idle += [p for p in reversed(pages[:part]) if p in kept and not held[p]]

    @precondition(lambda self: self.sequences)
    @rule()
    def nonsense_is_refused(self) -> None:
        before = self.pool.copy()
        free = set(range(SIZE)) - set(self.held())
        for page in free:
            with pytest.raises(ValueError, match="nobody"):
                self.pool.give_back([page])
            with pytest.raises(ValueError, match="nobody"):
                self.pool.keep(b"x", page)
        for page in free - set(self.idle):
            with pytest.raises(ValueError, match="free"):
                self.pool.share([page])
        assert self.pool == before

    @invariant()
    def counts_are_those_of_the_holders(self) -> None:
        held = self.held()
        assert {p: self.pool.holders(p) for p in range(SIZE) if self.pool.holders(p)} == held
        assert self.pool.held == len(held)
        assert self.pool.idle == len(self.idle) == len(set(self.idle))
        assert self.pool.available == SIZE - len(held)

    def teardown(self) -> None:
        for _, pages in self.sequences:
            self.pool.give_back(pages)
        assert self.pool.held == 0 and self.pool.available == SIZE, "a page was left"
        assert self.pool.take(SIZE) is not None and self.pool.idle == 0
        assert self.pool.find([b"s%d:0" % i for i in range(1, self.names + 1)]) == ()


TestPools = Pools.TestCase
TestPools.settings = settings(stateful_step_count=40)


def test_a_copy_is_a_pool_of_its_own() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    assert pages is not None
    copy = pool.copy()
    copy.keep(b"k", pages[0])
    copy.give_back(pages)
    assert (pool.held, copy.held, copy.idle, pool.idle) == (2, 0, 1, 0)
    assert pool.find([b"k"]) == () and copy.find([b"k"]) == (pages[0],)


def test_bad_counts_are_named() -> None:
    with pytest.raises(ValueError, match="there are 0 pages"):
        PagePool(0)
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(2).take(-1)
    pool = PagePool(2)
    pages = pool.take(1)
    assert pages is not None
    pool.keep(b"a", pages[0])
    with pytest.raises(ValueError, match="another key"):
        pool.keep(b"b", pages[0])


def test_keys_name_everything_that_a_page_follows_from() -> None:
    tokens = list(range(40))
    start = prefix_cache.root("t", "v", "b", 8)
    keys = prefix_cache.page_keys(start, tokens, 8)
    assert len(keys) == len(set(keys)) == 5 and all(len(key) == 32 for key in keys)
    assert prefix_cache.page_keys(start, tokens[:39], 8) == keys[:4], "a page in part has none"
    changed = prefix_cache.page_keys(start, [*tokens[:9], 99, *tokens[10:]], 8)
    assert changed[0] == keys[0] and not set(changed[1:]) & set(keys)
    others = [("u", "v", "b", 8), ("t", "w", "b", 8), ("t", "v", "c", 8), ("t", "v", "b", 4)]
    moved = [("tv", "", "b", 8), ("", "tv", "b", 8), ("t", "vb", "", 8)]
    roots = {prefix_cache.root(*parts) for parts in [("t", "v", "b", 8), *others, *moved]}
    assert len(roots) == 8, "no part runs over into the next"
    for parts in [*others, *moved]:
        again = prefix_cache.page_keys(prefix_cache.root(*parts), tokens, 8)
        assert not set(again) & set(keys)


def test_keys_are_those_of_any_process() -> None:
    """Two servers that share a cache some day agree: no hash of Python's own, no byte order."""
    (key,) = prefix_cache.page_keys(prefix_cache.root("", "", "base", 2), [1, 70000], 2)
    assert key.hex() == ("4f8cbcbdc8728bd50870de41b4213b22950adfc5fd082e3f0fe5e0655dbd977a")
