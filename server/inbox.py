"""The one way into the worker: a bounded queue of requests, and of everything else that happens.

The bounds count requests that have no row yet, whether their text is still being tokenized, or they
lie here, or in the scheduler's queues already, so that there is no other queue that grows.
Cancellations, loads and operators' calls are never refused: each belongs to something that was
accepted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from server.events import Arrived, Event
from server.requests import Draining, InboxFull, Request
from zen_jax.checkpoint.manifest import BASE


@dataclass(frozen=True, slots=True)
class InboxLimits:
    """How much may wait for a row.

    Attributes:
        requests: of all models together.
        tokens: of their prompts. A prompt is taken whatever its length where none waits.
        per_model: requests for one model, the base or a variant in all its versions.

    Raises:
        ValueError: a limit below 1.
    """

    requests: int = 64
    tokens: float = inf
    per_model: float = inf

    def __post_init__(self) -> None:
        for name in ("requests", "tokens", "per_model"):
            value = getattr(self, name)
            if not value >= 1:
                raise ValueError(f"the inbox's limit of {name} is {value}, expected at least 1")

    @property
    def samples(self) -> float:
        """Requests for one model that may wait together."""
        return min(self.requests, self.per_model)


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that wait, counted.

    Attributes:
        requests: how many.
        tokens: of their prompts.
        models: how many by the name of the model.
    """

    requests: int = 0
    tokens: int = 0
    models: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Queue:
        """Counts some."""
        queue = cls()
        for request in requests:
            queue = queue + request
        return queue

    def __add__(self, request: Request) -> Queue:
        name = model_name(request)
        return Queue(
            self.requests + 1,
            self.tokens + len(request.token_ids),
            {**self.models, name: self.models.get(name, 0) + 1},
        )


def model_name(request: Request) -> str:
    """What the request's model is called."""
    return BASE if request.variant is None else request.variant.name


class Inbox:
    """Events for the worker's thread, from any thread.

    Attributes:
        limits: on what may wait for a row.
    """

    def __init__(self, limits: InboxLimits) -> None:
        self.limits = limits
        self._events: list[Event] = []
        self._reserved = 0
        self._here = self._taken = self._planned = Queue()
        self._closed: str | None = None
        self._changed = threading.Condition()
        self._woken = False

    @property
    def waiting(self) -> int:
        """Requests that were accepted and have no row yet."""
        return self._here.requests + self._taken.requests + self._planned.requests

    @property
    def waiting_tokens(self) -> int:
        """Of their prompts."""
        return self._here.tokens + self._taken.tokens + self._planned.tokens

    @contextmanager
    def reserved(self, retry_after_s: float) -> Iterator[None]:
        """Holds a place for a request while it is made ready; raises as `put_request` does.

        The place is free again at the end of the block, for the request itself to take.
        """
        with self._changed:
            self._check_open()
            if self.waiting + self._reserved >= self.limits.requests:
                raise InboxFull(self._too_many(self.limits.requests, ""), retry_after_s)
            self._reserved += 1
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= 1

    def put_request(self, arrived: Arrived, retry_after_s: float) -> None:
        """Accept a request; raises InboxFull with the time given, or Draining."""
        with self._changed:
            self._check_open()
            why = self._too_much(arrived.request)
            if why is not None:
                raise InboxFull(why, retry_after_s)
            self._here = self._here + arrived.request
            self._put(arrived)

    def put(self, event: Event) -> None:
        """Add anything but a request."""
        with self._changed:
            self._put(event)

    def planned(self, queue: Queue) -> None:
        """Note which requests, of all that were taken, wait for a row still."""
        with self._changed:
            self._taken, self._planned = Queue(), queue

    def take(self, timeout_s: float | None) -> list[Event]:
        """All events there are, in order; waits up to `timeout_s` (None: for ever) for one.

        Their requests go on waiting until `planned` says which of them do.
        """
        with self._changed:
            if timeout_s is None or timeout_s > 0:
                self._changed.wait_for(lambda: self._events or self._woken, timeout_s)
            self._woken = False
            events, self._events = self._events, []
            self._taken, self._here = self._here, Queue()
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

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Draining(self._closed)

    def _too_much(self, request: Request) -> str | None:
        """Why there is no room for a request, if there is none."""
        limits, tokens, name = self.limits, len(request.token_ids), model_name(request)
        if self.waiting + self._reserved >= limits.requests:
            return self._too_many(limits.requests, "")
        own = sum(q.models.get(name, 0) for q in (self._here, self._taken, self._planned))
        if own >= limits.per_model:
            return self._too_many(limits.per_model, f" for {name}")
        waiting = self.waiting_tokens
        if waiting and waiting + tokens > limits.tokens:
            return (
                f"prompts of {waiting} tokens are waiting, and with {tokens} more they would pass "
                f"the limit of {limits.tokens:g}"
            )
        return None

    @staticmethod
    def _too_many(limit: float, what: str) -> str:
        return f"{limit:g} requests{what} are waiting, which is the limit"
