"""When a client asks again by itself: only while nothing of an answer has come.

A request that was refused, or whose server could not be reached, has done nothing yet, and one
that has told nothing has shown nobody anything: asking again is safe. Once a first message is there
it is not, since the caller may have shown it.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from math import inf

import stamina

# What a server tells everyone who comes at once, not all shall follow at the same moment.
_SPREAD = 0.5


class Refusal(Exception):
    """What a policy decides over; `server.client.ZenError` is one.

    Attributes:
        code: the gRPC status code's name.
        retry_after_s: when the server proposes another try, in seconds, or None.
    """

    code: str
    retry_after_s: float | None


@dataclass(frozen=True)
class Retries:
    """How often a request is tried.

    Asked again is what a server refused with RESOURCE_EXHAUSTED or UNAVAILABLE and a time to come
    back, after that time and up to half as much again; and what reached no server, after 0.1 s,
    0.2 s and so on, and up to 0.2 s more.

    Attributes:
        attempts: in all; 1 asks once.
        total_s: for all of them, in seconds.

    Raises:
        ValueError: attempts below 1, or a time below 0.
    """

    attempts: int = 3
    total_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not self.total_s >= 0:
            raise ValueError(
                f"attempts is {self.attempts} and total_s {self.total_s}; expected at least 1 "
                "attempt, and seconds"
            )

    def wait_s(self, error: Exception, left_s: float) -> bool | float:
        """What stamina asks: how long to wait, or True for its own time; False ends it.

        Args:
            left_s: of the request's own time limit.
        """
        if not isinstance(error, Refusal) or error.code not in (
            "UNAVAILABLE",
            "RESOURCE_EXHAUSTED",
        ):
            return False
        if error.retry_after_s is None:
            # A message too large is RESOURCE_EXHAUSTED as well, and stays too large.
            return error.code == "UNAVAILABLE" and left_s > 0
        wait_s = error.retry_after_s * random.uniform(1, 1 + _SPREAD)
        return wait_s if wait_s < left_s else False

    def tries(self, timeout_s: float | None) -> Tries:
        """The attempts of one request, which has so long in all (None: no limit)."""
        return Tries(self, timeout_s)


class Tries:
    """The attempts of one request: each is a context that takes a Refusal, or lets it out.

    Attributes:
        begun: how many there were.
    """

    def __init__(self, policy: Retries, timeout_s: float | None) -> None:
        self._until = inf if timeout_s is None else time.monotonic() + timeout_s
        self.begun = 0
        self._context = stamina.retry_context(
            on=lambda error: policy.wait_s(error, self._until - time.monotonic()),
            attempts=policy.attempts,
            timeout=policy.total_s,
            wait_initial=0.1,
            wait_jitter=0.2,
        )

    @property
    def left_s(self) -> float | None:
        """Of the request's time; None without a limit."""
        return None if self._until == inf else max(self._until - time.monotonic(), 0.0)

    def __iter__(self) -> Iterator[stamina.Attempt]:
        for attempt in self._context:
            self.begun = attempt.num
            yield attempt

    async def __aiter__(self) -> AsyncIterator[stamina.Attempt]:
        async for attempt in self._context:
            self.begun = attempt.num
            yield attempt
