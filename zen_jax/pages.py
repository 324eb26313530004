"""Which pages of the cache are whose: counted references, and pages kept for prompts to come.

A page is free, held, or idle: nobody holds it, and what it has is kept under a key until its place
is needed. Pages that are never shared have one holder. Pure Python without arrays: the scheduler
decides over it, on a copy of its own.
"""

from collections.abc import Iterable, Sequence

# A place of a row's table where the row holds no page any more, or none yet.
NO_PAGE = -1


class PagePool:
    """All pages of a cache.

    A pool that has become part of a state is not changed any more: change a `copy`.

    Attributes:
      size: how many pages there are.
    """

    def __init__(self, size: int) -> None:
        """All pages are free.

        Raises:
          ValueError: there is not one page.
        """
        if size < 1:
            raise ValueError(f"there are {size} pages; expected at least 1")
        self.size = size
        # Pages from here on were never used; so a pool costs what is used of it.
        self._fresh = 0
        self._free: list[int] = []
        self._holders: dict[int, int] = {}
        self._keys: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # The longest unused first.
        self._idle: dict[int, None] = {}

    def copy(self) -> "PagePool":
        """The same again, to be changed."""
        new = PagePool(self.size)
        new._fresh = self._fresh
        new._free = self._free.copy()
        new._holders = self._holders.copy()
        new._keys = self._keys.copy()
        new._key_of = self._key_of.copy()
        new._idle = self._idle.copy()
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagePool) and vars(self) == vars(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones and idle ones."""
        return self.size - len(self._holders)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Pages that are kept though nobody holds them."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders.get(page, 0)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Pages for one holder, free ones first, then idle ones, the longest unused first.

        Returns:
          So many pages, what they had forgotten; None, and nothing changed, where there are fewer.

        Raises:
          ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"{count} pages were asked for; expected 0 or more")
        if count > self.available:
            return None
        pages = tuple(self._one() for _ in range(count))
        for page in pages:
            self._holders[page] = 1
        return pages

    def _one(self) -> int:
        if self._free:
            return self._free.pop()
        if self._fresh < self.size:
            self._fresh += 1
            return self._fresh - 1
        page = next(iter(self._idle))
        del self._idle[page]
        del self._keys[self._key_of.pop(page)]
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these, which are held or idle.

        Raises:
          ValueError: a page is neither.
        """
        for page in pages:
            if page in self._idle:
                del self._idle[page]
            elif page not in self._holders:
                raise ValueError(f"page {page} is free; only held and kept ones can be shared")
            self._holders[page] = self._holders.get(page, 0) + 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less for each. What nobody holds then is idle if it has a key, else free.

        Of a sequence's pages the last are forgotten first: without the first they are of no use.

        Args:
          pages: in the order of their positions; `NO_PAGE` among them is skipped.

        Raises:
          ValueError: a page is held by nobody.
        """
        for page in reversed(list(pages)):
            if page == NO_PAGE:
                continue
            left = self._holders.get(page, 0) - 1
            if left < 0:
                raise ValueError(f"page {page} was given back, but nobody holds it")
            if left:
                self._holders[page] = left
                continue
            del self._holders[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, key: bytes, page: int) -> None:
        """From now on a page is found under a key. Nothing happens where another is already.

        Args:
          key: of what the page holds, whole and never changed from now on.
          page: held by somebody.

        Raises:
          ValueError: nobody holds the page, or it has another key.
        """
        if page not in self._holders:
            raise ValueError(f"page {page} is held by nobody; keep it before it is given back")
        if self._key_of.get(page, key) != key:
            raise ValueError(f"page {page} has another key; what a page holds does not change")
        if key not in self._keys:
            self._keys[key] = page
            self._key_of[page] = key

    def find(self, keys: Sequence[bytes], first: Sequence[int] | None = None) -> tuple[int, ...]:
        """The longest beginning of a sequence that is there.

        Args:
          keys: of a sequence's pages, from its beginning.
          first: for each length n = 1, 2 ... of a beginning, the first page of it that is needed;
            None: all are.

        Returns:
          The beginning's pages, `NO_PAGE` for those that are not needed; nobody holds them more
          than before. Empty if there is no beginning.
        """
        there = [self._keys.get(key, NO_PAGE) for key in keys]
        best = run = 0
        for i, page in enumerate(there):
            run = run + 1 if page != NO_PAGE else 0
            needed = i + 1 - (first[i] if first is not None else 0)
            if run and run >= needed:
                best = i + 1
        if not best:
            return ()
        start = first[best - 1] if first is not None else 0
        return (NO_PAGE,) * start + tuple(there[start:best])
