"""What requests hold of the cache: pages taken before they are needed, shared, and given back.

Everything is decided by counts and keys, in `zen_jax.pages`; this says which pages a request's way
through the scheduler needs. A page is kept for others once tokens that were made after it have been
read: what was aborted or failed on its way is never found. The device carries calls out in their
order, so a page that is given back may be written by a call that is launched later.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from server.jobs import Job, SchedulerConfig
from zen_jax import prefix_cache
from zen_jax.pages import NO_PAGE, PagePool


class Holdings:
    """The pages of one plan: those of the state before it until something changes."""

    def __init__(self, pool: PagePool, config: SchedulerConfig) -> None:
        """Takes the state's pool, which is left as it is."""
        self.pool = pool
        self._before = pool
        self._config = config

    def _change(self) -> PagePool:
        if self.pool is self._before:
            self.pool = self._before.copy()
        return self.pool

    # Where positions lie.

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self._config.page_size)

    def _first(self, position: int) -> int:
        """The first page that a token at a position, or one after it, still looks at."""
        reach = self._config.reach
        return 0 if reach is None else max(0, position + 1 - reach) // self._config.page_size

    def _wanted(self, job: Job, start: int) -> int:
        """Positions that are reserved when a request gets its row: all that it has to read, or with
        a window what the first call reads."""
        whole = len(job.request.token_ids)
        if self._config.reach is None:
            return whole
        return min(whole, start + max(length for _, length in self._config.shapes))

    # Prefixes.

    def named(self, job: Job) -> Job:
        """A request with the keys of its prompt's whole pages.

        What it generates has none: a decode step sums in another way than the reading of a prompt,
        so an answer would depend on which of the two had made the pages that it found.
        """
        config, request = self._config, job.request
        if job.keys or not config.share_prefixes or request.sampling.prompt_logprobs is not None:
            return job
        size, tokens = config.page_size, request.token_ids
        digest = "" if request.variant is None else request.variant.digest
        root = prefix_cache.root(request.tenant, digest, config.base, size)
        return replace(job, keys=prefix_cache.page_keys(root, tokens, size))

    def found(self, job: Job) -> tuple[int, ...]:
        """The pages that a request can begin with; one token at least is left to be read."""
        tokens = len(job.request.token_ids)
        keys = job.keys[: (tokens - 1) // self._config.page_size]
        if self._config.reach is None:
            return self.pool.find(keys)
        size = self._config.page_size
        return self.pool.find(keys, [self._first(n * size) for n in range(1, len(keys) + 1)])

    def awaits(self, job: Job, others: Iterable[Job]) -> bool:
        """Whether half of what a request would read, or more, is just being read by another."""
        size, keys = self._config.page_size, job.keys
        there = len(self.found(job)) if keys else 0
        left = len(job.request.token_ids) - there * size
        for other in others:
            if other.kept == len(other.keys) or there >= len(keys):
                continue
            same = there
            while same < min(len(keys), len(other.keys)) and keys[same] == other.keys[same]:
                same += 1
            if 2 * (same - there) * size >= left:
                return True
        return False

    # A request's way.

    def fits(self, job: Job, losing: Iterable[Job], going_on: Iterable[Job]) -> bool:
        """Whether there are pages for a request to get a row.

        Args:
          job: without a row.
          losing: who gives its pages back first.
          going_on: who is left a page each, if it may want one.
        """
        found = self.found(job)
        idle = sum(page != NO_PAGE and not self.pool.holders(page) for page in found)
        start = len(found) * self._config.page_size
        new = self._pages_for(self._wanted(job, start)) - len(found)
        wanted = {page for page in found if page != NO_PAGE}
        freed = sum(self._freed(other.pages, wanted) for other in losing)
        spare = sum(
            self._pages_for(len(other.request.token_ids) + other.arrived.limit) > len(other.pages)
            for other in going_on
        )
        return new + spare <= self.pool.available - idle + freed

    def _freed(self, pages: Iterable[int], wanted: set[int]) -> int:
        """How many of these pages come free when they are given back, but for those wanted."""
        return sum(
            page != NO_PAGE and page not in wanted and self.pool.holders(page) == 1
            for page in pages
        )

    def admit(self, job: Job) -> Job:
        """A request with the pages that it begins with, of which there are enough, see `fits`."""
        pool, found = self._change(), self.found(job)
        pool.share(page for page in found if page != NO_PAGE)
        size = self._config.page_size
        start = len(found) * size
        new = pool.take(self._pages_for(self._wanted(job, start)) - len(found))
        assert new is not None, "fits() said that there are enough"
        return replace(
            job,
            pages=found + new,
            kept=len(found),
            before=start,
            cached=job.cached if job.turn else min(start, len(job.request.token_ids)),
            unread=job.request.token_ids[start:],
        )

    def grow(self, job: Job, position: int, end: int) -> Job | None:
        """A request with pages for what a call writes; those that it looks past are given back.

        Args:
          job: with a row.
          position: of the first token of the call.
          end: positions that the row has after it.

        Returns:
          None where there are too few pages; then nothing has changed.
        """
        first, pages = self._first(position), job.pages
        behind = [page for page in pages[:first] if page != NO_PAGE]
        more = self._pages_for(end) - len(pages)
        if not behind and more <= 0:
            return job
        if more > self.pool.available + self._freed(behind, set()):
            return None
        pool = self._change()
        pool.give_back(behind)
        new = pool.take(max(0, more))
        assert new is not None
        return replace(job, pages=(NO_PAGE,) * first + pages[first:] + new)

    def confirm(self, job: Job) -> Job:
        """A request whose prompt was read, since a token after it was: its whole pages are kept for
        others."""
        count = len(job.keys)
        if count <= job.kept or not job.pages:
            return job
        for key, page in zip(job.keys[job.kept : count], job.pages[job.kept : count], strict=True):
            if page != NO_PAGE:
                self._change().keep(key, page)
        return replace(job, kept=count)

    def release(self, job: Job) -> Job:
        """A request without pages."""
        if job.pages:
            self._change().give_back(job.pages)
        return replace(job, pages=(), kept=0)
