"""GenerateService: checks what comes over the wire, submits it, streams what comes of it.

It translates between protobuf messages and the dataclasses of `server.requests`, and decides
nothing else: which variant a name means is the router's business, who runs when is the worker's.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import grpc

from server import status
from server.requests import (
    Draining,
    Failure,
    Finish,
    InboxFull,
    OnEvent,
    Request,
    TokenEvent,
)
from server.router import InvalidModelName, Router, UnknownModel
from server.status import StatusError, Violation
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc
from zen_jax.checkpoint.manifest import BASE, Variant, VariantCorrupt
from zen_jax.sampling import InvalidSampling, SamplingParams
from zen_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 128

# Longer than any pause of a reader that still wants its answer, in seconds.
DEFAULT_WRITE_TIMEOUT_S = 10.0

# Requests whose text is tokenized at a time. More would take the processor from the worker.
_PREPARERS = 2

# Fields of Sampling whose values can be judged one by one, by SamplingParams.
_CHECKED_ALONE = ("max_tokens", "temperature", "top_k", "top_p")

# Longer ones would not fit into the headers that a status travels in.
_MAX_DESCRIPTION = 1000

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


class GenerateWorker(Protocol):
    """What this service asks of the worker; `server.worker.Worker` is one."""

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queues a request; raises InboxFull or Draining."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request; one that is unknown or over is none of its concern."""
        ...


