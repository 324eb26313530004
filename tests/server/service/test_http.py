"""How an HTTP request ends, with a worker that does what each test says."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from server.http import app, serving
from server.http.app import Api
from server.http.models import Models
from server.http.serving import HttpServer
from server.requests import Draining, Failure, InboxFull, OnEvent, Request, TokenEvent
from server.rights import Gate
from server.router import Router


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """What an event stream brought; the end's mark as it is."""
        lines = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Http:
    """Asks by hand, one connection a request."""

    server: HttpServer
    writers: list[asyncio.StreamWriter]

    async def open(self, limit: int | None = None) -> tuple[Any, asyncio.StreamWriter]:
        host, port = self.server.address.split(":")
        connection = socket.socket()
        if limit is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**24)
        self.writers.append(writer)
        return reader, writer

    async def begin(self, path: str, body: Any, limit: int | None = None, **headers: str) -> Any:
        """Sends a request, and returns what the answer can be read of, and the connection."""
        reader, writer = await self.open(limit)
        method = "GET" if body is None else "POST"
        data = b"" if body is None else json.dumps(body).encode()
        head = {"host": "x", "connection": "close", "content-length": str(len(data))}
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
        return reader, writer

    async def ask(self, path: str, body: Any = None, **headers: str) -> Response:
        reader, _ = await self.begin(path, body, **headers)
        return await response(reader)


async def response(reader: asyncio.StreamReader) -> Response:
    async with asyncio.timeout(10):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in lines if line)}
        body = await reader.read()
    if headers.get("transfer-encoding") == "chunked":
        whole, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            whole, rest = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        body = whole
    return Response(int(first.split()[1]), headers, body)


@pytest.fixture
async def http(served, parts) -> AsyncIterator[Http]:
    store = SimpleNamespace(names=lambda: ["coder", "torn"])
    api = Api(
        served.service,
        Models(store, Router(parts.store())),
        parts.find_tokenizer,
        metrics=lambda: b"",
        enter=Gate(None, operators=False).enter,
        live=lambda: served.service.refusal != "the engine has stopped",
        write_timeout_s=1.0,
    )
    server = HttpServer(api.app(), "127.0.0.1", 0, 1.0)
    await server.start()
    http = Http(server, [])
    yield http
    for writer in http.writers:
        writer.close()
    await server.stop(1)


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "coder", "messages": [{"role": "user", "content": "Hi"}]} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "coder", "prompt": "Hi"} | fields


KINDS = [
    ("cancelled", 499),
    ("deadline", 504),
    ("load_failed", 409),
    ("does_not_fit", 409),
    ("timed_out", 503),
    ("corrupt", 500),
    ("exhausted", 429),
    ("withdrawn", 409),
    ("unavailable", 503),
    ("internal", 500),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_becomes_a_status(http, worker, stream):
    for kind, code in KINDS:
        worker.script = lambda request, on_event, kind=kind: on_event(
            Failure(request.id, kind, "what went wrong", 2.5)
        )
        answer = await http.ask(TEXT, text(stream=stream))
        assert answer.status == code, kind
        assert answer.headers["content-type"] == "application/json"
        assert answer.error["message"] == "what went wrong"
        assert set(answer.error) == {"message", "type", "param", "code"}
        if kind in ("exhausted", "unavailable", "timed_out"):
            assert answer.headers["retry-after"] == "3"
        vain = kind in ("deadline", "load_failed", "does_not_fit", "corrupt", "internal")
        assert ("x-should-retry" in answer.headers) == vain, kind


async def test_a_failure_behind_the_first_text_is_the_streams_last_event(http, worker):
    def script(request, on_event):
        on_event(TokenEvent(request.id, "so far", (1,)))
        on_event(Failure(request.id, "deadline", "what went wrong", None))

    worker.script = script
    answer = await http.ask(CHAT, chat(stream=True))
    assert answer.status == 200
    first, told, last = answer.events
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert told["choices"][0]["delta"]["content"] == "so far"
    assert last["error"]["code"] == "deadline_exceeded"
    assert (await http.ask(CHAT, chat())).status == 504


@pytest.mark.parametrize("refusal, code", [(InboxFull("x", 1.5), 429), (Draining(), 503)])
async def test_a_worker_that_takes_none(http, served, worker, refusal, code):
    worker.refusal = refusal
    answer = await http.ask(TEXT, text())
    assert answer.status == code
    assert int(answer.headers["retry-after"]) >= 1
    assert served.service.in_flight == 0


async def test_nothing_is_taken_before_accept_or_after_refuse(http, served, worker, parts):
    served.service.refuse("the server is resting")
    answer = await http.ask(TEXT, text())
    assert (answer.status, answer.error["message"]) == (503, "the server is resting")
    assert answer.headers["retry-after"] == "1"
    assert (await http.ask("/health")).status == 200
    ready = await http.ask("/ready")
    assert (ready.status, ready.error["message"]) == (503, "the server is resting")
    served.service.refuse("the engine has stopped")
    assert (await http.ask("/health")).status == 503
    assert worker.requests == []
    served.service.accept(worker, parts.limits)
    assert (await http.ask("/ready")).status == 200
    assert (await http.ask(TEXT, text())).status == 200


REFUSED = [
    ({"model": "nobody"}, 404, "model"),
    ({"model": "org/name"}, 404, "model"),
    ({"model": "torn"}, 500, None),
    ({"model": "mute"}, 409, None),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": ["a", ""]}, 400, "prompt[1]"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[1, 264]]}, 400, "prompt[0][1]"),
    ({"prompt": "x" * 300}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 64}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 1e40}, 400, "temperature"),
    ({"n": 17}, 400, "n"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logit_bias": {"264": 1}}, 400, "logit_bias"),
    ({"stop": [""]}, 400, "stop[0]"),
    ({"priority": 11}, 400, "priority"),
]


