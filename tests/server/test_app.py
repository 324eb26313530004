"""The composed server: what answers when, from the first open port to the last word."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server import health
from server.address import PortInUse
from server.app import ZenServer, running
from server.client import AsyncZenClient, ZenClient, ZenError
from server.health import GENERATE, LIVE, VARIANTS
from server.serve_options import ServeOptions
from zen.v1 import variants_pb2, variants_pb2_grpc
from zen_jax.checkpoint.store import Store

pytestmark = pytest.mark.usefixtures("compiled")

# One slot less than there are variants.
OPTIONS = ServeOptions(
    port=0,
    rows=2,
    slots=2,
    max_length=64,
    inbox=4,
    drain_s=20,
    write_timeout_s=1,
    operators=True,
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(channel: grpc.aio.Channel, *names: str) -> list[int]:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
    return [answer.status for answer in answers]


async def until(channel: grpc.aio.Channel, name: str, status: int) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(5):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=name)):
            if answer.status == status:
                return


@pytest.fixture
async def server(tiny_store: Path) -> AsyncIterator[ZenServer]:
    """Started, not loaded."""
    server = ZenServer(Store(tiny_store), OPTIONS)
    await server.start()
    yield server
    await server.stop()


async def test_health_and_listing_answer_before_the_engine_is_ready(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        live = await check(channel, LIVE, VARIANTS, GENERATE, "")
        assert live == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]
        stub = variants_pb2_grpc.VariantServiceStub(channel)
        listed = await stub.ListVariants(variants_pb2.ListVariantsRequest())
        assert [v.name for v in listed.variants] == ["tiny-a", "tiny-b", "tiny-c"]
        assert {v.state for v in listed.variants} == {variants_pb2.VARIANT_STATE_ABSENT}
        with pytest.raises(grpc.RpcError, match="the server is starting"):
            await stub.LoadVariant(variants_pb2.LoadVariantRequest(name="tiny-a"))
    async with AsyncZenClient(server.address) as client:
        with pytest.raises(ZenError, match="the server is starting") as refused:
            await client.generate("base", "Hi")
    assert refused.value.code == "UNAVAILABLE"
    assert refused.value.retry_after_s


async def test_the_whole_life(server):
    steps = []
    await server.load(lambda *step: steps.append(step))
    assert all(done <= total for _, done, total in steps)
    assert any(what.startswith("compiling") for what, _, _ in steps)
    compiled = server.engine.compiles
    async with (
        AsyncZenClient(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        assert await check(channel, LIVE, VARIANTS, GENERATE, "") == [SERVING] * 4
        answer = await client.generate("tiny-a", "Hi", max_tokens=5, ignore_eos=True, seed=1)
        assert answer.completion.usage.completion_tokens == 5
        assert answer.completion.model.name == "tiny-a"
        again = await client.generate("tiny-a", "Hi", max_tokens=5, ignore_eos=True, seed=1)
        assert again.token_ids == answer.token_ids
        other = await client.generate("base", "Hi", max_tokens=5, ignore_eos=True, seed=1)
        assert other.token_ids != answer.token_ids

        # All take turns in the slots, and come back as they were.
        names = ["tiny-b", "tiny-c", "tiny-a", "base"]
        asked = (client.generate(n, "Hi", max_tokens=5, ignore_eos=True, seed=1) for n in names)
        answers = dict(zip(names, await asyncio.gather(*asked), strict=True))
        assert answers["tiny-a"].token_ids == answer.token_ids
        assert answers["base"].token_ids == other.token_ids
        assert len({tuple(a.token_ids) for a in answers.values()}) == 4
        assert server.engine.compiles == compiled

        # What runs when the server stops may finish; what comes then may not begin.
        running_one = client.stream("tiny-b", "Hi", max_tokens=60, ignore_eos=True)
        texts = aiter(running_one)
        await anext(texts)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        with pytest.raises(ZenError, match="UNAVAILABLE"):
            await client.generate("base", "Hi")
        async for _ in texts:
            pass
        assert running_one.generation.completion.usage.completion_tokens == 60
        assert await stopping


async def test_reflection_lists_the_services(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        names = {s.name for s in (await call.read()).list_services_response.service}
        assert {GENERATE, VARIANTS, "grpc.health.v1.Health"} <= names
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=GENERATE)
        call = stub.ServerReflectionInfo(iter([request]))
        (file,) = (await call.read()).file_descriptor_response.file_descriptor_proto
        assert descriptor_pb2.FileDescriptorProto.FromString(file).package == "zen.v1"


async def test_a_port_has_one_server(server, tiny_store):
    port = int(server.address.split(":")[1])
    second = ZenServer(Store(tiny_store), ServeOptions(port=port))
    with pytest.raises(PortInUse, match=str(port)):
        await second.start()


async def test_an_engine_that_dies_is_told(server, monkeypatch):
    monkeypatch.setattr(health, "_HEARTBEAT_S", 0.01)
    await server.load()
    async with (
        grpc.aio.insecure_channel(server.address) as channel,
        AsyncZenClient(server.address) as client,
    ):
        server.worker.stop()
        for name in (LIVE, GENERATE, ""):
            await until(channel, name, NOT_SERVING)
        with pytest.raises(ZenError, match="the engine has stopped"):
            await client.generate("base", "Hi")
        assert await client.list_variants()


async def test_a_stop_interrupts_loading(server):
    entered = threading.Event()

    def slow(what: str, done: int, total: int) -> None:
        entered.set()
        threading.Event().wait(0.02)

    loading = asyncio.create_task(server.load(slow))
    assert await asyncio.to_thread(entered.wait, 10)
    assert await server.stop()
    await loading
    assert server.worker is None


def test_running_serves_from_a_thread(tiny_store):
    with (
        running(Store(tiny_store), OPTIONS) as server,
        ZenClient(server.address) as client,
    ):
        assert client.generate("tiny-c", "Hi", max_tokens=1).token_ids
        assert client.list_variants().slots == 2
    with ZenClient(server.address) as client, pytest.raises(ZenError, match="UNAVAILABLE"):
        client.generate("base", "Hi")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServeOptions(rows=0),
        lambda: ServeOptions(slots=0),
        lambda: ServeOptions(inbox=0),
        lambda: ServeOptions(devices=0),
        lambda: ServeOptions(port=65536),
        lambda: ServeOptions(drain_s=float("nan")),
        lambda: ServeOptions(products="float16"),
    ],
)
def test_options_that_cannot_be(make: Callable[[], ServeOptions]):
    with pytest.raises(ValueError, match=r"expected"):
        make()


@pytest.mark.parametrize(
    "options, told",
    [
        (ServeOptions(port=0, max_length=257), "257"),
        (ServeOptions(devices=9), "9"),
        (ServeOptions(kv_bytes=1 << 60), "kv_bytes is 1152921504606846976; the devices have"),
        (ServeOptions(host_bytes=100), "host_bytes is 100; expected no less than the"),
    ],
)
async def test_options_that_do_not_fit_the_model_or_the_machine(tiny_store, options, told):
    server = ZenServer(Store(tiny_store), options)
    with pytest.raises(ValueError, match=told):
        await server.load()
    await server.stop()
