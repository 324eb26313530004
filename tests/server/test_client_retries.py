"""When a client asks again by itself, and when it must not."""

import asyncio
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from server import status
from server.client import AsyncZenClient, ZenClient, ZenError
from server.client_retries import Retries
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc


class Moody(generate_pb2_grpc.GenerateServiceServicer):
    """Answers each call by the next of its moods: a StatusError is raised, a text said first."""

    def __init__(self) -> None:
        self.moods: list[list[Any]] = []
        self.calls = 0
        self.limits: list[float | None] = []

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        mood = self.moods[self.calls]
        self.calls += 1
        self.limits.append(context.time_remaining())
        for step in mood:
            if isinstance(step, status.StatusError):
                context.abort_with_status(rpc_status.to_status(step.status))
            yield pb.GenerateResponse(text=step)


BUSY = status.resource_exhausted("full", 0.05)
AWAY = status.unavailable("starting", 0.05)


@pytest.fixture
def moody() -> Moody:
    return Moody()


@pytest.fixture
def address(moody: Moody) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(moody, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def ask(address: str, retries: Retries, kind: str, timeout_s: float | None = None) -> str:
    """One request by either client; its text."""
    options: Any = {} if timeout_s is None else {"timeout_s": timeout_s}
    if kind == "sync":
        with ZenClient(address, retries) as client:
            return client.generate("m", "p", **options).text

    async def wait() -> str:
        async with AsyncZenClient(address, retries) as client:
            return (await client.generate("m", "p", **options)).text

    return asyncio.run(wait())


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@KINDS
@pytest.mark.parametrize("refusal", [BUSY, AWAY])
def test_what_was_refused_is_asked_again_after_the_time_told(moody, address, refusal, kind):
    moody.moods = [[refusal], [refusal], ["a", "b"]]
    began = time.monotonic()
    assert ask(address, Retries(), kind) == "ab"
    assert time.monotonic() - began >= 2 * 0.05
    assert moody.calls == 3


@KINDS
def test_the_last_refusal_is_told(moody, address, kind):
    moody.moods = [[BUSY], [AWAY], ["a"]]
    with pytest.raises(ZenError, match="UNAVAILABLE: starting"):
        ask(address, Retries(attempts=2), kind)
    assert moody.calls == 2


@KINDS
@pytest.mark.parametrize(
    "mood, code",
    [
        (["a", BUSY], "RESOURCE_EXHAUSTED"),  # a part of the answer has been shown
        (["a", AWAY], "UNAVAILABLE"),
        ([status.not_found("k", "n", "t")], "NOT_FOUND"),
        ([status.internal("x")], "INTERNAL"),
        ([status.aborted("x")], "ABORTED"),
    ],
)
def test_nothing_else_is_asked_again(moody, address, mood, code, kind):
    moody.moods = [mood, ["never"]]
    with pytest.raises(ZenError) as caught:
        ask(address, Retries(), kind)
    assert caught.value.code == code
    assert moody.calls == 1


@KINDS
def test_the_time_limit_holds_for_all_attempts_together(moody, address, kind):
    moody.moods = [[status.resource_exhausted("full", 0.3)], ["a"]]
    assert ask(address, Retries(), kind, timeout_s=5) == "a"
    first, second = moody.limits
    assert second <= first - 0.3
    moody.calls = 0
    with pytest.raises(ZenError, match="RESOURCE_EXHAUSTED"):
        ask(address, Retries(), kind, timeout_s=0.25)  # it would come back too late
    assert moody.calls == 1


def test_one_attempt_asks_once(moody, address):
    moody.moods = [[BUSY], ["a"]]
    with pytest.raises(ZenError, match="full"):
        ask(address, Retries(attempts=1), "sync")


@pytest.mark.parametrize("settings", [{"attempts": 0}, {"total_s": -1.0}])
def test_settings_that_cannot_be(settings):
    with pytest.raises(ValueError, match="expected at least 1"):
        Retries(**settings)