@dataclass(frozen=True)
class Limits:
    """What the engine can take.

    Attributes:
        max_length: positions of a row; prompt and answer share them.
        vocab_size: token ids of every model lie below it.
        own_vocab: how many tokens a variant has, the base for None; else all have vocab_size.
    """

    max_length: int
    vocab_size: int
    own_vocab: Callable[[Variant | None], int] | None = None

    def of(self, variant: Variant | None) -> "Limits":
        """The limits of one variant, or of the base."""
        if self.own_vocab is None:
            return self
        return Limits(self.max_length, self.own_vocab(variant))


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
    ):
        """Takes the parts that are there before an engine is.

        Args:
            tokenizers: a variant's tokenizer, the base's for None; called from helper threads.
            write_timeout_s: how long one message may wait for its reader.
            clock: the worker's clock, in seconds.
        """
        self._router = router
        self._tokenizers = tokenizers
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._engine: _Engine | None = None
        self._refusal = "the server is starting"
        self._preparers = ThreadPoolExecutor(_PREPARERS, "zen-prepare")
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Calls that were accepted and have not ended."""
        return self._in_flight

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no call is in flight; returns whether that came within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

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
        engine = self._engine
        if engine is None:
            raise status.unavailable(self._refusal)
        self._in_flight += 1
        self._idle.clear()
        try:
            remaining_s = context.time_remaining()
            deadline = None if remaining_s is None else self._clock() + remaining_s
            # Files are looked at and text is tokenized there: neither may hold up the loop. A call
            # that is cancelled before its turn takes none.
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._preparers, self._prepare, request, deadline, engine.limits
            )
            await self._answer(prepared, engine.worker, context)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _prepare(
        self, message: pb.GenerateRequest, deadline: float | None, limits: Limits
    ) -> Request:
        """Checks a message, finds its variant and tokenizes its input; raises StatusError."""
        if deadline is not None and deadline <= self._clock():
            raise status.deadline_exceeded("the request's deadline has passed")
        violations = list(check(message, limits))
        if violations:
            raise status.invalid_argument(violations)
        variant = resolve(self._router, message.model, "model")
        try:
            limits = limits.of(variant)
        except VariantCorrupt:
            raise _damaged(model_info(variant).name) from None
        violations = list(check(message, limits))
        if violations:
            raise status.invalid_argument(violations)
        # The worker needs it too: found here, it is not read from files on the loop.
        tokenizer = self._tokenizer(variant)
        _check_size(message, tokenizer, limits)
        token_ids = _token_ids(message, tokenizer)
        sampling = _sampling(message, len(token_ids), limits)
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        return Request(uuid.uuid4().hex, variant, token_ids, sampling, seed, deadline)

    def _tokenizer(self, variant: Variant | None) -> Tokenizer:
        name = model_info(variant).name
        try:
            return self._tokenizers(variant)
        except VariantCorrupt:
            raise _damaged(name) from None
        except (ValueError, OSError) as error:
            _log.error("%s has no tokenizer: %s", name, error)
            text = f"{name} has no tokenizer that can be read"
            raise status.failed_precondition("LOAD_FAILED", name, text) from None

    async def _answer(
        self, request: Request, worker: GenerateWorker, context: grpc.aio.ServicerContext
    ) -> None:
        """Runs `request` and writes what comes of it; the worker is told when nobody listens."""
        loop = asyncio.get_running_loop()
        # Holds no more than the request's max_tokens events.
        events: asyncio.Queue[TokenEvent | Failure] = asyncio.Queue()

        def on_event(event: TokenEvent | Failure) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            worker.submit(request, on_event)
        except InboxFull as error:
            raise status.resource_exhausted(str(error), error.retry_after_s) from None
        except Draining as error:
            raise status.unavailable(str(error)) from None
        over = False
        try:
            while not over:
                message, failure, over = await _next(events, request)
                if message is not None:
                    await self._write(message, context)
                if failure is not None:
                    name = model_info(request.variant).name
                    raise status.of_failure(
                        failure.kind, failure.message, failure.retry_after_s, name
                    )
        finally:
            if not over:
                worker.cancel(request.id)

    async def _write(self, message: pb.GenerateResponse, context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(message)
        except TimeoutError:
            text = f"nothing was read for {self._write_timeout_s:g} s"
            raise status.cancelled(text) from None


async def _next(
    events: asyncio.Queue[TokenEvent | Failure], request: Request
) -> tuple[pb.GenerateResponse | None, Failure | None, bool]:
    """Waits for an event, and takes those that came with it: message, failure, over."""
    message = None
    event = await events.get()
    while True:
        if isinstance(event, Failure):
            return message, event, True
        message = message or pb.GenerateResponse()
        message.text += event.text
        message.token_ids.extend(event.token_ids)
        if event.finish is not None:
            message.completion.CopyFrom(completion(request, event.finish))
            return message, None, True
        if events.empty():
            return message, None, False
        event = events.get_nowait()


def check(message: pb.GenerateRequest, limits: Limits) -> Iterator[Violation]:
    """Yields what can be said against a request without looking at the store.

    A status travels in headers, which are small: no description grows with the request.
    """
    if not message.model:
        yield Violation("model", f"is empty; give a variant's name or {BASE!r}")
    yield from _check_input(message, limits)
    sampling = message.sampling
    for field in _CHECKED_ALONE:
        if sampling.HasField(field):
            try:
                SamplingParams(**{field: getattr(sampling, field)}).validate()
            except InvalidSampling as error:
                yield Violation(f"sampling.{field}", str(error).removeprefix(f"{field} "))
    for i, token_id in enumerate(sampling.stop_token_ids):
        if token_id >= limits.vocab_size:
            yield _outside(f"sampling.stop_token_ids[{i}]", token_id, limits)
            return


def _check_input(message: pb.GenerateRequest, limits: Limits) -> Iterator[Violation]:
    match message.WhichOneof("input"):
        case None:
            yield Violation("input", "is missing; give one of prompt, token_ids and messages")
        case "prompt":
            if not message.prompt:
                yield Violation("prompt", "is empty; give at least one character")
        case "messages":
            if not message.messages.messages:
                yield Violation("messages.messages", "is empty; give at least one message")
            for i, turn in enumerate(message.messages.messages):
                if not turn.role:
                    yield Violation(f"messages.messages[{i}].role", "is empty; give a role")
                    return
        case "token_ids":
            if not message.token_ids.ids:
                yield Violation("token_ids.ids", "is empty; give at least one token")
            if len(message.token_ids.ids) >= limits.max_length:
                yield Violation("token_ids", _too_long(len(message.token_ids.ids), limits))
                return
            for i, token_id in enumerate(message.token_ids.ids):
                if token_id >= limits.vocab_size:
                    yield _outside(f"token_ids.ids[{i}]", token_id, limits)
                    return


def _check_size(message: pb.GenerateRequest, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuses text that is too long whatever its tokens are: to tokenize it would cost time."""
    field = message.WhichOneof("input") or "input"
    texts = [message.prompt, *(turn.content for turn in message.messages.messages)]
    size = sum(len(text.encode()) for text in texts)
    most = (limits.max_length - 1) * tokenizer.longest_bytes
    if size > most:
        raise _invalid(
            field,
            f"is {size} bytes long; this server's context of {limits.max_length} tokens has room "
            f"for no more than {most}",
        )


