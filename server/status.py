"""The errors of the wire: gRPC status codes with google.rpc details, and what sends them.

Whatever a service cannot do, it raises as a `StatusError` made by a function of this module; the
`ErrorInterceptor` sends it. Any other exception reaches the client as INTERNAL with an id and
nothing else, since the text of an exception can hold prompts and paths. The log gets the id, the
exception's type and the places in the code, and no text either.
"""

import asyncio
import inspect
import logging
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from server.auth import OPERATOR, Identity, answering
from server.requests import FailureKind
from server.status_table import TABLE

_log = logging.getLogger(__name__)

# What a client is asked to wait where nothing better is known, in seconds.
DEFAULT_RETRY_S = 1.0


@dataclass(frozen=True)
class Violation:
    """One field of a request that is not acceptable: its path in the message, and why."""

    field: str
    description: str


class StatusError(Exception):
    """An RPC's failure, ready to be sent.

    Attributes:
        status: code, message and details as google.rpc defines them.
    """

    def __init__(self, status: status_pb2.Status):
        super().__init__(status.message)
        self.status = status


def invalid_argument(violations: Sequence[Violation]) -> StatusError:
    """INVALID_ARGUMENT with a BadRequest that names every field in `violations` (at least one)."""
    details = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
            for v in violations
        ]
    )
    text = "; ".join(f"{v.field}: {v.description}" for v in violations)
    return _error(code_pb2.INVALID_ARGUMENT, text, details)


def not_found(kind: str, name: str, text: str) -> StatusError:
    """NOT_FOUND with a ResourceInfo for `name`, a resource of the type `kind`."""
    return _error(code_pb2.NOT_FOUND, text, _resource(kind, name, text))


def already_exists(kind: str, name: str, text: str) -> StatusError:
    """ALREADY_EXISTS with a ResourceInfo for `name`, a resource of the type `kind`."""
    return _error(code_pb2.ALREADY_EXISTS, text, _resource(kind, name, text))


def failed_precondition(kind: str, name: str, text: str) -> StatusError:
    """FAILED_PRECONDITION with a PreconditionFailure of the type `kind` about `name`."""
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=kind, subject=name, description=text
    )
    details = error_details_pb2.PreconditionFailure(violations=[violation])
    return _error(code_pb2.FAILED_PRECONDITION, text, details)


def unauthenticated(text: str) -> StatusError:
    """UNAUTHENTICATED."""
    return _error(code_pb2.UNAUTHENTICATED, text)


def permission_denied(text: str) -> StatusError:
    """PERMISSION_DENIED."""
    return _error(code_pb2.PERMISSION_DENIED, text)


def resource_exhausted(text: str, retry_after_s: float | None) -> StatusError:
    """RESOURCE_EXHAUSTED with a RetryInfo of `retry_after_s` seconds (None: a default)."""
    return _error(code_pb2.RESOURCE_EXHAUSTED, text, _retry_info(retry_after_s))


def unavailable(text: str, retry_after_s: float | None = None) -> StatusError:
    """UNAVAILABLE with a RetryInfo of `retry_after_s` seconds (None: a default)."""
    return _error(code_pb2.UNAVAILABLE, text, _retry_info(retry_after_s))


def deadline_exceeded(text: str) -> StatusError:
    """DEADLINE_EXCEEDED."""
    return _error(code_pb2.DEADLINE_EXCEEDED, text)


def cancelled(text: str) -> StatusError:
    """CANCELLED."""
    return _error(code_pb2.CANCELLED, text)


def aborted(text: str) -> StatusError:
    """ABORTED."""
    return _error(code_pb2.ABORTED, text)


def data_loss(text: str) -> StatusError:
    """DATA_LOSS."""
    return _error(code_pb2.DATA_LOSS, text)


def internal(text: str) -> StatusError:
    """INTERNAL; `text` holds an id to look for in the server's log, and nothing from inside."""
    return _error(code_pb2.INTERNAL, text)


def internal_from(error: BaseException) -> StatusError:
    """Logs where `error` was raised, without its text, and returns the INTERNAL to send for it."""
    error_id = uuid.uuid4().hex[:12]
    places = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    _log.error("error %s: %s (text withheld)\n%s", error_id, type(error).__name__, places)
    return internal(f"a fault in the server (error {error_id})")


