"""Who runs when: `plan(state, events, now)` gives the next state and the actions to carry out.

The state holds everything that is decided over: each accepted request, the queue for rows, the
rows, and the delta cache's table. Nothing here blocks, reads a clock or touches a device, so a
schedule can be replayed and any interleaving tried.

A request waits for its variant in the cache's table and for a row in `ready`, in the order of
`turn`: of arrival, where a unit of priority is worth `ageing_s` of waiting, so that whoever comes
much later goes behind in any case. One that waits for a variant is not in `ready`, so it holds up
nobody. When no row is free the first in line takes the row of one that goes behind it and has less
priority. That one goes back in line; when it has a row again its prompt is read again and the
tokens that it had are made again, by the same steps, so that they and all others are those of a
row that was never lost. What the device still computes for a lost row comes under an older turn.

A row needs pages of the cache for all its positions. They are taken before a call is launched;
where there are too few, rows are lost in the same way, the last in line first, until those before
it have what they need. The first in line loses nothing, and the cache holds one request at its
longest, so somebody always goes on. Who would read what another is just reading waits for it.

Each plan emits its device actions first: write, prefill, decode; what callers are told comes after
them. A plan launches at most one call that reads prompts, of limited size, and one that decodes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from server.events import (
    Action,
    Advanced,
    Answer,
    Arrived,
    Cancelled,
    Committed,
    Decode,
    Emit,
    Event,
    Fail,
    Fetched,
    Loaded,
    LoadEnded,
    LoadEvent,
    LoadFailed,
    OperatorCall,
    Part,
    Prefill,
    PrefillRefused,
    Sampled,
    Stepped,
    TextEnded,
    Ticket,
)
from server.holdings import Holdings
from server.jobs import BASE_SLOT, Job, SchedulerConfig, State
from server.requests import Failure, FailureKind
from zen_jax.chunking import cut
from zen_jax.delta_cache import DeltaCache, Step
from zen_jax.pages import PagePool
from zen_jax.residency import CacheConfig, Evicted, Grant, PinLimit, Refuse

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

_OVERDUE = "the request's deadline has passed"


def initial(config: SchedulerConfig, cache: CacheConfig) -> State:
    """The state of a server that has just started."""
    pages = PagePool(config.pages)
    return State(config, DeltaCache(cache), pages, rows=(None,) * config.rows)


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
    draft.read()
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
        self.step_s = state.step_s
        self.held = Holdings(state.pages, state.config)
        self.lost, self.found_tokens = state.lost, state.found_tokens
        self.read_tokens = state.read_tokens
        self.device: list[Action] = []
        self.told: list[Action] = []

    def finish(self) -> tuple[State, tuple[Action, ...]]:
        state = replace(
            self.before,
            cache=self.cache,
            pages=self.held.pool,
            jobs=MappingProxyType(self.jobs),
            tickets=MappingProxyType(self.tickets),
            ready=tuple(self.ready),
            rows=tuple(self.rows),
            calls=MappingProxyType(self.calls),
            unloading=MappingProxyType(self.unloading),
            next_ticket=self.next_ticket,
            deadline=self.deadline,
            step_s=self.step_s,
            lost=self.lost,
            found_tokens=self.found_tokens,
            read_tokens=self.read_tokens,
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
            case Sampled(ticket, turn, tokens):
                if ticket in self.jobs and self.jobs[ticket].turn == turn and tokens:
                    self.sampled(ticket, event)
            case TextEnded(request_id):
                if request_id in self.tickets:
                    self.text_ended(self.tickets[request_id])
            case Stepped(step_s):
                self.step_s = step_s
            case PrefillRefused(ticket, message):
                if ticket in self.jobs:
                    self.fail(ticket, "internal", message)
            case OperatorCall():
                self.operate(event)
            case _:
                self.cache_step(self.load_step(event))

    def load_step(self, event: LoadEvent) -> Step:
        """What the cache makes of a load's news."""
        match event:
            case Advanced(digest, attempt, stage):
                return self.cache.advanced(digest, attempt, stage, self.now)
            case Fetched(digest, attempt, size):
                return self.cache.fetched(digest, attempt, size, self.now)
            case Loaded(digest, attempt, size):
                return self.cache.loaded(digest, attempt, size, self.now)
            case Committed(digest, attempt):
                return self.cache.committed(digest, attempt, self.now)
            case LoadFailed(digest, attempt, kind, message):
                return self.cache.failed(digest, attempt, kind, message, self.now)
            case LoadEnded(attempt):
                return self.cache.ended(attempt, self.now)

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

    def sampled(self, ticket: Ticket, event: Sampled) -> None:
        job, tokens = self.jobs[ticket], event.tokens
        first_at = job.first_at if job.tokens else self.now
        # Those that it had before it lost its row were told already.
        again = min(len(tokens), len(job.tokens) - job.made)
        job = replace(job, made=job.made + len(tokens))
        kept = tokens[again:][: job.arrived.limit - len(job.tokens)]
        stop = next((i for i, token in enumerate(kept) if token in job.arrived.stops), None)
        if stop is not None:
            kept = kept[: stop + 1]
        job = self.held.confirm(replace(job, tokens=job.tokens + kept, first_at=first_at))
        self.jobs[ticket] = job
        finish = None
        if stop is not None or len(job.tokens) >= job.arrived.limit:
            finish = job.finish("length" if stop is None else "stop")
            finish = replace(finish, matched_stop=None if stop is None else kept[-1])
            self.end(ticket)
        if kept:
            own = event.logprobs[again:][: len(kept)]
            self.told.append(Emit(job.request.id, kept, finish, own))

    def text_ended(self, ticket: Ticket) -> None:
        """End a request at a stop string; which one, and where, its stream knows."""
        job = self.jobs[ticket]
        self.end(ticket)
        self.told.append(Emit(job.request.id, (), job.finish("stop")))

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
        self.line_up(ticket)

    def line_up(self, ticket: Ticket) -> None:
        self.jobs[ticket] = self.held.named(self.jobs[ticket])
        insort(self.ready, ticket, key=self.turn)

    def turn(self, ticket: Ticket) -> tuple[float, Ticket]:
        """Who goes first: the lowest. It never changes, so everybody's turn comes."""
        request = self.jobs[ticket].arrived
        ageing_s = self.before.config.ageing_s
        return request.at - request.request.priority * ageing_s, ticket

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

    def fail(self, ticket: Ticket, kind: FailureKind, message: str) -> None:
        request_id = self.jobs[ticket].request.id
        self.end(ticket)
        self.told.append(Fail(Failure(request_id, kind, message)))

    def end(self, ticket: Ticket) -> None:
        """Give back all that the request holds: its place in the queue, its row, its lease."""
        job = self.forget(ticket)
        if job.row is not None:
            self.rows[job.row] = None
            self.held.release(job)
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
        """Give rows and pages to those whose turn it is, free ones first."""
        for ticket in tuple(self.ready):
            running = [self.jobs[other] for other in self.rows if other is not None]
            if self.held.awaits(self.jobs[ticket], running):
                continue
            if not self.admit(ticket):
                break

    def admit(self, ticket: Ticket) -> bool:
        """Give a row to one in line; if need be take those of some that go behind it and have less
        priority, the last first. Returns whether it has one."""
        first, turn = self.jobs[ticket], self.turn(ticket)
        running = [other for other in self.rows if other is not None]
        behind = sorted(
            (
                other
                for other in running
                if self.jobs[other].request.priority < first.request.priority
                and self.turn(other) > turn
            ),
            key=self.turn,
            reverse=True,
        )
        needed = int(None not in self.rows)
        while needed <= len(behind):
            losing = [self.jobs[other] for other in behind[:needed]]
            going_on = [self.jobs[other] for other in running if other not in behind[:needed]]
            if self.held.fits(first, losing, going_on):
                break
            needed += 1
        if needed > len(behind):
            return False
        for other in behind[:needed]:
            self.lose(other)
        self.give(ticket, self.rows.index(None))
        return True

    def give(self, ticket: Ticket, row: int) -> None:
        """Give a row, and pages that are there, to one in line."""
        self.ready.remove(ticket)
        job = self.held.admit(self.jobs[ticket])
        self.rows[row] = ticket
        self.found_tokens += job.before
        self.jobs[ticket] = replace(
            job,
            row=row,
            turn=job.turn + 1,
            made=0,
            launched=0,
            prefill_at=job.prefill_at if job.turn else self.now,
        )

    def lose(self, ticket: Ticket) -> None:
        """Take a row and its pages from a request, which goes back in line."""
        job = self.jobs[ticket]
        assert job.row is not None
        self.rows[job.row] = None
        self.lost += 1
        self.jobs[ticket] = replace(self.held.release(job), row=None, unread=())
        self.line_up(ticket)

    def reserve(self, ticket: Ticket, position: int, end: int) -> bool:
        """Take pages for a call that begins at a position and leaves the row with `end` of them.

        Whoever is last in line loses its row for them. Returns whether that was not the request
        itself.
        """
        while (job := self.held.grow(self.jobs[ticket], position, end)) is None:
            last = max((other for other in self.rows if other is not None), key=self.turn)
            self.lose(last)
            if last == ticket:
                return False
        self.jobs[ticket] = job
        return True

    def read(self) -> None:
        """Launch one call that reads parts of prompts."""
        waiting = [t for t in self.rows if t is not None and self.jobs[t].unread]
        waiting.sort(key=self.turn)
        sizes = cut([len(self.jobs[t].unread) for t in waiting], self.before.config.shapes)
        parts: list[Part] = []
        for ticket, size in zip(waiting, sizes, strict=False):
            job = self.jobs[ticket]
            start = len(job.request.token_ids) - len(job.unread)
            if job.row is None or not self.reserve(ticket, start, start + size):
                continue
            job = self.jobs[ticket]
            tokens, unread = job.unread[:size], job.unread[size:]
            before = job.request.token_ids[:start] if start == job.before else ()
            assert job.row is not None and job.slot is not None
            part = Part(ticket, job.turn, job.arrived, job.row, job.slot, tokens, start, not unread)
            parts.append(replace(part, pages=job.pages, before=before))
            self.read_tokens += size
            self.jobs[ticket] = replace(job, unread=unread, launched=int(not unread))
        if parts:
            self.device.append(Prefill(tuple(parts)))

    def decode(self) -> None:
        """Launch steps if some row still wants a token that was not launched yet."""
        wanted: list[Ticket] = []
        left = 0
        for ticket in self.rows:
            if ticket is not None:
                job = self.jobs[ticket]
                if not job.unread and job.launched < job.arrived.limit:
                    wanted.append(ticket)
                    left = max(left, job.arrived.limit - job.launched)
        if not wanted:
            return
        steps = min(self.steps(), left)
        for ticket in sorted(wanted, key=self.turn):
            job = self.jobs[ticket]
            launched = min(job.launched + steps, job.arrived.limit)
            # The newest token is not in the cache yet: it goes there when the next is made.
            held = len(job.request.token_ids) - 1
            if job.row is not None and self.reserve(ticket, held + job.launched, held + launched):
                self.jobs[ticket] = replace(self.jobs[ticket], launched=launched)
        rows: list[tuple[int, Ticket, int]] = []
        for row, ticket in enumerate(self.rows):
            if ticket in wanted:
                rows.append((row, ticket, self.jobs[ticket].turn))
        if rows:
            pages = tuple(self.jobs[ticket].pages for _, ticket, _ in rows)
            self.device.append(Decode(tuple(rows), steps, pages))

    def steps(self) -> int:
        """How many steps a call makes: one where somebody waits, else as many as are quick."""
        config = self.before.config
        if self.ready or any(t is not None and self.jobs[t].unread for t in self.rows):
            return 1
        if self.step_s * config.max_steps <= config.dispatch_s:
            return config.max_steps
        return max(1, int(config.dispatch_s / self.step_s))

    def ticket(self) -> Ticket:
        self.next_ticket += 1
        return self.next_ticket
