"""The words of the scheduler: what can happen, and what it can ask to be done.

Plain frozen values; `server.scheduler` decides over them, the worker and the loader make and carry
them out.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from server.requests import Failure, Finish, Request
from zen_jax.residency import (
    AbandonLoad,
    DropStaged,
    Evicted,
    LoadFailureKind,
    Refuse,
    StartLoad,
    WriteSlot,
)

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

type Ticket = int
"""A number given to each request and operator's call, never used twice. Tokens come back under
it, so that a step launched before a request ended cannot speak to one that came after."""


# What happened.


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request was accepted.

    Attributes:
        stops: the tokens that end it, its variant's own end tokens among them unless ignored.
        limit: the most tokens to sample, at least 1; the context has room for them.
        at: when it was submitted.
    """

    request: Request
    stops: frozenset[int]
    limit: int
    at: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller of a request no longer wants it; unknown ids are over already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was read from the device."""

    ticket: Ticket
    token: int


@dataclass(frozen=True, slots=True)
class PrefillRefused:
    """The engine did not take a request's prompt; the message is fit for clients."""

    ticket: Ticket
    message: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has staged its variant's weights, `size` bytes."""

    digest: str
    attempt: int
    size: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load has failed; the message is fit for clients."""

    digest: str
    attempt: int
    kind: LoadFailureKind
    message: str


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator asks something of a variant; answered by `Answer` with the same call number.

    Loads and pins mean the version given; what takes them back means all versions of its name.
    """

    call: int
    verb: Literal["load", "unload", "pin", "unpin"]
    variant: Variant


type Event = Arrived | Cancelled | Sampled | PrefillRefused | Loaded | LoadFailed | OperatorCall

# What is to be done.


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run the request's prompt with the slot's variant and put it into the row."""

    ticket: Ticket
    request: Request
    row: int
    slot: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Launch one step over all rows; `rows` says whose tokens are wanted."""

    rows: tuple[tuple[int, Ticket], ...]


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """The row is free."""

    row: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass a token on to its caller, with the finish if it was the last."""

    request_id: str
    token: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell a caller that its request has ended badly."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Answer:
    """An operator's call is done, or refused for the reason given."""

    call: int
    refused: Refuse | None = None


type CacheAction = StartLoad | AbandonLoad | DropStaged | WriteSlot | Evicted
type Action = CacheAction | Prefill | Decode | ReleaseRow | Emit | Fail | Answer
