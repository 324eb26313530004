"""What the scheduler's state is made of: its sizes, each request's way so far, and all of them.

Plain frozen values; `server.scheduler` decides over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from server.events import Arrived, Ticket
from server.requests import Finish, FinishReason, Request, Timings
from zen_jax.chunking import Shape
from zen_jax.delta_cache import DeltaCache
from zen_jax.pages import PagePool

BASE_SLOT = -1


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Attributes:
    rows: requests that decode together.
    shapes: (C, T), how many prompts one call reads and how many tokens of each.
    max_steps: decode steps that one call makes.
    dispatch_s: how long a call that decodes may take, where it has more than one step.
    ageing_s: how much later another may come and still go first with a priority higher by one.
    pages: of the cache.
    page_size: positions of one.
    reach: how many of its last positions a row needs; None: all of them.
    share_prefixes: whether pages of prompts that begin alike are shared.
    base: the digest of the base.
    """

    rows: int
    shapes: tuple[Shape, ...] = ((1, 512),)
    max_steps: int = 1
    dispatch_s: float = 0.02
    ageing_s: float = 10.0
    pages: int = 1 << 20
    page_size: int = 32
    reach: int | None = None
    share_prefixes: bool = True
    base: str = ""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.max_steps < 1 or not self.shapes:
            raise ValueError(
                f"rows is {self.rows}, max_steps {self.max_steps} and shapes {self.shapes}, "
                "expected at least 1 of each"
            )
        if self.pages < 1 or self.page_size < 1 or (self.reach is not None and self.reach < 1):
            raise ValueError(
                f"pages is {self.pages}, page_size {self.page_size} and reach {self.reach}, "
                "expected at least 1 of each"
            )
        if not (self.dispatch_s > 0 and self.ageing_s > 0):
            raise ValueError(
                f"dispatch_s is {self.dispatch_s} and ageing_s {self.ageing_s}, expected seconds"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """A request's way so far; times are the clock's.

    Attributes:
        planned_at: when it entered the plan and asked for its variant.
        slot: its variant's, or the base's, once granted.
        row: while it has one.
        turn: how often it was given a row.
        prefill_at: when it was first.
        tokens: of the answer, those that were read.
        made: how many tokens of the answer were read in this turn, those that an earlier turn had
            made already among them.
        launched: how many were launched at most, in this turn.
        unread: of the prompt, what its row does not hold yet; none once it decodes.
        pages: of its row, from position 0 on, `NO_PAGE` where none is needed any more.
        keys: of its prompt's whole pages.
        kept: how many of these pages are kept for others.
        before: tokens whose pages it found when it got its row.
        cached: tokens of the prompt, of these, when it first did.
    """

    arrived: Arrived
    planned_at: float
    slot: int | None = None
    granted_at: float = 0.0
    row: int | None = None
    turn: int = 0
    prefill_at: float = 0.0
    first_at: float = 0.0
    tokens: tuple[int, ...] = ()
    made: int = 0
    launched: int = 0
    unread: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    kept: int = 0
    before: int = 0
    cached: int = 0

    @property
    def request(self) -> Request:
        return self.arrived.request

    def finish(self, reason: FinishReason) -> Finish:
        """What its caller is told at its end, once the first token was read."""
        return Finish(
            reason=reason,
            matched_stop=None,
            prompt_tokens=len(self.request.token_ids),
            completion_tokens=len(self.tokens),
            timings=self.timings,
            cached_tokens=self.cached,
        )

    @property
    def timings(self) -> Timings:
        """Once the first token was read."""
        load_s, waited_s = self.granted_at - self.planned_at, self.request.waited_s
        return Timings(
            queued_s=self.prefill_at - self.arrived.at - load_s,
            load_s=load_s + waited_s,
            prefill_s=self.first_at - self.prefill_at,
            first_token_s=self.first_at - self.arrived.at + waited_s,
        )


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is decided over. Make one with `initial`.

    Attributes:
        jobs: every request that has not ended, in the order of arrival.
        tickets: by request id.
        ready: those that have a slot and wait for a row, in the order of their turn.
        rows: who is in each row.
        calls: operators' calls that wait, by ticket.
        unloading: the digests that a call waits for, until they have left their slots.
        next_ticket: the next to give.
        deadline: no job's deadline is earlier.
        step_s: how long a decode step takes; without end until the first was measured.
        lost: how often a request lost its row.
        found_tokens: that did not have to be read, since their pages were there.
        read_tokens: of prompts and answers, that were read into rows.
    """

    config: SchedulerConfig
    cache: DeltaCache
    pages: PagePool
    jobs: Mapping[Ticket, Job] = field(default_factory=lambda: MappingProxyType({}))
    tickets: Mapping[str, Ticket] = field(default_factory=lambda: MappingProxyType({}))
    ready: tuple[Ticket, ...] = ()
    rows: tuple[Ticket | None, ...] = ()
    calls: Mapping[Ticket, int] = field(default_factory=lambda: MappingProxyType({}))
    unloading: Mapping[int, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    next_ticket: Ticket = 0
    deadline: float = inf
    step_s: float = inf
    lost: int = 0
    found_tokens: int = 0
    read_tokens: int = 0

    @property
    def running(self) -> int:
        """Rows in use."""
        return sum(ticket is not None for ticket in self.rows)

    @property
    def queued(self) -> int:
        """Requests without a row."""
        return len(self.jobs) - self.running

    def waiting(self) -> Iterator[Request]:
        """Those requests."""
        return (job.request for job in self.jobs.values() if job.row is None)

    @property
    def wake_at(self) -> float:
        """When `plan` has something to do though nothing happens."""
        return min(self.deadline, self.cache.wake_at)
