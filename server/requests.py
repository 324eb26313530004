"""What passes between the service and the worker: requests, token events and the ways to end.

Plain frozen values. This module knows neither the wire nor the device: it imports no grpc and no
jax, so that the scheduler, which decides over these values, imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant
    from zen_jax.sampling import SamplingParams, TokenLogprobs

type FinishReason = Literal["stop", "length"]

type FailureKind = Literal[
    "cancelled",  # the caller cancelled, or went away
    "deadline",  # the caller's deadline passed, queued or running
    "load_failed",  # the variant could not be read, staged or written
    "timed_out",  # a stage of its load took too long
    "corrupt",  # the variant is damaged in the store
    "does_not_fit",  # the variant exceeds what the bank was built for
    "exhausted",  # no slot came free within the wait allowed
    "not_taken_in",  # the pool has no place for the adapter
    "withdrawn",  # an operator unloaded the variant while the request waited for it
    "unavailable",  # the server is stopping
    "internal",  # a fault of ours; the message carries an id that stands in the log as well
]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, checked and resolved.

    Attributes:
        id: unique among the requests that the worker holds at a time.
        variant: the fine-tune to answer with; None is the base.
        token_ids: the prompt, at least one token.
        sampling: how tokens are drawn and when to stop.
        seed: what the row's random key is made of; always set, the server picks one if need be.
        deadline: in seconds of the worker's clock, or None.
        priority: a higher one goes before a lower that has not waited much longer, and takes its
            row when none is free.
        sample: which sample of the call this is; each has random numbers of its own.
        tenant: requests of different tenants share no pages of the cache.
        waited_s: until its adapter was in the pool.
    """

    id: str
    variant: Variant | None
    token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    seed: int
    deadline: float | None = None
    priority: int = 0
    sample: int = 0
    tenant: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time to the first token went, in seconds.

    Attributes:
        queued_s: in the inbox and waiting for a row, the wait for the variant left out.
        load_s: waiting for the variant to be resident, and in its pool before that; 0 when it was.
        prefill_s: from the launch of the prefill until its token was read.
        first_token_s: from submission until the first token; the sum of the three.
    """

    queued_s: float
    load_s: float
    prefill_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended well.

    Attributes:
        reason: "stop" for a stop or end-of-sequence token or a stop string, "length" for
            max_tokens or the end of the context.
        matched_stop: the token that stopped it, or None.
        matched_text: the stop string that did, or None.
        prompt_tokens: tokens in the prompt.
        cached_tokens: of these, the first ones, which another request had read already.
        completion_tokens: tokens sampled, the one that stopped it included.
        timings: of the first token.
    """

    reason: FinishReason
    matched_stop: int | None
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    matched_text: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A piece of an answer.

    Attributes:
        request_id: whose.
        text: what became readable; empty while a character is incomplete or a stop string may
            have begun.
        token_ids: the tokens since the last event. The token that stopped a request is among them
            though its text is never shown.
        finish: set on the last event of a request that ended well, and only there.
        logprobs: one for each of `token_ids`, where asked for.
        prompt_logprobs: one for each token of the prompt, in the first event, where asked for.
    """

    request_id: str
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    finish: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a request ended badly; nothing follows it.

    Attributes:
        request_id: whose.
        kind: what the service turns into a status code.
        message: fit for the client: no path, prompt or text of an inner exception.
        retry_after_s: when another try makes sense, or None.
    """

    request_id: str
    kind: FailureKind
    message: str
    retry_after_s: float | None = None


type OnEvent = Callable[[TokenEvent | Failure], None]


class InboxFull(Exception):
    """Too much waits for a row already; `retry_after_s` says when to come again."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(f"{why}; try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class Draining(Exception):
    """The server is stopping, or its engine has stopped: it takes no new requests."""

    def __init__(self, message: str = "the server is stopping and takes no new requests") -> None:
        super().__init__(message)


class LoadRefused(Exception):
    """What an operator asked of a variant could not be done; `kind` as in `Failure`."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.retry_after_s = retry_after_s
