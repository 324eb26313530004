"""The routes, and what every request passes through on its way in and out."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import status
from server.auth import Identity, Right, answering
from server.http import chat, completions
from server.http.answer import Answer, Shape
from server.http.body import ClientGone, Receive, parse, read_body
from server.http.errors import CANCELLED, HttpError, of_exception
from server.http.models import Models
from server.http.reply import Reply, Send, encoded
from server.http.schema import Call
from server.metrics import CONTENT_TYPE
from server.records import REQUEST_ID, usable_id
from server.service import GenerateService
from zen_jax.checkpoint.manifest import Variant
from zen_jax.tokenizer import Tokenizer

type Scope = MutableMapping[str, Any]
type Handler = Callable[[Scope, Receive, Reply], Awaitable[None]]

# Longer ones are taken apart beside the loop.
_LARGE_BODY_BYTES = 64 * 1024
# Completions that are open at a time, whatever they wait for; each may hold a body.
MAX_OPEN = 256
# Of a request's headers.
MAX_HEAD_BYTES = 32 * 1024
# Where in a request's scope the server puts what cuts its connection.
ABORT = "zen.abort"


# What each path asks for; None is open to anybody.
RIGHTS: Mapping[str, Right | None] = MappingProxyType(
    {
        "/v1/chat/completions": Right.generate,
        "/v1/completions": Right.generate,
        "/v1/models": Right.list,
        "/v1/models/{name:path}": Right.list,
        "/health": None,
        "/ready": None,
        "/metrics": Right.observe,
    }
)


def _method(path: str) -> str:
    return "POST" if path.endswith("completions") else "GET"


def _authorization(scope: Scope) -> list[str]:
    return [text.decode("latin-1") for name, text in scope["headers"] if name == b"authorization"]


class Api:
    """OpenAI's routes over a GenerateService."""

    def __init__(
        self,
        service: GenerateService,
        models: Models,
        tokenizers: Callable[[Variant | None], Tokenizer],
        *,
        enter: Callable[[Right | None, Sequence[str], str], Identity],
        live: Callable[[], bool],
        metrics: Callable[[], bytes],
        write_timeout_s: float,
    ) -> None:
        """Takes the parts that answer.

        Args:
            service: runs what is asked.
            models: what can be asked.
            tokenizers: a variant's tokenizer, the base's for None.
            enter: who asks for a right, by the Authorization headers and the route, as
                `server.rights.Gate` has it.
            live: whether the process works at all.
            metrics: what Prometheus reads.
            write_timeout_s: how long a part of a response may wait for its reader.
        """
        self._service = service
        self._models = models
        self._tokenizers = tokenizers
        self._enter = enter
        self._live, self._metrics = live, metrics
        self._write_timeout_s = write_timeout_s
        self._open = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        handlers: dict[str, Handler] = {
            "/v1/chat/completions": self._completion(chat),
            "/v1/completions": self._completion(completions),
            "/v1/models": self._list,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._read_metrics,
        }
        routes = [
            Route(path, self._asgi(handler, path), methods=[_method(path)])
            for path, handler in handlers.items()
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        app.router.redirect_slashes = False
        return app

    def _asgi(self, handler: Handler, path: str) -> "_Endpoint":
        return _Endpoint(partial(self._serve, handler, path))

    async def _serve(
        self, handler: Handler, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers one request by `handler`, and tells whatever goes wrong."""
        reply = Reply(
            send,
            scope.get(ABORT, lambda: None),
            self._write_timeout_s,
            head=scope["method"] == "HEAD",
        )
        try:
            if sum(len(name) + len(text) for name, text in scope["headers"]) > MAX_HEAD_BYTES:
                text = f"the headers are longer than {MAX_HEAD_BYTES} bytes"
                raise HttpError(431, text, code="headers_too_large", close=True)
            answering(self._enter(RIGHTS[path], _authorization(scope), path))
            await handler(scope, receive, reply)
        except ClientGone:
            pass
        except Exception as error:
            await _tell(of_exception(error), reply)

    def _completion(self, shape: Shape) -> Handler:
        async def handler(scope: Scope, receive: Receive, reply: Reply) -> None:
            since = asyncio.get_running_loop().time()
            if self._open >= MAX_OPEN:
                text = f"{MAX_OPEN} requests are open, which is the limit"
                raise status.resource_exhausted(text, None)
            self._open += 1
            try:
                headers = _headers(scope)
                name = headers[REQUEST_ID] = headers.get(REQUEST_ID) or uuid.uuid4().hex
                if usable_id(name):
                    reply.always[REQUEST_ID.encode()] = name.encode()
                call = await _read_call(shape, scope, receive)
                answer = Answer(call, shape, self._tokenizers, headers)
                await _while_there(answer.run(self._service, since, reply), receive)
            finally:
                self._open -= 1

        return handler

    async def _list(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        found = await asyncio.to_thread(self._models.all)
        await reply.json(encoded({"object": "list", "data": found}))

    async def _model(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        name = scope["path_params"]["name"]
        await reply.json(encoded(await asyncio.to_thread(self._models.one, name)))

    async def _health(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        if not self._live():
            raise status.unavailable("the engine has stopped")
        await reply.json(encoded({"status": "ok"}))

    async def _ready(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        why = self._service.refusal
        if why is not None:
            raise status.unavailable(why)
        await reply.json(encoded({"status": "ready"}))

    async def _read_metrics(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        kind = {b"content-type": CONTENT_TYPE.encode()}
        await reply.json(await asyncio.to_thread(self._metrics), headers=kind)


class _Endpoint:
    """An ASGI application for one route; Starlette takes a bare function for something else."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]}


async def _read_call(shape: Shape, scope: Scope, receive: Receive) -> Call:
    headers = _headers(scope)
    body = await read_body(headers, receive)

    def call() -> Call:
        return shape.call_of(parse(body), headers.get("x-request-timeout"))

    return await asyncio.to_thread(call) if len(body) > _LARGE_BODY_BYTES else call()


async def _no_route(request: Request, error: Exception) -> Response:
    """404 for a path that there is not, 405 for a method that it does not take."""
    path = request.scope["path"][:128]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        failure = HttpError(405, f"{path} takes {allow} only", code="unknown_url", allow=allow)
    else:
        text = f"there is nothing at {path}; GET /v1/models is one of the paths"
        failure = HttpError(404, text, code="unknown_url")
    headers = {k.decode(): v.decode("latin-1") for k, v in failure.headers()}
    return Response(failure.body(), failure.status, headers, "application/json")


async def _tell(error: HttpError, reply: Reply) -> None:
    """Sends an error, unless it is that of a reader who reads nothing."""
    try:
        if reply.started and error.status == CANCELLED:
            await reply.cut()
        else:
            await reply.error(error)
    except ClientGone:
        pass


async def _while_there(work: Coroutine[None, None, None], receive: Receive) -> None:
    """Runs `work` to its end, or until the client has gone.

    Raises:
        ClientGone: it has, and `work` was cancelled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
