"""What is kept of a call once it is over: for metrics, traces and logs. No text, no token."""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.requests import Finish, Request
from zen_jax.checkpoint.manifest import BASE, Variant

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
# Version 00 of W3C Trace Context; an id of zeros is none.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


@dataclass(slots=True)
class CallRecord:
    """One call from its arrival to its end.

    Attributes:
        id: given by the caller, or made up; "" if what was given is none.
        token: the id of the caller's token.
        tenant: whose it is.
        traceparent: the trace that it belongs to, as W3C Trace Context has it, or "".
        trace_id: of that trace, or of the one that was begun for it, or "".
        began_ns: when it came, in nanoseconds since 1970.
        began_s: likewise, in seconds of the worker's clock.
        queued_s: when its samples were queued, in seconds from when it came; 0 if they were not.
        model: the name of what answered, once it was found in the store; "" before.
        version: of the variant; 0 for the base.
        prompt_tokens: once the prompt was tokenized.
        samples: how many answers were asked for.
        pieces: when tokens were sent, in seconds from when the request was queued, and how many.
        finishes: how samples ended that ended well.
        code: the gRPC status code's name, "" until the call is over.
        seconds: that it took.
        fault: what the caller is told of a fault of the server, which is its id in the log.
    """

    id: str
    token: str = ""
    tenant: str = ""
    traceparent: str = ""
    trace_id: str = ""
    began_ns: int = field(default_factory=time.time_ns)
    began_s: float = 0.0
    queued_s: float = 0.0
    model: str = ""
    version: int = 0
    prompt_tokens: int = 0
    samples: int = 0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    code: str = ""
    seconds: float = 0.0
    fault: str = ""

    def found(self, variant: Variant | None) -> None:
        """Notes what answers."""
        self.model = BASE if variant is None else variant.name
        self.version = 0 if variant is None else variant.version

    def prepared(self, requests: list[Request]) -> None:
        """Notes what was asked."""
        self.samples = len(requests)
        self.prompt_tokens = len(requests[0].token_ids)

    @property
    def answer_tokens(self) -> int:
        """That were sent."""
        return sum(count for _, count in self.pieces)


# Told of every call when it is over; must neither block nor raise.
type Observer = Callable[[CallRecord], None]


# The id of the request that a task of the event loop works for.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def usable_traceparent(value: str) -> tuple[str, str]:
    """A header's value and the id of its trace; both empty if it is not as W3C Trace Context
    (https://www.w3.org/TR/trace-context/, version 00) has it."""
    found = _TRACEPARENT.fullmatch(value)
    return ("", "") if found is None else (value, found[1])


def usable_id(value: str) -> bool:
    """Whether a caller may call a request so."""
    return _ID.fullmatch(value) is not None
