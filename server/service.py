"""GenerateService: checks what comes over the wire, submits it, streams what comes of it.

It translates between protobuf messages and the dataclasses of `server.requests`, and decides
nothing else: which variant a name means is the router's business, who runs when is the worker's.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Protocol

import grpc
from google.rpc import code_pb2

from server import status
from server.auth import Identity, caller
from server.incoming import (
    DEFAULT_MAX_TOKENS,
    Limits,
    check,
    check_size,
    fitted,
    invalid,
    token_ids_of,
)
from server.intakes import Intakes, through
from server.outgoing import Outgoing, model_info
from server.quota import Quotas, QuotaSpent
from server.records import (
    REQUEST_ID,
    TRACEPARENT,
    CallRecord,
    Observer,
    request_id,
    usable_id,
    usable_traceparent,
)
from server.requests import Draining, InboxFull, OnEvent, Request
from server.router import Hold, InvalidModelName, Router, UnknownModel, can_be_name
from server.status import StatusError
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt
from zen_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Sends a piece of an answer, and returns when the next may come.
type Write = Callable[[pb.GenerateResponse], Awaitable[None]]

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

# Longer than any pause of a reader that still wants its answer, in seconds.
DEFAULT_WRITE_TIMEOUT_S = 10.0

# Calls that one may have under way where nothing bounds them.
_MOST_AT_ONCE = 1 << 20

# Requests whose text is tokenized at a time. More would take the processor from the worker.
_PREPARERS = 2


class GenerateWorker(Protocol):
    """What this service asks of the worker; `server.worker.Worker` is one."""

    def reserved(self) -> AbstractContextManager[None]:
        """Holds a place in the queue for a request; raises InboxFull or Draining."""
        ...

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queues a request; raises InboxFull or Draining."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request; one that is unknown or over is none of its concern."""
        ...


