"""The one thread that owns the device: it takes events in, plans, and carries out what is planned.

The engine's state and bank are touched here and nowhere else. A tick is: take what came in, plan,
launch what the device has to do, tell callers what the last call gave, read the calls before those
just launched. So the device computes while the host talks. It stops rows by itself at their ends;
what only the host sees is found one call late, and the tokens too many are dropped, since they come
back under the ticket of a request that ended.

Nothing that a request contains is logged: neither prompt nor token nor text, and of an exception
only its type and place, unless it is the device's own.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from math import inf
from typing import Literal

import jax

from server.device import DeviceEngine, chunk_of
from server.events import (
    AbandonLoad,
    Action,
    Answer,
    Arrived,
    Cancelled,
    Committed,
    Decode,
    DropHost,
    DropStaged,
    Emit,
    Event,
    Evicted,
    Fail,
    LoadEvent,
    LoadFailed,
    OperatorCall,
    Part,
    Prefill,
    PrefillRefused,
    StartLoad,
    StartPut,
    Stepped,
    TextEnded,
    Ticket,
    WriteSlot,
)
from server.faults import log_error
from server.inbox import Inbox, InboxLimits, Queue
from server.jobs import SchedulerConfig, State
from server.loader import Loader
from server.pace import Pace, QueuePace
from server.readout import Launch, PromptPart, prompt_part
from server.requests import (
    Draining,
    Failure,
    FailureKind,
    LoadRefused,
    OnEvent,
    Request,
    TokenEvent,
)
from server.scheduler import initial, plan
from server.snapshot import WorkerSnapshot, snapshot
from server.stream import AnswerStream
from zen_jax.answer_text import AnswerText
from zen_jax.checkpoint.manifest import Variant
from zen_jax.engine_state import Chunk
from zen_jax.residency import CacheConfig
from zen_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class Worker:
    """Serves requests on one engine. Call `start`, `submit` from any thread, `drain` at the end."""

    def __init__(
        self,
        engine: DeviceEngine,
        loader: Loader,
        cache_config: CacheConfig,
        tokenizers: Callable[[Variant | None], Tokenizer],
        inbox_limits: InboxLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        share_prefixes: bool = True,
        base: str = "",
    ) -> None:
        """Take the parts; the engine is warmed up already, the loader nobody else's.

        Args:
            engine: whose state and bank live on this worker's thread from now on.
            loader: reads and stages variants.
            cache_config: its `slots` are the bank's.
            tokenizers: a variant's own tokenizer, the base's for None; called from `submit`.
            inbox_limits: on what may wait for a row.
            clock: seconds; deadlines of requests are in its terms.
            share_prefixes: whether requests that begin alike share pages of the cache.
            base: the digest of the engine's base.
        """
        self._engine = engine
        self._loader = loader
        self._tokenizers = tokenizers
        self._clock = clock
        self._device_state = engine.init_state()
        self._bank = engine.init_bank()
        sizes = engine.sizes
        config = SchedulerConfig(
            sizes.rows,
            sizes.shapes,
            sizes.max_steps,
            pages=sizes.all_pages,
            page_size=sizes.page_size,
            reach=engine.reach,
            share_prefixes=share_prefixes,
            base=base,
        )
        self._plan: State = initial(config, cache_config)
        self._inbox = Inbox(inbox_limits)
        loader.connect(self._inbox.put)
        self._launched: list[Launch] = []
        self._read_events: list[Event] = []
        self._pace = Pace()
        self._lock = threading.Condition()
        self._streams: dict[str, AnswerStream] = {}
        self._calls: dict[int, Future[None]] = {}
        self._call_numbers = itertools.count()
        self._started = self._stopping = self._over = False
        self._thread = threading.Thread(target=self._run, name="zen-worker", daemon=True)
        self._queue_pace = QueuePace(clock())
        self._idle, self._rounds, self._evictions = True, 0, 0

    # From any thread.

    @property
    def alive(self) -> bool:
        """Whether the worker's thread serves: started, and neither stopped nor broken."""
        return self._started and not self._over

    @property
    def running(self) -> int:
        """Rows in use, as of the last tick."""
        return self._plan.running

    @property
    def pulse(self) -> int | None:
        """A number that grows as the worker goes round; None while it waits for an event."""
        return None if self._idle else self._rounds

    def start(self) -> None:
        """Begin to serve."""
        self._started = True
        self._thread.start()

    def reserved(self) -> AbstractContextManager[None]:
        """Holds a place for a request that is made ready to be submitted, and frees it for that.

        Raises InboxFull and Draining.
        """
        return self._inbox.reserved(self._retry_after_s())

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Accept a request; `on_event` is called on the worker's thread and must not block.

        It gets token events up to one with a finish, or up to a failure, and nothing after.
        Raises InboxFull, Draining, and ValueError for an id in use, sampling settings out of range,
        or a prompt without tokens or without room for one more.
        """
        request.sampling.validate()
        prompt, max_length = len(request.token_ids), self._engine.sizes.max_length
        if not 1 <= prompt < max_length:
            raise ValueError(
                f"the prompt has {prompt} tokens, expected 1 to {max_length - 1}, so that one more "
                f"fits into the context of {max_length}"
            )
        tokenizer = self._tokenizers(request.variant)
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids)
        arrived = Arrived(
            request,
            stops=stops if sampling.ignore_eos else stops | tokenizer.eos_ids,
            limit=min(sampling.max_tokens, max_length - prompt),
            at=self._clock(),
        )
        text = AnswerText(tokenizer, sampling.stop, sampling.min_tokens)
        stream = AnswerStream(on_event, text)
        with self._lock:
            if request.id in self._streams:
                raise ValueError(f"request {request.id} is already there; give each its own id")
            self._inbox.put_request(arrived, self._retry_after_s())
            self._streams[request.id] = stream

    def cancel(self, request_id: str) -> None:
        """End a request; it gets a failure "cancelled" unless it has ended already."""
        self._inbox.put(Cancelled(request_id))

    def load(self, variant: Variant) -> Future[None]:
        """Bring a variant into memory; done when it is there. Raises LoadRefused in the future."""
        return self._operate("load", variant)

    def unload(self, variant: Variant) -> Future[None]:
        """Take a variant, in all versions, out of memory and unpin it.

        Done when the last that used it has ended; LoadRefused when it is pinned meanwhile.
        """
        return self._operate("unload", variant)

    def pin(self, variant: Variant, pinned: bool) -> Future[None]:
        """Keep a variant in memory, or no longer; LoadRefused when too many are pinned.

        Pinning loads it when it is absent, and does not wait for that. The pin goes over to a newer
        version when that comes into memory; whatever version has it, it can be taken back.
        """
        return self._operate("pin" if pinned else "unpin", variant)

    def snapshot(self) -> WorkerSnapshot:
        """What is where, as of the last tick."""
        return snapshot(
            self._plan,
            waiting=self._inbox.waiting,
            alive=self.alive,
            step_s=self._pace.step_s,
            host_share=self._pace.host_share,
            compiles=self._engine.compiles,
            loads=self._loader.started,
            evictions=self._evictions,
            now=self._clock(),
        )

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let those accepted finish, stop; returns whether all finished.

        After `timeout_s` those left get a failure "unavailable".
        """
        self._inbox.close("the server is stopping and takes no new requests")
        with self._lock:
            finished = self._lock.wait_for(lambda: self._over or not self._streams, timeout_s)
            finished = finished and not self._over
        self.stop()
        return finished

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop now; requests that are left get a failure "unavailable".

        Returns whether the thread has ended within `timeout_s`; it is a daemon if it has not.
        """
        self._inbox.close("the server is stopping and takes no new requests")
        self._stopping = True
        self._inbox.wake()
        if not self._started:
            self._end("unavailable", "the server has stopped")
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._over

    def abandon(self, message: str) -> None:
        """Take the worker's thread for lost: every request and operator gets a failure.

        Should the thread come back it stops.
        """
        self._stopping = True
        self._end("unavailable", message)

    def _operate(
        self, verb: Literal["load", "unload", "pin", "unpin"], variant: Variant
    ) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._over:
                raise Draining("the engine has stopped")
            call = next(self._call_numbers)
            self._calls[call] = future
            self._inbox.put(OperatorCall(call, verb, variant))
        return future

    def _retry_after_s(self) -> float:
        return self._queue_pace.retry_after_s(self._inbox.waiting)

    # On the worker's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.tick(self._idle_s())
        except Exception as error:  # the engine's or ours: nothing after it can be trusted
            if self._over:  # given up long ago; whatever it found is of no account
                return
            error_id = log_error(error)
            self._end("internal", f"internal error {error_id}")
        else:
            self._end("unavailable", "the server has stopped")

    def _idle_s(self) -> float | None:
        """How long nothing needs doing, None for ever."""
        if self._launched or self._read_events:
            return 0.0
        wake_at = self._plan.wake_at
        return None if wake_at == inf else max(wake_at - self._clock(), 0.0)

    def tick(self, wait_s: float | None = 0.0) -> None:
        """One round; waits up to `wait_s` for an event. For tests, else the thread's own."""
        self._idle = True
        events: list[Event] = [*self._inbox.take(wait_s), *self._read_events]
        self._idle = False
        self._rounds += 1
        arrived = sum(isinstance(event, Arrived) for event in events)
        now, before = self._clock(), self._plan.queued
        self._plan, actions = plan(self._plan, events, now)
        self._inbox.planned(Queue.of(self._plan.waiting()))
        self._queue_pace.moved(before + arrived - self._plan.queued, before, now)
        self._read_events = []
        earlier = len(self._launched)
        for action in actions:
            self._carry_out(action)
        self._read(earlier if len(self._launched) > earlier else None, now)

    def _carry_out(self, action: Action) -> None:
        engine = self._engine
        match action:
            case Prefill(parts):
                self._prefill(parts)
            case Decode(rows, steps, pages):
                places = [row for row, _, _ in rows]
                table = engine.sizes.table(dict(zip(places, pages, strict=True)))
                self._device_state, sampled = engine.decode(
                    self._bank, self._device_state, steps, places, table
                )
                jobs = self._plan.jobs
                tops = tuple(jobs[ticket].request.sampling.logprobs for _, ticket, _ in rows)
                self._launched.append(Launch(sampled, rows, tops, steps, self._clock()))
            case WriteSlot(variant, slot, attempt):
                self._write(variant, slot, attempt)
            case StartLoad(variant, attempt):
                self._loader.start(variant, attempt)
            case StartPut(variant, attempt):
                self._loader.put(variant, attempt)
            case AbandonLoad(_, attempt):
                self._loader.abandon(attempt)
            case DropStaged(_, attempt):
                self._loader.drop(attempt)
            case DropHost(digest):
                self._loader.drop_host(digest)
            case Evicted(digest, slot):
                self._evictions += 1
                _log.info("slot %d is free of %s", slot, digest)
            case Emit():
                self._emit(action)
            case Fail(failure):
                self._tell(failure.request_id, failure, last=True)
            case Answer():
                self._answer(action)

    def _write(self, variant: Variant, slot: int, attempt: int) -> None:
        """Write a slot between two steps; what the engine refuses is that variant's affair, as long
        as the bank was not given away for it."""
        event: LoadEvent = Committed(variant.digest, attempt)
        try:
            staged = self._loader.take(attempt)
            self._bank = self._engine.write_slot(self._bank, slot, staged)
        except Exception as error:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._bank)):
                raise
            error_id = log_error(error)
            message = f"{variant.name} could not be written to its slot (error {error_id})"
            event = LoadFailed(variant.digest, attempt, "load_failed", message)
        self._inbox.put(event)

    def _prefill(self, parts: Sequence[Part]) -> None:
        """Launch a call; a part that the engine refuses is its own request's affair."""
        chunks: list[Chunk] = []
        last: list[tuple[int, Ticket, int]] = []
        tops: list[int | None] = []
        judged: list[PromptPart] = []
        for part in parts:
            told = self._plan.jobs[part.ticket].tokens
            prompt = None if told else prompt_part(part, len(chunks))
            chunk = chunk_of(part, () if prompt is None else prompt.targets)
            try:
                self._engine.check(chunk)
            except ValueError as error:
                error_id = log_error(error)
                message = f"the engine refused the request (error {error_id})"
                self._inbox.put(PrefillRefused(part.ticket, message))
                continue
            if part.last:
                last.append((len(chunks), part.ticket, part.turn))
                tops.append(part.arrived.request.sampling.logprobs)
            if prompt is not None:
                judged.append(prompt)
            chunks.append(chunk)
        if chunks:
            self._device_state, sampled = self._engine.prefill(
                self._bank, self._device_state, chunks
            )
            self._launched.append(
                Launch(sampled, tuple(last), tuple(tops), 0, self._clock(), tuple(judged))
            )

    def _read(self, count: int | None, began: float) -> None:
        """Wait for the tokens of the oldest `count` launches, None for all of them."""
        launches = self._launched[:count]
        del self._launched[: len(launches)]
        before = self._clock()
        for launch in launches:
            self._read_events += launch.tokens()
            for request_id, start, entries in launch.judged():
                if request_id in self._streams:
                    self._streams[request_id].judge(start, entries)
            self._pace.read(launch.steps, launch.at, self._clock())
        if launches:
            self._pace.ticked(before - began, self._clock() - before)
            self._read_events.append(Stepped(self._pace.step_s))

    def _emit(self, emit: Emit) -> None:
        stream, last = self._streams[emit.request_id], emit.finish is not None
        if stream.on_event is None:
            event = TokenEvent(emit.request_id, "", emit.tokens, emit.finish)
            self._tell(emit.request_id, event, last=last)
            return
        stopped = stream.stopped
        try:
            told = stream.take(emit)
        except Exception as error:  # a tokenizer's fault is its own request's affair
            error_id = log_error(error)
            message = f"the tokens could not be turned into text (error {error_id})"
            self._tell(emit.request_id, Failure(emit.request_id, "internal", message), last=last)
            self._abandon(emit.request_id, stream)
            return
        if stream.stopped and not stopped and not last:
            self._inbox.put(TextEnded(emit.request_id))
        if told is not None:
            self._tell(emit.request_id, told, last=last)

    def _tell(self, request_id: str, event: TokenEvent | Failure, *, last: bool) -> None:
        """Call back. After the last event the id is free for another request."""
        stream = self._streams[request_id]
        if last:
            self._forget(request_id)
        if not self._call_back(stream, event):
            self._abandon(request_id, stream)

    @staticmethod
    def _call_back(stream: AnswerStream, event: TokenEvent | Failure) -> bool:
        """Returns whether the callback took the event; its fault is its own request's affair."""
        if stream.on_event is not None:
            try:
                stream.on_event(event)
            except Exception as error:
                log_error(error)
                return False
        return True

    def _abandon(self, request_id: str, stream: AnswerStream) -> None:
        """Call back no more, and end the request if it runs."""
        stream.on_event = None
        if self._streams.get(request_id) is stream:
            self._inbox.put(Cancelled(request_id))

    def _forget(self, request_id: str) -> None:
        with self._lock:
            del self._streams[request_id]
            if not self._streams:
                self._lock.notify_all()

    def _answer(self, answer: Answer) -> None:
        future = self._calls.pop(answer.call)
        if not future.set_running_or_notify_cancel():
            return
        refused = answer.refused
        if refused is None:
            future.set_result(None)
        else:
            future.set_exception(LoadRefused(refused.kind, refused.message, refused.retry_after_s))

    def _end(self, kind: FailureKind, message: str) -> None:
        """Serve no more: answer everything that is left. Once is enough, whoever comes first."""
        self._inbox.close("the engine has stopped; the server takes no new requests")
        with self._lock:
            if self._over:
                return
            self._over = True
            streams, self._streams = self._streams, {}
            calls, self._calls = self._calls, {}
            self._lock.notify_all()
        self._loader.close()
        for request_id, stream in streams.items():
            self._call_back(stream, Failure(request_id, kind, message))
        for future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(LoadRefused(kind, message))
