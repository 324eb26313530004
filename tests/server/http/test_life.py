"""What HTTP answers from the first open port to the last word."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.address import PortInUse
from server.app import ZenServer
from server.serve_options import ServeOptions
from zen_jax.checkpoint.store import Store

pytestmark = pytest.mark.usefixtures("compiled")

OPTIONS = ServeOptions(
    port=0, http_port=0, rows=2, slots=2, max_length=64, drain_s=20, write_timeout_s=1
)


@pytest.fixture
async def server(tiny_store: Path) -> AsyncIterator[ZenServer]:
    """Started, not loaded."""
    server = ZenServer(Store(tiny_store), OPTIONS)
    await server.start()
    yield server
    await server.stop()


def client_of(server: ZenServer) -> openai.AsyncOpenAI:
    assert server.http is not None
    url = f"http://{server.http.address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)


async def get(server: ZenServer, path: str) -> tuple[int, Any]:
    host, port = server.http.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


async def test_the_whole_life(server):
    async with client_of(server) as client:
        assert (await get(server, "/health"))[0] == 200
        status, told = await get(server, "/ready")
        assert (status, told["error"]["message"]) == (503, "the server is starting")
        assert [model.id async for model in client.models.list()][1] == "tiny-a"
        with pytest.raises(openai.InternalServerError, match="the server is starting") as refused:
            await client.completions.create(model="base", prompt="Hi")
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"]

        await server.load()
        assert (await get(server, "/ready"))[0] == 200
        settings: dict[str, Any] = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(
            model="tiny-b",
            prompt="Hi",
            stream=True,
            stream_options={"include_usage": True},
            **settings,
        )
        chunks = aiter(stream)
        await anext(chunks)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)  # lets the stop begin
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            await client.completions.create(model="base", prompt="Hi")
        assert (await get(server, "/ready"))[0] == 503
        last = None
        async for chunk in chunks:
            last = chunk
        assert last.usage.completion_tokens == 60
        assert await stopping
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()


async def test_an_engine_that_dies_is_told(server):
    await server.load()
    server.worker.stop()
    status, told = await get(server, "/health")
    assert (status, told["error"]["message"]) == (503, "the engine has stopped")
    async with client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="stopp") as refused:
            await client.completions.create(model="base", prompt="Hi")
        assert refused.value.status_code == 503


async def test_a_port_has_one_server(server, tiny_store):
    port = int(server.http.address.split(":")[1])
    second = ZenServer(Store(tiny_store), ServeOptions(port=0, http_port=port))
    with pytest.raises(PortInUse, match="--http-port 0"):
        await second.start()
    await second.stop()