async def test_what_is_refused_is_named(http, worker):
    worker.script = lambda request, on_event: None
    for fields, code, param in REFUSED:
        answer = await http.ask(TEXT, text(**fields))
        assert (answer.status, answer.error["param"]) == (code, param), fields
        assert "sampling" not in answer.error["message"]
        assert "secret" not in answer.error["message"]
    assert worker.cancelled == [request.id for request in worker.requests]


async def test_a_template_that_refuses(http, worker):
    answer = await http.ask(CHAT, chat(messages=[{"role": "nobody", "content": "x"}]))
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert len(answer.body) < 2000
    assert worker.requests == []


async def test_a_fault_sends_an_id_and_no_text(http, worker, caplog):
    with caplog.at_level(logging.ERROR):
        answer = await http.ask(TEXT, text(prompt="boom, said I"))
    assert answer.status == 500
    error_id = answer.error["message"].split()[-1].rstrip(")")
    assert len(error_id) == 12
    assert error_id in caplog.text
    assert "said I" not in answer.error["message"] + caplog.text


async def test_settings_reach_the_worker(http, worker):
    started = time.monotonic()
    await http.ask(TEXT, text(timeout=50, priority=2, max_tokens=7), x_request_timeout="20.5")
    (request,) = worker.requests
    assert 20 < request.deadline - started < 30
    assert (request.priority, request.sampling.max_tokens) == (2, 7)


async def test_what_is_left_of_the_context_is_a_chats_most(http, worker):
    await http.ask(CHAT, chat())
    await http.ask(CHAT, chat(min_tokens=20))
    await http.ask(TEXT, text())
    await http.ask(TEXT, text(min_tokens=20))
    await http.ask(TEXT, text(prompt=[5] * 60))
    most = [request.sampling.max_tokens for request in worker.requests]
    assert most == [62, 62, 16, 20, 4]


