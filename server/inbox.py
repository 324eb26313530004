"""The one way into the worker: a bounded queue of requests, and of everything else that happens.

The bound counts requests that have no row yet, whether they still lie here or already in the
scheduler's queues, so that there is no second queue behind it that grows. Cancellations, loads
and operators' calls are never refused: each belongs to something that was accepted.
"""

from __future__ import annotations

import threading

from server.events import Arrived, Event
from server.requests import Draining, InboxFull


class Inbox:
    """Events for the worker's thread, from any thread.

    Attributes:
        limit: requests that may wait for a row.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"the inbox's limit is {limit}, expected at least 1")
        self.limit = limit
        self._events: list[Event] = []
        self._waiting = 0
        self._closed: str | None = None
        self._changed = threading.Condition()
        self._woken = False

    @property
    def waiting(self) -> int:
        """Requests that were accepted and have no row yet."""
        return self._waiting

    def put_request(self, arrived: Arrived, retry_after_s: float) -> None:
        """Accept a request; raises InboxFull with the time given, or Draining."""
        with self._changed:
            if self._closed is not None:
                raise Draining(self._closed)
            if self._waiting >= self.limit:
                raise InboxFull(self.limit, retry_after_s)
            self._waiting += 1
            self._put(arrived)

    def put(self, event: Event) -> None:
        """Add anything but a request."""
        with self._changed:
            self._put(event)

    def settle(self, requests: int) -> None:
        """Note that so many requests wait no longer: they have a row, or have ended."""
        with self._changed:
            self._waiting -= requests

    def take(self, timeout_s: float | None) -> list[Event]:
        """All events there are, in order; waits up to `timeout_s` (None: for ever) for one."""
        with self._changed:
            if timeout_s is None or timeout_s > 0:
                self._changed.wait_for(lambda: self._events or self._woken, timeout_s)
            self._woken = False
            events, self._events = self._events, []
            return events

    def wake(self) -> None:
        """Make `take` return, if only with nothing."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self, reason: str) -> None:
        """Refuse requests from now on; the first reason given stands."""
        with self._changed:
            self._closed = self._closed or reason

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._changed.notify()
