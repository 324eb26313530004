"""One HTTP response on its way: whole, or as events that a stream brings."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from server.http.body import ClientGone
from server.http.errors import HttpError

type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# What is handed on at a time, so that a reader who takes none of it is noticed.
_PART_BYTES = 64 * 1024


class Reply:
    """A response, which begins once and ends once.

    Attributes:
        started: whether the client has been told a status already.
        always: headers that it begins with, whatever comes of it.
    """

    def __init__(
        self, send: Send, abort: Callable[[], None], limit_s: float, head: bool = False
    ) -> None:
        """Takes what it is sent by.

        Args:
            send: ASGI's.
            abort: cuts the connection, with what was not read of it yet.
            limit_s: how long one part may wait for its reader, in seconds.
            head: whether the client asked for the headers alone.
        """
        self._asgi_send = send
        self._abort = abort
        self._limit_s = limit_s
        self._turn = asyncio.Lock()
        self._head = head
        self.started = False
        self.always: dict[bytes, bytes] = {}

    async def json(
        self, *parts: bytes, status: int = 200, headers: Mapping[bytes, bytes] | None = None
    ) -> None:
        """Sends a whole body, which is JSON.

        Raises:
            ClientGone: nobody reads it.
        """
        size = sum(map(len, parts))
        await self._start(
            status,
            {
                b"content-type": b"application/json",
                b"content-length": b"%d" % size,
                **(headers or {}),
            },
        )
        for part in () if self._head else parts:
            for at in range(0, len(part), _PART_BYTES):
                await self._body(part[at : at + _PART_BYTES], more=True)
        await self._body(b"", more=False)

    async def error(self, error: HttpError) -> None:
        """Tells what went wrong, in front of an answer or in the middle of a stream."""
        if self.started:
            await self.event(error.body())
            await self._body(b"", more=False)
        else:
            await self.json(error.body(), status=error.status, headers=dict(error.headers()))

    async def event(self, data: bytes) -> None:
        """Sends an event of a stream, which the first one begins.

        Raises:
            ClientGone: nobody reads it.
        """
        async with self._turn:
            if not self.started:
                headers = {
                    b"content-type": b"text/event-stream; charset=utf-8",
                    b"cache-control": b"no-cache",
                    b"x-accel-buffering": b"no",  # for proxies that would gather events
                }
                await self._start(200, headers)
            await self._body(b"data: " + data + b"\n\n", more=True)

    async def end(self) -> None:
        """Ends a stream well."""
        await self.event(b"[DONE]")
        await self._body(b"", more=False)

    async def cut(self) -> None:
        """Ends the connection, whatever was not read."""
        self._abort()
        await asyncio.sleep(0)  # lets the server see that it is gone

    async def _start(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.started = True
        told = list({**self.always, **headers}.items())
        await self._send({"type": "http.response.start", "status": status, "headers": told})

    async def _body(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._asgi_send(message)
        except TimeoutError:
            await self.cut()
            raise ClientGone from None


def encoded(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
