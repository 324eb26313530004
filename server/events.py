"""The words of the scheduler: what can happen, and what it can ask to be done.

Plain frozen values; `server.scheduler` decides over them, the worker and the loader make and carry
them out.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from server.requests import Failure, Finish, Request
from zen_jax.residency import (
    AbandonLoad,
    DropHost,
    DropStaged,
    Evicted,
    LoadFailureKind,
    Refuse,
    Stage,
    StartLoad,
    StartPut,
    WriteSlot,
)

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant
    from zen_jax.sampling import TokenLogprobs

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
    """Tokens were read from the device.

    Attributes:
        turn: of the request's turns in a row, the one that they were computed in.
        tokens: in their order; none where the row had stopped.
        logprobs: one for each, where asked for.
    """

    ticket: Ticket
    turn: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TextEnded:
    """A request's text has come to a stop string; unknown ids are over already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """A decode step takes so many seconds."""

    step_s: float


@dataclass(frozen=True, slots=True)
class PrefillRefused:
    """The engine did not take a request's prompt; the message is fit for clients."""

    ticket: Ticket
    message: str


@dataclass(frozen=True, slots=True)
class Advanced:
    """A load has begun another stage."""

    digest: str
    attempt: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class Fetched:
    """A load has left its variant in host memory, checked: `size` bytes."""

    digest: str
    attempt: int
    size: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What a load staged is in its slot."""

    digest: str
    attempt: int


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load that was given up has ended and holds no memory any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has staged its variant's weights on the device, `size` bytes."""

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


type LoadEvent = Advanced | Fetched | Loaded | Committed | LoadFailed | LoadEnded
type Event = (
    Arrived | Cancelled | Sampled | TextEnded | Stepped | PrefillRefused | LoadEvent | OperatorCall
)

# What is to be done.


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a request's row has to hold before it can decode.

    Attributes:
        turn: counts the request's turns in a row.
        tokens: of the prompt, or of the answer so far when the request lost its row.
        start: the position of the first.
        last: whether the next token is to be sampled after it.
        pages: of the row, enough for what it has then.
        before: the tokens before the first part of a turn, whose pages another request has filled.
    """

    ticket: Ticket
    turn: int
    arrived: Arrived = field(repr=False)
    row: int
    slot: int
    tokens: tuple[int, ...] = field(repr=False)
    start: int
    last: bool
    pages: tuple[int, ...] = field(default=(), repr=False)
    before: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Read these parts, of different rows, in one call."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Launch so many steps; `rows` are those that go on, each with its ticket and turn, and `pages`
    what each has, enough for the steps."""

    rows: tuple[tuple[int, Ticket, int], ...]
    steps: int
    pages: tuple[tuple[int, ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass tokens on to their caller, with the finish if the last of them was the last of all."""

    request_id: str
    tokens: tuple[int, ...]
    finish: Finish | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell a caller that its request has ended badly."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Answer:
    """An operator's call is done, or refused for the reason given."""

    call: int
    refused: Refuse | None = None


type CacheAction = StartLoad | StartPut | AbandonLoad | DropStaged | DropHost | WriteSlot | Evicted
type Action = CacheAction | Prefill | Decode | Emit | Fail | Answer
