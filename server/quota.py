"""What each tenant may have at a time and in a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from server.auth import Identity

_MINUTE_S = 60.0


class QuotaSpent(Exception):
    """A tenant has had what it may; `retry_after_s` says when to come again."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(f"{why}; try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


@dataclass
class _Had:
    """Tokens that were had and have not worn off, as of a time."""

    tokens: float = 0.0
    at: float = 0.0


class Quotas:
    """Counts by tenant. It belongs to one thread.

    Requests count together for all of a tenant; tokens for those of its callers that have the same
    limit: one that has none, or another, neither uses theirs up nor keeps them from wearing off.
    They are those of prompts and what answers may have at most, counted when a request comes; what
    an answer did not use is given back at its end. They wear off evenly, so that a tenant can have
    a minute's worth at once and then as many as come back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes a clock in seconds."""
        self._clock = clock
        self._running: dict[str, int] = {}
        self._had: dict[tuple[str, int], _Had] = {}

    @contextmanager
    def running(self, identity: Identity) -> Iterator[None]:
        """A request of a tenant is under way during the block.

        Raises:
            QuotaSpent: it has as many as it may.
        """
        tenant, most = identity.tenant, identity.most_requests
        under_way = self._running.get(tenant, 0)
        if most is not None and under_way >= most:
            text = f"{most} requests of this tenant are under way, which is its limit"
            raise QuotaSpent(text, 1.0)
        self._running[tenant] = under_way + 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._forget(identity)

    @contextmanager
    def spending(
        self, identity: Identity, prompt: int, answers: int, used: Callable[[], int]
    ) -> Iterator[None]:
        """A request of a tenant takes so many tokens of a prompt, and so many of answers at most.

        Args:
            used: how many its answers had, asked at the end of the block.

        Raises:
            QuotaSpent: they are more than the tenant has left.
        """
        most = identity.tokens_per_minute
        if most is None:
            yield
            return
        tokens = prompt + answers
        use = self._had.setdefault((identity.tenant, most), _Had(at=self._clock()))
        had = self._worn(use, most)
        # What alone passes a minute's worth is let in where nothing else was had.
        if had > 0 and had + tokens > most:
            wait_s = min(had, had + tokens - most) * _MINUTE_S / most
            text = f"this tenant has had {had:.0f} of its {most} tokens a minute"
            raise QuotaSpent(f"{text}, and this request takes {tokens}", max(wait_s, 0.1))
        use.tokens = had + tokens
        try:
            yield
        finally:
            use.tokens = max(0.0, self._worn(use, most) - (answers - used()))

    def _forget(self, identity: Identity) -> None:
        """Drops what has worn off."""
        most = identity.tokens_per_minute
        use = None if most is None else self._had.get((identity.tenant, most))
        if use is not None and most is not None and self._worn(use, most) <= 0:
            del self._had[identity.tenant, most]

    def _worn(self, use: _Had, most: int) -> float:
        now = self._clock()
        use.tokens = max(0.0, use.tokens - most / _MINUTE_S * (now - use.at))
        use.at = now
        return use.tokens