def _token_ids(message: pb.GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    field = message.WhichOneof("input")
    if field == "token_ids":
        return tuple(message.token_ids.ids)
    if field == "prompt":
        token_ids = tokenizer.encode(message.prompt)
    else:
        turns = [{"role": m.role, "content": m.content} for m in message.messages.messages]
        try:
            token_ids = tokenizer.chat(turns)
        except ValueError as error:  # it repeats the text of no message
            text = f"cannot be laid out: {error}"
            raise _invalid("messages", text[:_MAX_DESCRIPTION]) from None
    if not token_ids:
        raise _invalid(field or "input", "has no token; give at least one")
    return tuple(token_ids)


def _sampling(message: pb.GenerateRequest, prompt_tokens: int, limits: Limits) -> SamplingParams:
    room = limits.max_length - prompt_tokens
    if room < 1:
        raise _invalid(
            message.WhichOneof("input") or "input",
            _too_long(prompt_tokens, limits),
        )
    wanted = message.sampling
    if wanted.HasField("max_tokens") and wanted.max_tokens > room:
        raise _invalid(
            "sampling.max_tokens",
            f"is {wanted.max_tokens}; a context of {limits.max_length} leaves {room} "
            f"behind a prompt of {prompt_tokens} tokens",
        )
    default = SamplingParams()
    return SamplingParams(
        max_tokens=_given(wanted, "max_tokens", min(DEFAULT_MAX_TOKENS, room)),
        temperature=_given(wanted, "temperature", default.temperature),
        top_k=_given(wanted, "top_k", default.top_k),
        top_p=_given(wanted, "top_p", default.top_p),
        seed=_given(wanted, "seed", None),
        stop_token_ids=tuple(wanted.stop_token_ids),
        ignore_eos=wanted.ignore_eos,
    )


def completion(request: Request, finish: Finish) -> pb.Completion:
    """The last message's account of a request that ended well."""
    timings = finish.timings
    return pb.Completion(
        finish_reason=_FINISH_REASONS[finish.reason],
        matched_stop_token_id=finish.matched_stop,
        usage=pb.Usage(
            prompt_tokens=finish.prompt_tokens, completion_tokens=finish.completion_tokens
        ),
        seed=request.seed,
        timings=pb.Timings(
            queued_seconds=timings.queued_s,
            load_seconds=timings.load_s,
            prefill_seconds=timings.prefill_s,
            first_token_seconds=timings.first_token_s,
        ),
        model=model_info(request.variant),
    )


def resolve(router: Router, name: str, field: str) -> Variant | None:
    """The variant that `name`, the value of `field`, means; None for the base.

    Raises:
        StatusError: INVALID_ARGUMENT, NOT_FOUND, or DATA_LOSS when its manifest is damaged.
    """
    try:
        return router.resolve(name)
    except InvalidModelName as error:
        raise _invalid(field, str(error)) from None
    except UnknownModel as error:
        raise status.not_found("zen.v1.Variant", name, str(error)) from None
    except VariantCorrupt:
        raise _damaged(name) from None


def model_info(variant: Variant | None) -> pb.ModelInfo:
    """What answered: a variant, or the base for None."""
    if variant is None:
        return pb.ModelInfo(name=BASE)
    return pb.ModelInfo(name=variant.name, version=variant.version, digest=variant.digest)


def _damaged(name: str) -> StatusError:
    return status.data_loss(f"{name} is damaged in the store; run zen verify")


def _given(sampling: pb.Sampling, field: str, default):
    return getattr(sampling, field) if sampling.HasField(field) else default


def _invalid(field: str, text: str) -> StatusError:
    return status.invalid_argument([Violation(field, text)])


def _too_long(tokens: int, limits: Limits) -> str:
    return (
        f"is {tokens} tokens long; this server's context of {limits.max_length} leaves room for "
        f"{limits.max_length - 1}"
    )


def _outside(field: str, token_id: int, limits: Limits) -> Violation:
    return Violation(
        field, f"is {token_id}; the vocabulary's ids run from 0 to {limits.vocab_size - 1}"
    )
