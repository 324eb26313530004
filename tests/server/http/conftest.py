"""A small store, served over gRPC and HTTP from one process."""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.app import ZenServer, running
from server.serve_options import ServeOptions
from zen_jax.checkpoint.store import Store


@pytest.fixture(scope="session")
def server(tiny_store: Path, compiled: Path) -> Iterator[ZenServer]:
    """Of test_app's sizes, which are compiled once for both."""
    options = ServeOptions(
        port=0,
        http_port=0,
        rows=2,
        slots=2,
        max_length=64,
        inbox=16,
        write_timeout_s=2,
        drain_s=20,
    )
    with running(Store(tiny_store), options) as server:
        yield server


@pytest.fixture
def client(server: ZenServer) -> Iterator[openai.OpenAI]:
    """The official client, which asks once."""
    with openai.OpenAI(
        base_url=f"http://{server.http.address}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


@pytest.fixture
def left(server: ZenServer) -> Callable[[], list[int]]:
    """What nobody may hold once all requests have ended."""

    def count() -> list[int]:
        seen = server.worker.snapshot()
        held = [count for v in seen.variants for count in (v.leases, v.waiting)]
        return [seen.rows_in_use, seen.waiting, *held]

    return count


@pytest.fixture
def post(server: ZenServer) -> Iterator[Callable[[str, bytes], tuple[int, bytes]]]:
    """Sends bytes to a path, on one connection, and returns status and body."""
    connection = http.client.HTTPConnection(*server.http.address.split(":"), timeout=30)

    def send(path: str, body: bytes) -> tuple[int, bytes]:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    yield send
    connection.close()


@pytest.fixture
def ask(post: Callable[[str, bytes], tuple[int, bytes]]) -> Callable[..., tuple[int, Any]]:
    """Sends fields to a path, and returns status and what the body says."""

    def send(path: str, **fields: Any) -> tuple[int, Any]:
        status, body = post(path, json.dumps(fields).encode())
        return status, json.loads(body)

    return send