@dataclass(frozen=True)
class _Engine:
    """What runs requests, once it is there."""

    worker: GenerateWorker
    limits: Limits


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """The servicer of zen.v1.GenerateService. It belongs to the event loop that it is served from.

    It refuses everything with UNAVAILABLE until `accept` is called, and again after `refuse`.
    """

    def __init__(
        self,
        *,
        router: Router,
        tokenizers: Callable[[Variant | None], Tokenizer],
        write_timeout_s: float = DEFAULT_WRITE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[Observer] = (),
        intakes: Intakes | None = None,
    ):
        """Takes the parts that are there before an engine is.

        Args:
            intakes: takes adapters into the pool, where the router knows of any.
            observers: told of every call when it is over.
            tokenizers: a variant's tokenizer, the base's for None; called from helper threads.
            write_timeout_s: how long one message may wait for its reader.
            clock: the worker's clock, in seconds.
        """
        self._router = router
        self._tokenizers = tokenizers
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._observers = tuple(observers)
        self._intakes = intakes
        self._quotas = Quotas(clock)
        self._ids: set[tuple[str, str]] = set()
        self._engine: _Engine | None = None
        self._refusal = "the server is starting"
        self._preparers = ThreadPoolExecutor(_PREPARERS, "zen-prepare")
        self._in_flight = self._unready = 0
        self._idle, self._settled = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._settled.set()

    @property
    def refusal(self) -> str | None:
        """Why calls are refused now; None while they are taken."""
        return self._refusal if self._engine is None else None

    @property
    def in_flight(self) -> int:
        """Calls that were accepted and have not ended."""
        return self._in_flight

    def at_once(self, samples: int) -> int:
        """How many calls of so many samples the caller may have under way together, at least 1."""
        own, most = caller().most_requests, [_MOST_AT_ONCE]
        if self._engine is not None and self._engine.limits.samples < inf:
            most.append(int(self._engine.limits.samples) // max(1, samples))
        if own is not None:
            most.append(own)
        return max(1, min(most))

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no call is in flight; returns whether that came within the time."""
        return await _came(self._idle, timeout_s)

    async def settled(self, timeout_s: float) -> bool:
        """Likewise, until no call is being made ready for the worker's queue."""
        return await _came(self._settled, timeout_s)

    def accept(self, worker: GenerateWorker, limits: Limits) -> None:
        """Lets calls in from now on, for `worker`, whose engine has `limits`."""
        self._engine = _Engine(worker, limits)

    def refuse(self, reason: str) -> None:
        """Answers new calls with UNAVAILABLE and `reason` from now on."""
        self._engine, self._refusal = None, reason

    def close(self) -> None:
        """Gives its threads up. No call may be in flight or come any more."""
        self._preparers.shutdown(wait=False, cancel_futures=True)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the answer to one request, and frees its row however the call ends."""
        given = {key: str(value) for key, value in context.invocation_metadata() or ()}
        remaining_s = context.time_remaining()
        try:
            await self.run(request, remaining_s, context.write, headers=given)
        finally:
            if request_id.get():
                context.set_trailing_metadata(((REQUEST_ID, request_id.get()),))

    async def run(
        self,
        message: pb.GenerateRequest,
        remaining_s: float | None,
        write: Write,
        *,
        prepared: Callable[[Request], None] = lambda request: None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        headers: Mapping[str, str] = _NO_HEADERS,
        prompt: int = 0,
    ) -> None:
        """Answers one request by `write`, which may take its time for each message, up to a limit.

        Whose request it is, `server.auth.caller` says.

        Args:
            message: what is asked, unchecked.
            remaining_s: until its deadline, in seconds; None if it has none.
            write: sends a piece of the answer; cancelling the call or failing here frees its rows.
            prepared: told of the first sample's request before any piece of an answer.
            max_tokens: what is taken where the message gives none and the context has the room.
            headers: the call's; those that `server.records` names are looked at.
            prompt: which of the call's prompts this is; from 1 on it has an id of its own.

        Raises:
            StatusError: what the caller is told.
        """
        record = self._record(headers, prompt)
        request_id.set(record.id)
        try:
            with self._named(record):
                await self._run(message, remaining_s, write, record, prepared, max_tokens)
        except StatusError as error:
            record.code = code_pb2.Code.Name(error.status.code)
            record.fault = error.status.message if record.code == "INTERNAL" else ""
            raise
        except asyncio.CancelledError:
            record.code = "CANCELLED"
            raise
        except Exception:
            record.code = "INTERNAL"
            raise
        else:
            record.code = "OK"
        finally:
            record.seconds = self._clock() - record.began_s
            for observe in self._observers:
                observe(record)

    def _record(self, headers: Mapping[str, str], prompt: int) -> CallRecord:
        """Of a call that has just come, or of one of its later prompts."""
        identity = caller()
        name = headers.get(REQUEST_ID) or uuid.uuid4().hex
        traceparent, trace_id = usable_traceparent(headers.get(TRACEPARENT, ""))
        own = f"{name}/{prompt}" if prompt else name  # no caller can give an id with a slash
        return CallRecord(
            own if usable_id(name) else "",
            identity.token,
            identity.tenant,
            traceparent,
            trace_id,
            began_s=self._clock(),
        )

    @contextmanager
    def _named(self, record: CallRecord) -> Iterator[None]:
        """A call's id is its own as long as it runs.

        Raises:
            StatusError: INVALID_ARGUMENT or ALREADY_EXISTS.
        """
        if not record.id:
            raise invalid(REQUEST_ID, "is no id; expected 1 to 64 letters, digits and . _ -")
        key = record.tenant, record.id
        if key in self._ids:
            text = f"a request of the id {record.id} is under way; give each an id of its own"
            raise status.already_exists("zen.v1.GenerateRequest", record.id, text)
        self._ids.add(key)
        try:
            yield
        finally:
            self._ids.discard(key)

    async def _run(
        self,
        message: pb.GenerateRequest,
        remaining_s: float | None,
        write: Write,
        record: CallRecord,
        prepared: Callable[[Request], None],
        max_tokens: int,
    ) -> None:
        engine, identity = self._engine, caller()
        if engine is None:
            raise status.unavailable(self._refusal)
        self._in_flight += 1
        self._idle.clear()
        hold = Hold()
        try:
            deadline = None if remaining_s is None else self._clock() + remaining_s
            with _refusals(), self._quotas.running(identity):
                with engine.worker.reserved():
                    prepare = partial(
                        self._prepare, message, deadline, engine.limits, max_tokens, identity
                    )
                    requests = await self._made_ready(
                        partial(prepare, record, hold), deadline, engine.limits.samples
                    )
                prepared(requests[0])
                most = sum(request.sampling.max_tokens for request in requests)
                with self._quotas.spending(
                    identity, record.prompt_tokens, most, lambda: record.answer_tokens
                ):
                    await self._answer(requests, engine.worker, write, record)
        finally:
            hold.close()
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _made_ready(
        self, prepare: Callable[[float], list[Request]], deadline: float | None, most: float
    ) -> list[Request]:
        """Runs `prepare` where files may be looked at and text tokenized without holding up the
        loop, again when the adapter that it lacks is in the pool; a call that is cancelled before
        its turn takes none.

        Raises:
            StatusError, InboxFull: as `prepare`, and where the adapter is not taken in.
        """
        self._unready += 1
        self._settled.clear()
        loop = asyncio.get_running_loop()

        async def made_ready(waited_s: float) -> list[Request]:
            return await loop.run_in_executor(self._preparers, prepare, waited_s)

        try:
            return await through(self._intakes, made_ready, deadline, most)
        finally:
            self._unready -= 1
            if not self._unready:
                self._settled.set()

    def _prepare(
        self,
        message: pb.GenerateRequest,
        deadline: float | None,
        limits: Limits,
        max_tokens: int,
        identity: Identity,
        record: CallRecord,
        hold: Hold,
        waited_s: float,
    ) -> list[Request]:
        """Checks a message, finds its variant and tokenizes its input: a request for each sample.

        Raises:
            StatusError: what the caller is told.
            NotTakenIn: its adapter is not in the pool yet.
        """
        if deadline is not None and deadline <= self._clock():
            raise status.deadline_exceeded("the request's deadline has passed")
        violations = list(check(message, limits))
        if violations:
            raise status.invalid_argument(violations)
        variant = resolve(self._router, message.model, "model", identity.asking(), hold)
        record.found(variant)
        try:
            limits = limits.of(variant)
        except VariantCorrupt:
            raise damaged(model_info(variant).name) from None
        violations = list(check(message, limits))
        if violations:
            raise status.invalid_argument(violations)
        # The worker needs it too: found here, it is not read from files on the loop.
        tokenizer = self._tokenizer(variant)
        check_size(message, tokenizer, limits)
        token_ids = token_ids_of(message, tokenizer)
        sampling = fitted(message, len(token_ids), limits, max_tokens)
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        own = f"{identity.tenant}/{record.id}"
        first = Request(own, variant, token_ids, sampling, seed, deadline, message.priority)
        first = replace(first, tenant=identity.tenant, waited_s=waited_s)
        later = replace(sampling, prompt_logprobs=None)
        requests = [
            first if i == 0 else replace(first, id=f"{first.id}#{i}", sampling=later, sample=i)
            for i in range(sampling.n)
        ]
        record.prepared(requests)
        return requests

    def _tokenizer(self, variant: Variant | None) -> Tokenizer:
        name = model_info(variant).name
        try:
            return self._tokenizers(variant)
        except VariantCorrupt:
            raise damaged(name) from None
        except (ValueError, OSError) as error:
            _log.error("%s has no tokenizer: %s", name, error)
            text = f"{name} has no tokenizer that can be read"
            raise status.failed_precondition("LOAD_FAILED", name, text) from None

    async def _answer(
        self, requests: list[Request], worker: GenerateWorker, write: Write, record: CallRecord
    ) -> None:
        """Runs a call's samples and writes what comes of them.

        The worker is told of each sample that nobody waits for any more.
        """
        outgoing, began = Outgoing(requests, record.finishes.append), self._clock()
        record.queued_s = began - record.began_s - requests[0].waited_s
        submitted: list[Request] = []
        try:
            for request in requests:
                with _refusals():
                    worker.submit(request, partial(outgoing.put, request.sample))
                submitted.append(request)
            while outgoing.left:
                messages, failure = await outgoing.next()
                for message in messages:
                    await self._write(message, write)
                    record.pieces.append((self._clock() - began, len(message.token_ids)))
                if failure is not None:
                    name = model_info(requests[0].variant).name
                    raise status.of_failure(
                        failure.kind, failure.message, failure.retry_after_s, name
                    )
        finally:
            for request in submitted:
                if request.sample in outgoing.left:
                    worker.cancel(request.id)

    async def _write(self, message: pb.GenerateResponse, write: Write) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await write(message)
        except TimeoutError:
            text = f"nothing was read for {self._write_timeout_s:g} s"
            raise status.cancelled(text) from None


async def _came(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes statuses of what a worker refuses.

    Raises:
        StatusError: RESOURCE_EXHAUSTED or UNAVAILABLE.
    """
    try:
        yield
    except InboxFull as error:
        raise status.resource_exhausted(str(error), error.retry_after_s) from None
    except Draining as error:
        raise status.unavailable(str(error)) from None
    except QuotaSpent as error:
        raise status.resource_exhausted(str(error), error.retry_after_s) from None


def resolve(
    router: Router, name: str, field: str, identity: Identity, hold: Hold | None = None
) -> Variant | None:
    """The variant that `name`, the value of `field`, means; None for the base.

    What a caller may not use is to it as what there is not.

    Raises:
        StatusError: INVALID_ARGUMENT, NOT_FOUND, or DATA_LOSS when its manifest is damaged.
        NotTakenIn: with `hold`, see `Router.resolve`.
    """
    try:
        return resolve_for(identity, router, name, hold)
    except InvalidModelName as error:
        raise invalid(field, str(error)) from None
    except UnknownModel as error:
        raise status.not_found("zen.v1.Variant", name, str(error)) from None
    except VariantCorrupt:
        raise damaged(name) from None


def resolve_for(
    identity: Identity, router: Router, name: str, hold: Hold | None = None
) -> Variant | None:
    """What a name means to a caller: what it may not use is to it as what there is not.

    Raises:
        UnknownModel, VariantCorrupt, NotTakenIn: as `Router.resolve`.
    """
    if not identity.may_use(name) and can_be_name(name):
        raise UnknownModel(name)
    return router.resolve(name, hold)


def damaged(name: str) -> StatusError:
    """DATA_LOSS of a model."""
    return status.data_loss(f"{name} is damaged in the store; run zen verify")
