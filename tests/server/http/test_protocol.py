"""HTTP itself, by hand: methods, paths, halves of requests, and those who are in a hurry."""

import json
import socket
import time
from typing import Any

import pytest

from server.http import body, serving

BODY = json.dumps({"model": "base", "prompt": "Hi", "max_tokens": 3, "temperature": 0}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
)


@pytest.fixture
def connect(server):
    """Opens connections; `exchange` sends bytes and reads until the server closes."""
    host, port = server.http.address.split(":")
    opened = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection((host, int(port)), timeout=20))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def exchange(connect):
    def exchange(sent: bytes, end: bool = True) -> bytes:
        connection = connect()
        connection.sendall(sent.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", end))
        received = b""
        while part := connection.recv(65536):
            received += part
        return received

    return exchange


def told(answer: bytes) -> tuple[int, dict[bytes, bytes], Any]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
    return int(first.split()[1]), headers, json.loads(rest) if rest else None


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models?after=x", 200),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/..%2f..%2fetc", 404),
        ("GET", "/v1/models/%ff%00", 404),
        ("GET", "/v1/models/" + "x" * 4000, 404),
        ("GET", "/v1", 404),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/base", 405),
        ("BREW", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_methods_and_paths(exchange, method, path, status):
    found, headers, answer = told(exchange(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()))
    assert found == status
    assert headers[b"content-type"] == b"application/json"
    if status != 200:
        assert answer["error"]["message"]
    if status == 405:
        assert headers[b"allow"]


def test_head_says_what_get_would(exchange):
    got = told(exchange(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"))
    status, headers, answer = told(exchange(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"))
    assert (status, answer) == (200, None)
    assert headers[b"content-length"] == got[1][b"content-length"]


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"ab: cdefgh\r\n" * 5_000 + b"\r\n", 431),
        (HEAD.replace(b"content-length: ", b"content-length: -"), 400),
        (HEAD.replace(b"application/json", b"text/plain") + BODY, 415),
        (HEAD.replace(b"content-length: %d" % len(BODY), b"content-length: 0"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_of_ours(exchange, sent, status):
    found, _, answer = told(exchange(sent, end=sent.startswith(b"POST")))
    assert found == status
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_body_in_chunks(exchange):
    head = HEAD.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    status, _, answer = told(exchange(head + chunks))
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


def test_chunks_that_are_none_free_everything(exchange, left):
    head = HEAD.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked")
    assert exchange(head + b"zz\r\n{}\r\n") == b""
    assert not any(left())


def test_a_body_that_is_too_long_is_told_though_it_was_sent(exchange):
    long = b'{"model": "base", "prompt": "' + b"x" * (6 * 2**20) + b'"}'
    head = HEAD.replace(b"content-length: %d" % len(BODY), b"content-length: %d" % len(long))
    status, _, answer = told(exchange(head + long))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    head = HEAD.replace(b"content-length: %d" % len(BODY), b"content-length: 99999999999")
    assert told(exchange(head))[0] == 413


def test_requests_one_behind_the_other(exchange):
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answers = exchange((HEAD + BODY) * 3 + last, end=False)
    assert answers.count(b"HTTP/1.1 200 ") == 4
    assert answers.count(b'"text_completion"') == 3
    assert answers.endswith(b'{"status":"ok"}')


def ends(connection: socket.socket) -> bool:
    """Whether the server ends a connection without a word."""
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True


def test_half_a_head_is_given_up(connect, monkeypatch):
    monkeypatch.setattr(serving, "_HEAD_S", 0.05)
    for sent in (b"", b"GET /health HTTP/1.1\r\nho"):
        connection = connect()
        connection.sendall(sent)
        assert ends(connection)


def test_half_a_body_is_given_up(connect, monkeypatch, left):
    monkeypatch.setattr(body, "BODY_S", 0.05)
    connection = connect()
    connection.sendall(HEAD + BODY[:10])
    status, headers, _ = told(connection.recv(65536))
    assert (status, headers[b"connection"]) == (408, b"close")
    assert not any(left())


def test_a_client_that_leaves_behind_its_body(connect, left):
    for sent in (HEAD[:30], HEAD, HEAD + BODY[:10], HEAD + BODY):
        connection = connect()
        connection.sendall(sent)
        connection.close()
    end = time.monotonic() + 10
    while any(left()):
        assert time.monotonic() < end
        time.sleep(0.001)  # a poll with an end: a snapshot tells nobody of its change
