"""The port: uvicorn in a loop that is not its own, and limits on those who connect."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.address import PortInUse, why_not
from server.connections import HANDSHAKE_S, most_connections
from server.http.app import ABORT, MAX_HEAD_BYTES
from server.http.errors import HttpError
from server.tls import Following, TlsFiles

# In which a request's headers have to come, once a connection is there or something of them is.
_HEAD_S = 10.0
_KEEP_ALIVE_S = 60
# A client that is frozen or cut off is noticed within 20 s, as over gRPC.
_KEEP_ALIVE_PROBES = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2))


class HttpServer:
    """An application on a port. It belongs to the event loop that `start` is called in.

    Attributes:
        address: host:port, once started.
    """

    def __init__(
        self,
        app: Starlette,
        host: str,
        port: int,
        write_timeout_s: float,
        tls: TlsFiles | None = None,
    ) -> None:
        """Takes what is to be served; opens nothing yet.

        Args:
            app: what answers.
            host: the address to listen on.
            port: 0 takes a free one.
            write_timeout_s: how long what was sent may lie unread, in seconds.
            tls: what the server is known by; None speaks in the clear.

        Raises:
            TlsFileError: its files cannot be used.
        """
        self.address = ""
        self._tls = tls
        self._context = context = None if tls is None else Following.of(tls)
        self._host, self._port = host, port
        config = uvicorn.Config(
            app,
            http=_protocol(write_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        self._config = config
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        """Opens the port.

        Raises:
            PortInUse: the address cannot be listened on.
        """
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, address = found[0]
            listener = socket.create_server(address[:2], family=family)
        except (OSError, UnicodeError):
            why = await asyncio.to_thread(why_not, self._host, self._port, "--http-port")
            where = f"{self._host}:{self._port}"
            raise PortInUse(f"cannot listen on {where}; {why or 'the system refuses it'}") from None
        self.address = f"{self._host}:{listener.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.opened.wait()
        if self._tls is not None and self._context is not None:
            self._following = asyncio.create_task(self._context.follow(self._tls))

    async def stop(self, closing_s: float) -> None:
        """Closes the port; responses under way have so many seconds to be read."""
        if self._task is None:
            return
        self._config.timeout_graceful_shutdown = closing_s  # pyright: ignore[reportAttributeAccessIssue]
        self._server.should_exit = True
        await self._task
        if self._following is not None:
            self._following.cancel()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.opened = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Notes when the port is open."""
        loop = asyncio.get_running_loop()
        listen = loop.create_server
        if self.config.ssl is not None:  # uvicorn has no setting for it
            limited = partial(listen, ssl_handshake_timeout=HANDSHAKE_S)
            loop.create_server = limited  # pyright: ignore[reportAttributeAccessIssue]
        try:
            await super().startup(sockets)
        finally:
            loop.create_server = listen
            self.opened.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the program."""
        yield


def _protocol(write_timeout_s: float) -> type[H11Protocol]:
    """The protocol of a connection whose client has so long to read what was sent."""
    most = most_connections()

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._late: asyncio.TimerHandle | None = None
            serve = self.app

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await serve({**scope, ABORT: self.transport.abort}, receive, send)

            self.app = app

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            _watch(transport.get_extra_info("socket"), write_timeout_s)
            if len(self.connections) > most:
                transport.abort()
            self._time_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timing()
            super().connection_lost(exc)

        def timeout_keep_alive_handler(self) -> None:
            """Ends an idle connection, though its client has not read its last answer."""
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            else:
                super().timeout_keep_alive_handler()

        def send_400_response(self, msg: str) -> None:
            """Refuses what is no HTTP, if nothing was begun; cuts it off."""
            if self.cycle is None or self.cycle.response_complete:
                error = HttpError(400, msg, code="invalid_http", close=True)
                self.transport.write(_raw(error))
            self.transport.close()

        def _time_head(self) -> None:
            waits = self.cycle is None or self.cycle.response_complete
            if not waits:
                self._stop_timing()
            elif self._late is None:
                self._late = self.loop.call_later(_HEAD_S, self.transport.abort)

        def _stop_timing(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection


def _watch(connection: socket.socket, write_timeout_s: float) -> None:
    """Has the system end a connection that is dead, or whose client reads nothing any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    unread = ("TCP_USER_TIMEOUT", max(1000, int(2000 * write_timeout_s)))
    for name, value in (*_KEEP_ALIVE_PROBES, unread):
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _raw(error: HttpError) -> bytes:
    """A whole response, for a connection whose state is lost."""
    body = error.body()
    head = (
        f"HTTP/1.1 {error.status} Bad Request\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
