"""Who runs when: `plan(state, events, now)` gives the next state and the actions to carry out.

The state holds everything that is decided over: each accepted request, the queue for rows, the
rows, and the delta cache's table. Nothing here blocks, reads a clock or touches a device, so a
schedule can be replayed and any interleaving tried.

A request waits for its variant in the cache's table and for a row in `ready`, in the order of
arrival. One that waits for a variant is not in `ready`, so it holds up nobody. Each plan emits its
device actions first: release, write, prefill, decode; what callers are told comes after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from server.events import (
    Action,
    Answer,
    Arrived,
    Cancelled,
    Decode,
    Emit,
    Event,
    Fail,
    Loaded,
    LoadFailed,
    OperatorCall,
    Prefill,
    PrefillRefused,
    ReleaseRow,
    Sampled,
    Ticket,
)
from server.requests import Failure, FailureKind, Finish, Request, Timings
from zen_jax.delta_cache import DeltaCache, Step
from zen_jax.residency import CacheConfig, Evicted, Grant, PinLimit, Refuse

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

BASE_SLOT = -1

_OVERDUE = "the request's deadline has passed"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Attributes:
    rows: requests that decode together.
    prefill_tokens: prompt tokens prefilled between two decode steps; one prompt always is.
    """

    rows: int
    prefill_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.rows < 1 or self.prefill_tokens < 1:
            raise ValueError(
                f"rows is {self.rows} and prefill_tokens {self.prefill_tokens}, expected at least 1"
            )


# The state.