async def test_several_prompts_with_several_answers_each(http, worker, parts):
    def script(request, on_event):
        name = f"{request.token_ids[-1]}.{request.sample}"
        on_event(TokenEvent(request.id, name, (1,)))
        on_event(TokenEvent(request.id, "!", (2,), parts.finish()))

    worker.script = script
    answer = (await http.ask(TEXT, text(prompt=[[5], [6], [7]], n=2))).json
    texts = ["5.0!", "5.1!", "6.0!", "6.1!", "7.0!", "7.1!"]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 12,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 9},
    }
    options = {"include_usage": True}
    streamed = await http.ask(
        TEXT, text(prompt=[[5], [6], [7]], n=2, stream=True, stream_options=options)
    )
    *events, counted, done = streamed.events
    found = dict.fromkeys(range(6), "")
    for event in events:
        assert event["usage"] is None
        found[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(found.values()) == texts
    assert (counted["choices"], counted["usage"]) == ([], answer["usage"])
    assert done == "[DONE]"


async def test_the_first_prompt_that_fails_ends_the_others(http, worker):
    def script(request: Request, on_event: OnEvent) -> None:
        if request.token_ids[-1] == 6:
            on_event(Failure(request.id, "corrupt", "what went wrong", None))

    worker.script = script
    answer = await http.ask(TEXT, text(prompt=[[5], [6]]))
    assert answer.status == 500
    others = [request.id for request in worker.requests if request.token_ids[-1] == 5]
    assert worker.cancelled == others


def first_token_only(request: Request, on_event: OnEvent) -> None:
    on_event(TokenEvent(request.id, "x", (1,)))


async def cancelled(worker: Any, within_s: float) -> bool:
    return await asyncio.to_thread(worker.cancel_seen.wait, within_s)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_is_cancelled(http, served, worker, stream):
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def script(request, on_event):
        first_token_only(request, on_event)
        loop.call_soon_threadsafe(asked.set)

    worker.script = script
    reader, writer = await http.begin(TEXT, text(stream=stream))
    await asked.wait()
    if stream:
        await reader.readuntil(b"data: ")
    writer.close()
    assert await cancelled(worker, 2)
    assert worker.cancelled == [worker.requests[0].id]
    assert await served.service.idle(2)


async def test_a_reader_that_stops_reading_is_cut_off(http, worker, caplog):
    def endless(request, on_event):
        for _ in range(400):
            if worker.cancel_seen.wait(0.005):
                return
            on_event(TokenEvent(request.id, "x" * 100_000, (1,)))

    worker.script = endless
    reader, _ = await http.begin(TEXT, text(stream=True), limit=4096)
    await reader.readuntil(b"data: ")
    reader._transport.pause_reading()
    assert await cancelled(worker, 5)
    reader._transport.resume_reading()
    left = await reader.read()
    assert not left.endswith(b"0\r\n\r\n") and b"[DONE]" not in left
    assert caplog.records == []


async def test_an_answer_that_nobody_reads_is_dropped(http, worker, parts, caplog, monkeypatch):
    monkeypatch.setattr(serving, "_watch", lambda *settings: None)  # nor does the system help
    worker.script = lambda request, on_event: on_event(
        TokenEvent(request.id, "x" * 30_000_000, (1,), parts.finish())
    )
    reader, _ = await http.begin(TEXT, text(), limit=4096)
    await reader.readuntil(b"\r\n\r\n")
    reader._transport.pause_reading()
    async with asyncio.timeout(5):
        while True:  # a poll with an end: a connection tells nobody of its end
            if not http.server.connections:
                break
            await asyncio.sleep(0.01)
    assert caplog.records == []


async def test_open_requests_are_bounded_and_health_is_told_all_the_same(
    http, worker, parts, monkeypatch
):
    monkeypatch.setattr(app, "MAX_OPEN", 1)
    worker.script = first_token_only
    reader, writer = await http.begin(TEXT, text(stream=True))
    await reader.readuntil(b"data: ")
    refused = await http.ask(CHAT, chat())
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert (await http.ask("/health")).status == 200
    writer.close()
    assert await cancelled(worker, 2)
    worker.script = parts.answer("again")
    async with asyncio.timeout(5):
        while True:  # a poll with an end: the first request tells nobody of its end
            if (await http.ask(TEXT, text())).status == 200:
                break


async def test_events_after_the_end_disturb_nobody(http, worker, parts):
    def script(request, on_event):
        first_token_only(request, on_event)
        worker.cancel_seen.wait(5)
        first_token_only(request, on_event)

    worker.script = script
    reader, writer = await http.begin(TEXT, text(stream=True))
    await reader.readuntil(b"data: ")
    writer.close()
    assert await cancelled(worker, 2)
    worker.script = parts.answer("again")
    assert (await http.ask(TEXT, text())).json["choices"][0]["text"] == "again"


async def test_models_that_are_damaged_are_left_out(http):
    answer = await http.ask("/v1/models")
    assert [model["id"] for model in answer.json["data"]] == ["base", "coder"]
    assert (await http.ask("/v1/models/torn")).status == 500
    missing = await http.ask("/v1/models/org/nobody")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
