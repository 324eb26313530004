"""A request's body: read within limits, and taken for JSON only if it is."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NoReturn

from server.http.errors import HttpError, invalid

type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# As much as a message of gRPC may have by default.
MAX_BODY_BYTES = 4 * 1024 * 1024
# A body that is too long is read on for so long, so that its sender hears why it is refused.
_MOST_UNREAD_BYTES = 8 * MAX_BODY_BYTES
# In which all of it has to come.
BODY_S = 30.0
_JSON = "application/json"


class ClientGone(Exception):
    """Nobody is there any more to be answered."""


async def read_body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """All of a request's body.

    Args:
        headers: the request's, by their names in lower case.
        receive: ASGI's.

    Raises:
        HttpError: it is too long (413), comes too slowly (408) or is not said to be JSON (415).
        ClientGone: the connection closed before its end.
    """
    kind = headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind != _JSON:
        raise HttpError(415, f"the content type is not {_JSON}", code="unsupported_media_type")
    told = headers.get("content-length", "")
    if told.isdecimal() and int(told[:19]) > _MOST_UNREAD_BYTES:
        raise _too_long()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > _MOST_UNREAD_BYTES:
                    raise _too_long()
                if size <= MAX_BODY_BYTES:
                    parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        text = f"the body did not come within {BODY_S:g} s"
        raise HttpError(408, text, code="request_timeout", close=True) from None
    if size > MAX_BODY_BYTES:
        raise _too_long()
    return b"".join(parts)


def parse(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Python's reader takes more than JSON has: NaN, infinities, a name twice and lone surrogates are
    refused here.

    Raises:
        HttpError: 400, it is none; the text repeats nothing of it but names.
    """
    try:
        given = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number
        )
        if b"\\u" in body:
            json.dumps(given, ensure_ascii=False).encode()
    except UnicodeError:
        raise invalid(None, "the body is not valid Unicode in UTF-8", "invalid_json") from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply", "invalid_json") from None
    except ValueError as error:
        text = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise invalid(None, f"the body is not valid JSON: {text}", "invalid_json") from None
    if not isinstance(given, dict):
        raise invalid(None, "the body is not a JSON object", "invalid_json")
    return given


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise invalid(name[:64], "is given twice", "invalid_json")
    return found


def _no_number(name: str) -> NoReturn:
    raise invalid(None, f"the body is not valid JSON: {name} is no number of it", "invalid_json")


def _too_long() -> HttpError:
    return HttpError(
        413,
        f"the body is longer than {MAX_BODY_BYTES} bytes",
        code="request_too_large",
        close=True,
    )