@dataclass(frozen=True, slots=True)
class Job:
    """A request's way so far; times are the clock's, counts are tokens.

    Attributes:
        planned_at: when it entered the plan and asked for its variant.
        slot: its variant's, or the base's, once granted.
        row: once prefilled.
        launched: tokens whose computation was launched.
        sampled: tokens read.
    """

    arrived: Arrived
    planned_at: float
    slot: int | None = None
    granted_at: float = 0.0
    row: int | None = None
    prefill_at: float = 0.0
    first_at: float = 0.0
    launched: int = 0
    sampled: int = 0

    @property
    def request(self) -> Request:
        return self.arrived.request


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is decided over. Make one with `initial`.

    Attributes:
        jobs: every request that has not ended, in the order of arrival.
        tickets: by request id.
        ready: those that have a slot and wait for a row, in the order of arrival.
        rows: who is in each row.
        calls: operators' calls that wait, by ticket.
        unloading: the digests that a call waits for, until they have left their slots.
        next_ticket: the next to give.
        deadline: no job's deadline is earlier.
    """

    config: SchedulerConfig
    cache: DeltaCache
    jobs: Mapping[Ticket, Job] = field(default_factory=lambda: MappingProxyType({}))
    tickets: Mapping[str, Ticket] = field(default_factory=lambda: MappingProxyType({}))
    ready: tuple[Ticket, ...] = ()
    rows: tuple[Ticket | None, ...] = ()
    calls: Mapping[Ticket, int] = field(default_factory=lambda: MappingProxyType({}))
    unloading: Mapping[int, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    next_ticket: Ticket = 0
    deadline: float = inf

    @property
    def running(self) -> int:
        """Rows in use."""
        return sum(ticket is not None for ticket in self.rows)

    @property
    def queued(self) -> int:
        """Requests without a row."""
        return len(self.jobs) - self.running

    @property
    def wake_at(self) -> float:
        """When `plan` has something to do though nothing happens."""
        return min(self.deadline, self.cache.wake_at)


def initial(config: SchedulerConfig, cache: CacheConfig) -> State:
    """The state of a server that has just started."""
    return State(config=config, cache=DeltaCache(cache), rows=(None,) * config.rows)


def plan(state: State, events: Iterable[Event], now: float) -> tuple[State, tuple[Action, ...]]:
    """Take in what happened until `now` and decide what is to be done.

    Deadlines are looked at before rows are given out, so a request whose time is over is never
    prefilled. Raises ValueError for a request id that is already there.
    """
    draft = _Draft(state, now)
    for event in events:
        draft.take(event)
    draft.fail_overdue()
    draft.cache_step(draft.cache.tick(now))
    draft.fill_rows()
    draft.decode()
    return draft.finish()


class _Draft:
    """One plan at work: copies to write on, made into a state again by `finish`."""

    def __init__(self, state: State, now: float) -> None:
        self.before = state
        self.now = now
        self.cache = state.cache
        self.jobs = dict(state.jobs)
        self.tickets = dict(state.tickets)
        self.ready = list(state.ready)
        self.rows = list(state.rows)
        self.calls = dict(state.calls)
        self.unloading = dict(state.unloading)
        self.next_ticket = state.next_ticket
        self.deadline = state.deadline
        self.device: list[Action] = []
        self.told: list[Action] = []

    def finish(self) -> tuple[State, tuple[Action, ...]]:
        state = replace(
            self.before,
            cache=self.cache,
            jobs=MappingProxyType(self.jobs),
            tickets=MappingProxyType(self.tickets),
            ready=tuple(self.ready),
            rows=tuple(self.rows),
            calls=MappingProxyType(self.calls),
            unloading=MappingProxyType(self.unloading),
            next_ticket=self.next_ticket,
            deadline=self.deadline,
        )
        return state, (*self.device, *self.told)

    # Events.

    def take(self, event: Event) -> None:
        match event:
            case Arrived():
                self.arrive(event)
            case Cancelled(request_id):
                if request_id in self.tickets:
                    self.fail(self.tickets[request_id], "cancelled", "the request was cancelled")
            case Sampled(ticket, token):
                if ticket in self.jobs:
                    self.sampled(ticket, token)
            case PrefillRefused(ticket, message):
                if ticket in self.jobs:
                    self.fail(ticket, "internal", message, inserted=False)
            case Loaded(digest, attempt, size):
                self.cache_step(self.cache.loaded(digest, attempt, size, self.now))
            case LoadFailed(digest, attempt, kind, message):
                self.cache_step(self.cache.failed(digest, attempt, kind, message, self.now))
            case OperatorCall():
                self.operate(event)

    def arrive(self, arrived: Arrived) -> None:
        request = arrived.request
        if request.id in self.tickets:
            raise ValueError(f"request {request.id} is already there; give each an id of its own")
        if request.deadline is not None and request.deadline <= self.now:
            self.told.append(Fail(Failure(request.id, "deadline", _OVERDUE)))
            return
        ticket = self.ticket()
        self.jobs[ticket] = Job(arrived, self.now)
        self.tickets[request.id] = ticket
        if request.deadline is not None:
            self.deadline = min(self.deadline, request.deadline)
        if request.variant is None:
            self.granted(ticket, BASE_SLOT)
        else:
            self.cache_step(self.cache.request(ticket, request.variant, self.now))

    def sampled(self, ticket: Ticket, token: int) -> None:
        job = self.jobs[ticket]
        first_at = job.first_at if job.sampled else self.now
        job = replace(job, sampled=job.sampled + 1, first_at=first_at)
        self.jobs[ticket] = job
        stopped = token in job.arrived.stops
        finish = None
        if stopped or job.sampled >= job.arrived.limit:
            finish = Finish(
                reason="stop" if stopped else "length",
                matched_stop=token if stopped else None,
                prompt_tokens=len(job.request.token_ids),
                completion_tokens=job.sampled,
                timings=_timings(job),
            )
            self.end(ticket)
        self.told.append(Emit(job.request.id, token, finish))

    def operate(self, event: OperatorCall) -> None:
        match event.verb:
            case "load":
                ticket = self.ticket()
                self.calls[ticket] = event.call
                self.cache_step(self.cache.request(ticket, event.variant, self.now))
            case "unload":
                digests = self.cache.digests(event.variant.name)
                for digest in digests:
                    self.cache_step(self.cache.unload(digest, self.now))
                left = frozenset(d for d in digests if self.cache.slot(d) is not None)
                if left:
                    self.unloading[event.call] = left
                else:
                    self.told.append(Answer(event.call))
            case "pin":
                try:
                    self.cache_step(self.cache.pin(event.variant, self.now))
                except PinLimit as error:
                    refused = Refuse(-1, "exhausted", str(error), None)
                    self.told.append(Answer(event.call, refused))
                else:
                    self.withdraw_unloads(event.variant)
                    self.told.append(Answer(event.call))
            case "unpin":
                for digest in self.cache.digests(event.variant.name):
                    self.cache_step(self.cache.unpin(digest, self.now))
                self.told.append(Answer(event.call))

    # What the cache's table says.

    def cache_step(self, step: Step) -> None:
        self.cache, actions = step
        done: list[Ticket] = []
        for action in actions:
            match action:
                case Grant(holder) if holder in self.calls:
                    self.told.append(Answer(self.calls.pop(holder)))
                    done.append(holder)
                case Grant(holder, slot):
                    self.granted(holder, slot)
                case Refuse():
                    self.refused(action)
                case Evicted(digest):
                    self.device.append(action)
                    self.unloaded(digest)
                case _:
                    self.device.append(action)
        for holder in done:
            self.cache_step(self.cache.release(holder, self.now))

    def granted(self, ticket: Ticket, slot: int) -> None:
        self.jobs[ticket] = replace(self.jobs[ticket], slot=slot, granted_at=self.now)
        self.ready.append(ticket)
        if len(self.ready) > 1 and self.ready[-2] > ticket:
            self.ready.sort()

    def refused(self, refuse: Refuse) -> None:
        if refuse.holder in self.calls:
            self.told.append(Answer(self.calls.pop(refuse.holder), refuse))
        else:
            job = self.forget(refuse.holder)
            failure = Failure(job.request.id, refuse.kind, refuse.message, refuse.retry_after_s)
            self.told.append(Fail(failure))

    def unloaded(self, digest: str) -> None:
        for call, digests in list(self.unloading.items()):
            left = digests - {digest}
            if left:
                self.unloading[call] = left
            else:
                del self.unloading[call]
                self.told.append(Answer(call))

    def withdraw_unloads(self, pinned: Variant) -> None:
        """Who waits for a variant to leave waits in vain once it is pinned."""
        message = f"{pinned.name} was pinned by an operator before it was unloaded"
        for call, digests in list(self.unloading.items()):
            if pinned.digest in digests:
                del self.unloading[call]
                self.told.append(Answer(call, Refuse(-1, "withdrawn", message, None)))

    # Ends.

    def fail(
        self, ticket: Ticket, kind: FailureKind, message: str, *, inserted: bool = True
    ) -> None:
        request_id = self.jobs[ticket].request.id
        self.end(ticket, inserted=inserted)
        self.told.append(Fail(Failure(request_id, kind, message)))

    def end(self, ticket: Ticket, *, inserted: bool = True) -> None:
        """Give back all that the request holds: its place in the queue, its row, its lease.

        A row into which nothing was inserted needs no release on the device.
        """
        job = self.forget(ticket)
        if job.row is not None:
            self.rows[job.row] = None
            if inserted:
                self.device.append(ReleaseRow(job.row))
        elif job.slot is not None:
            self.ready.remove(ticket)
        if job.request.variant is not None:
            self.cache_step(self.cache.release(ticket, self.now))

    def forget(self, ticket: Ticket) -> Job:
        job = self.jobs.pop(ticket)
        del self.tickets[job.request.id]
        return job

    def fail_overdue(self) -> None:
        if self.now < self.deadline:
            return
        deadlines = {
            ticket: job.request.deadline
            for ticket, job in self.jobs.items()
            if job.request.deadline is not None
        }
        for ticket, deadline in list(deadlines.items()):
            if deadline <= self.now:
                del deadlines[ticket]
                self.fail(ticket, "deadline", _OVERDUE)
        self.deadline = min(deadlines.values(), default=inf)

    # Rows.

    def fill_rows(self) -> None:
        """Prefill in the order of arrival while rows are free and the budget lasts."""
        budget = self.before.config.prefill_tokens
        free = [row for row, ticket in enumerate(self.rows) if ticket is None]
        for row in free:
            if not self.ready:
                return
            ticket = self.ready[0]
            job = self.jobs[ticket]
            budget -= len(job.request.token_ids)
            if budget < 0 and row != free[0]:
                return
            del self.ready[0]
            self.rows[row] = ticket
            self.jobs[ticket] = replace(job, row=row, prefill_at=self.now, launched=1)
            slot = BASE_SLOT if job.slot is None else job.slot
            self.device.append(Prefill(ticket, job.request, row, slot))

    def decode(self) -> None:
        """Launch a step if some row still wants a token that was not launched yet."""
        wanted: list[tuple[int, Ticket]] = []
        for row, ticket in enumerate(self.rows):
            if ticket is not None:
                job = self.jobs[ticket]
                if job.launched < job.arrived.limit:
                    self.jobs[ticket] = replace(job, launched=job.launched + 1)
                    wanted.append((row, ticket))
        if wanted:
            self.device.append(Decode(tuple(wanted)))

    def ticket(self) -> Ticket:
        self.next_ticket += 1
        return self.next_ticket


def _timings(job: Job) -> Timings:
    load_s = job.granted_at - job.planned_at
    return Timings(
        queued_s=job.prefill_at - job.arrived.at - load_s,
        load_s=load_s,
        prefill_s=job.first_at - job.prefill_at,
        first_token_s=job.first_at - job.arrived.at,
    )