def of_failure(kind: FailureKind, text: str, retry_after_s: float | None, name: str) -> StatusError:
    """The status for a failure of the model `name` (see `server.requests.Failure`)."""
    match kind:
        case "cancelled":
            return cancelled(text)
        case "deadline":
            return deadline_exceeded(text)
        case "load_failed":
            return failed_precondition("LOAD_FAILED", name, text)
        case "timed_out":
            return unavailable(text, retry_after_s)
        case "not_taken_in":
            return failed_precondition("NOT_TAKEN_IN", name, text)
        case "does_not_fit":
            return failed_precondition("DOES_NOT_FIT", name, text)
        case "corrupt":
            return data_loss(text)
        case "exhausted":
            return resource_exhausted(text, retry_after_s)
        case "withdrawn":
            return aborted(text)
        case "unavailable":
            return unavailable(text, retry_after_s)
        case "internal":
            return internal(text)


# From a method's full name and a call's metadata to who calls; raises a StatusError.
type Authorize = Callable[[str, Iterable[tuple[str, str | bytes]]], Identity]


def _anybody(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
    return OPERATOR


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets nobody in who may not, and turns what handlers raise into statuses, for every RPC."""

    def __init__(self, authorize: Authorize = _anybody) -> None:
        """Takes what decides who may call what; anybody may, unless it is given."""
        self._authorize = authorize

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call; an unknown method keeps gRPC's own UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        details: Any = handler_call_details
        who: Identity | Exception
        try:
            who = self._authorize(details.method, details.invocation_metadata)
        except Exception as error:
            who = error

        def enter(request: Any) -> None:
            """In the call's own task, before its handler."""
            if isinstance(who, Exception):
                raise who
            answering(who)
            _check_decoded(request)

        guard = _guard_stream if handler.response_streaming else _guard_unary
        kinds = {
            (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        }
        behaviour, make = kinds[handler.request_streaming, handler.response_streaming]
        read = handler.request_deserializer
        if isinstance(who, Exception):
            read = None  # what somebody sends who may not is not even parsed
        elif not handler.request_streaming:
            read = _lenient(read)
        return make(guard(behaviour, enter), read, handler.response_serializer)


class _Undecodable:
    """Stands for a message that is none; gRPC itself would answer it with INTERNAL or UNKNOWN."""


def _lenient(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:  # whatever protobuf raises; its text may repeat the message
            return _Undecodable()

    return read


def _check_decoded(request: Any) -> None:
    if isinstance(request, _Undecodable):
        text = "is not what zen/v1/*.proto says it is; texts have to be UTF-8"
        raise invalid_argument([Violation("message", text)])


def _guard_unary(behaviour: Callable, enter: Callable[[Any], None]) -> Callable:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            enter(request)
            return await behaviour(request, context)
        except Exception as error:
            await _send(context, error)

    return guarded


def _guard_stream(behaviour: Callable, enter: Callable[[Any], None]) -> Callable:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            enter(request)
            answer = behaviour(request, context)
            if inspect.isasyncgen(answer):
                async for piece in answer:
                    await context.write(piece)
            else:
                await answer
        except Exception as error:
            await _send(context, error)

    return guarded


async def _send(context: Any, error: Exception) -> None:
    """Ends a call with `error`, or without a word when there is nobody left to tell."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    gone = isinstance(error, grpc.aio.InternalError)  # what a write to a closed call raises
    if not gone:
        failure = error if isinstance(error, StatusError) else internal_from(error)
        told = rpc_status.to_status(failure.status)
        kept = tuple(context.trailing_metadata() or ())
        try:
            await context.abort(told.code, told.details, (*kept, *told.trailing_metadata))
        except grpc.aio.InternalError:
            gone = True
    if gone:
        raise asyncio.CancelledError


def _error(code: int, text: str, details: message.Message | None = None) -> StatusError:
    described = TABLE[code].details
    assert described == ("" if details is None else type(details).__name__), described
    packed = []
    if details is not None:
        packed.append(any_pb2.Any())
        packed[0].Pack(details)
    return StatusError(status_pb2.Status(code=code, message=text, details=packed))


def _resource(kind: str, name: str, text: str) -> error_details_pb2.ResourceInfo:
    return error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name, description=text)


def _retry_info(retry_after_s: float | None) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(1e9 * (DEFAULT_RETRY_S if retry_after_s is None else retry_after_s)))
    return error_details_pb2.RetryInfo(retry_delay=delay)
