"""A small store, served over gRPC and HTTP from one process, whose traces are collected."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from server.app import ZenServer, running
from server.serve_options import ServeOptions
from zen_jax.checkpoint.store import Store


class Collector(trace_grpc.TraceServiceServicer):
    """What OpenTelemetry's collector is to a server: it takes spans in, by OTLP over gRPC."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.spans += [
            span for r in request.resource_spans for s in r.scope_spans for span in s.spans
        ]
        return trace_pb.ExportTraceServiceResponse()

    def of(self, trace: str, count: int) -> dict[str, Any]:
        """A trace's spans by name, once there are so many."""
        end = time.monotonic() + 20
        while True:
            found = {s.name: s for s in self.spans if s.trace_id.hex() == trace}
            if len(found) >= count:
                return found
            assert time.monotonic() < end, found
            time.sleep(0.02)  # they are sent once a second, by a thread that tells nobody

    def close(self) -> None:
        self._server.stop(0)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tiny_store: Path, compiled: Path, collector: Collector) -> Iterator[ZenServer]:
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
        traces=collector.url,
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
