"""What a client is told when something cannot be done, in OpenAI's words.

Every failure of a call is a `StatusError`, made where gRPC's are; here stands what HTTP makes of
one; the status codes are `server.status_table`'s. What HTTP alone can meet, such as a body that is
no JSON, is an `HttpError` from the start.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from google.rpc import code_pb2, error_details_pb2

from server import status
from server.status import StatusError
from server.status_table import TABLE

_INVALID = "invalid_request_error"
_OURS = "server_error"


@dataclass(eq=False)
class HttpError(Exception):
    """A refusal, ready to be sent.

    Attributes:
        status: the HTTP status code.
        message: what is wrong, and what would be right.
        type: OpenAI's name of the kind of error.
        code: a short name of the error itself, or None.
        param: the field at fault, as the client calls it, or None.
        retry_after_s: when another try makes sense, or None.
        close: whether the connection ends with the answer.
        allow: the methods that a path knows, where the method is at fault.
        vain: whether another try of the same is of no use.
    """

    status: int
    message: str
    type: str = _INVALID
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    close: bool = False
    allow: str = ""
    vain: bool = False

    def body(self) -> bytes:
        """The JSON that OpenAI's clients read."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What goes before the body, beside its type and length."""
        headers: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, ceil(self.retry_after_s))))
        if self.vain:
            headers.append((b"x-should-retry", b"false"))
        if self.close:
            headers.append((b"connection", b"close"))
        if self.allow:
            headers.append((b"allow", self.allow.encode("latin-1")))
        return headers


# OpenAI's names for gRPC's codes: the kind of error, and the error itself.
_NAMES: dict[int, tuple[str, str]] = {
    code_pb2.INVALID_ARGUMENT: (_INVALID, "invalid_value"),
    code_pb2.NOT_FOUND: (_INVALID, "model_not_found"),
    code_pb2.ALREADY_EXISTS: ("conflict_error", "already_exists"),
    code_pb2.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    code_pb2.PERMISSION_DENIED: ("permission_error", "permission_denied"),
    code_pb2.FAILED_PRECONDITION: ("conflict_error", "model_not_servable"),
    code_pb2.RESOURCE_EXHAUSTED: ("rate_limit_error", "rate_limit_exceeded"),
    code_pb2.UNAVAILABLE: (_OURS, "unavailable"),
    code_pb2.DEADLINE_EXCEEDED: ("timeout_error", "deadline_exceeded"),
    code_pb2.CANCELLED: (_INVALID, "cancelled"),
    code_pb2.ABORTED: ("conflict_error", "model_unloaded"),
    code_pb2.DATA_LOSS: (_OURS, "model_damaged"),
    code_pb2.INTERNAL: (_OURS, "internal_error"),
}
# Asking again would end in the same way, though OpenAI's clients would by themselves.
_VAIN = frozenset(
    (
        code_pb2.FAILED_PRECONDITION,
        code_pb2.DEADLINE_EXCEEDED,
        code_pb2.DATA_LOSS,
        code_pb2.INTERNAL,
    )
)
CANCELLED = TABLE[code_pb2.CANCELLED].http


def _error(code: int, message: str) -> HttpError:
    kind, name = _NAMES[code]
    return HttpError(TABLE[code].http, message, kind, name, vain=code in _VAIN)


def of_status(error: StatusError, param_of: Callable[[str], str] = str) -> HttpError:
    """What HTTP says of a call's failure.

    Args:
        error: as gRPC would send it.
        param_of: from a field's path in the protobuf request to the client's name of it.
    """
    sent = error.status
    kind = _error(sent.code, sent.message)
    if sent.code == code_pb2.NOT_FOUND:
        kind.param = "model"
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in sent.details:
        if detail.Unpack(bad):
            fields = [(param_of(v.field), v.description) for v in bad.field_violations]
            text = "; ".join(f"{param}: {description}" for param, description in fields)
            if fields[0][0] == "model":  # a name that none can have is a model that there is not
                kind = _error(code_pb2.NOT_FOUND, text)
            kind.message, kind.param = text, fields[0][0]
        elif detail.Unpack(retry):
            kind.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return kind


def of_exception(error: Exception, param_of: Callable[[str], str] = str) -> HttpError:
    """What HTTP says of whatever was raised; of a fault of ours no more than where it is logged."""
    if isinstance(error, HttpError):
        return error
    failure = error if isinstance(error, StatusError) else status.internal_from(error)
    return of_status(failure, param_of)


def invalid(param: str | None, text: str, code: str = "invalid_value") -> HttpError:
    """400: a field, or the body as a whole, is not acceptable."""
    return HttpError(400, text if param is None else f"{param}: {text}", code=code, param=param)


def no_model(text: str) -> HttpError:
    """404 for a model that there is not."""
    return of_status(status.not_found("zen.v1.Variant", "", text))


def shown(value: Any) -> str:
    """A value of JSON in an error's text: briefly, and a text's kind only."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case int() | float():
            return repr(value) if abs(value) < 10**40 else "too large"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
