"""Everything that can go wrong around a running server, over gRPC, one test each.

After each, nothing is left: no row, page, lease, waiter, load, call, task or open file; and the
next request is served. A full disk while a variant is published is in
tests/zen_jax/checkpoint/test_publish.py, kill -9 there too. Keys and values that variants might
share are looked for in test_paging, health while the weights are read in test_app.
"""

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from server import health
from server.app import ZenServer, running
from server.client import AsyncZenClient, ZenError
from server.client_retries import Retries
from server.serve_options import ServeOptions
from zen.v1 import variants_pb2, variants_pb2_grpc
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_variant

pytestmark = pytest.mark.usefixtures("compiled")

OPTIONS = ServeOptions(
    port=0,
    rows=2,
    slots=2,
    max_length=256,
    inbox=8,
    drain_s=20,
    write_timeout_s=0.5,
    operators=True,
)
ONCE = Retries(attempts=1)
LONG: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True}
# A client as others run it: it says that its answer has begun, and goes on reading slowly or not.
CLIENT = """
import sys, time
from server.client import ZenClient
address, model, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
with ZenClient(address) as client:
    for text in client.stream(model, "Hi", max_tokens=240, ignore_eos=True, n=2, logprobs=20):
        print("begun", flush=True)
        time.sleep(pause)
"""


@pytest.fixture(scope="module")
def store(
    tiny_store: Path, tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Store:
    """With a variant more for each test that needs one which was never loaded."""
    path = tmp_path_factory.mktemp("faults") / "store"
    shutil.copytree(tiny_store, path)
    for letter, name in zip("abc", ("fails", "hangs", "damaged"), strict=True):
        convert_variant(tiny_folders[f"tiny-{letter}"], path, name, scale="matrix")
    return Store(path)


@pytest.fixture(scope="module")
def server(store: Store, compiled: Path) -> Iterator[ZenServer]:
    with running(store, OPTIONS) as server:
        yield server


@pytest.fixture
async def client(server: ZenServer) -> AsyncIterator[AsyncZenClient]:
    async with AsyncZenClient(server.address, ONCE) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what comes by itself."""
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)  # a poll with an end: a snapshot tells nobody of its change


def held(server: ZenServer) -> dict[str, int]:
    """What requests hold."""
    assert server.worker is not None
    seen = server.worker.snapshot()
    return {
        "rows": seen.rows_in_use,
        "waiting": seen.waiting,
        "pages": seen.pages_held,
        "leases": sum(status.leases for status in seen.variants),
        "waiters": sum(status.waiting for status in seen.variants),
        "loading": sum(status.state == "loading" for status in seen.variants),
        "calls": server._generate.in_flight,
    }


def tasks_of(server: ZenServer) -> int:
    """How many its event loop has."""
    assert server._heartbeat is not None
    return len(asyncio.all_tasks(server._heartbeat.get_loop()))


def open_files(server: ZenServer) -> list[str]:
    """Of the store."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # closed meanwhile
            continue
    return [path for path in paths if path.startswith(str(server.store.path))]


@asynccontextmanager
async def leaves_nothing(server: ZenServer, client: AsyncZenClient) -> AsyncIterator[None]:
    """Sees that after the block all is as it was, and that the server serves."""
    expected = await serves(client)
    await until(lambda: not any(held(server).values()))
    tasks = tasks_of(server)
    yield
    await until(lambda: not any(held(server).values()))
    await until(lambda: tasks_of(server) <= tasks)
    assert open_files(server) == []
    assert await serves(client) == expected


async def serves(client: AsyncZenClient) -> list[int]:
    """The tokens of an ordinary answer."""
    answer = await client.generate("tiny-c", "Hello", max_tokens=8, ignore_eos=True, temperature=0)
    assert len(answer.token_ids) == 8
    return answer.token_ids


@asynccontextmanager
async def other_client(server: ZenServer, pause: float) -> AsyncIterator[Any]:
    """A client in a process of its own, whose answer has begun."""
    arguments = ("-c", CLIENT, server.address, "tiny-a", str(pause))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def begun(stream: Any) -> Any:
    """The stream, once its first text is there."""
    await anext(aiter(stream))
    return stream


async def refused(answer: Any, code: str) -> ZenError:
    with pytest.raises(ZenError) as caught:
        await answer
    assert caught.value.code == code
    return caught.value


# Clients.


async def test_a_client_that_is_killed(server, client):
    async with leaves_nothing(server, client), other_client(server, 1e3) as process:
        process.kill()


async def test_a_client_that_is_frozen(server, client):
    async with leaves_nothing(server, client):
        async with other_client(server, 1e3) as process:
            process.send_signal(signal.SIGSTOP)
            await until(lambda: not any(held(server).values()))


async def test_a_client_that_reads_slowly_gets_all_of_it(server, client):
    async with leaves_nothing(server, client), other_client(server, 0.001) as process:
        assert await process.wait() == 0


async def test_who_cancels_in_the_queue_or_while_running(server, client):
    async with leaves_nothing(server, client):
        streams = [client.stream("tiny-a", "Hi", **LONG) for _ in range(6)]
        asking = [asyncio.ensure_future(begun(stream)) for stream in streams]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


# Deadlines.


async def test_a_deadline_in_the_queue_and_in_mid_stream(server, client):
    async with leaves_nothing(server, client):
        crowd = [await begun(client.stream("base", "Hi", **LONG)) for _ in range(2)]
        hold = server.worker._engine.decode
        gate = threading.Event()

        def slowly(*arguments: Any) -> Any:
            gate.wait(0.05)  # so that 240 tokens outlast both deadlines
            return hold(*arguments)

        server.worker._engine.decode = slowly
        try:
            await refused(client.generate("base", "Hi", timeout_s=0.2), "DEADLINE_EXCEEDED")
            for stream in crowd:
                stream.cancel()
            late = client.generate("tiny-a", "Hi", timeout_s=0.4, **LONG)
            await refused(late, "DEADLINE_EXCEEDED")
        finally:
            gate.set()
            server.worker._engine.decode = hold


# Loads.


async def test_a_load_that_fails_and_one_that_hangs(server, client, monkeypatch):
    loader = server.worker._loader
    entered, gate = threading.Event(), threading.Event()

    def hangs(variant: Any) -> Any:
        entered.set()
        gate.wait(30)
        raise OSError("too late")

    def fails(variant: Any) -> Any:
        raise OSError("/secret/path: input/output error")

    async with leaves_nothing(server, client):
        with monkeypatch.context() as patch:
            patch.setattr(loader, "_stages", replace(loader._stages, read=fails))
            error = await refused(client.generate("fails", "Hi"), "FAILED_PRECONDITION")
            assert "secret" not in error.message
            assert await serves(client)
        with monkeypatch.context() as patch:
            patch.setattr(loader, "_stages", replace(loader._stages, read=hangs))
            waiting = asyncio.ensure_future(client.generate("hangs", "Hi", timeout_s=1))
            await asyncio.to_thread(entered.wait, 10)
            assert await serves(client)
            await refused(waiting, "DEADLINE_EXCEEDED")
        gate.set()


async def test_a_variant_that_is_damaged_while_the_server_runs(server, client, store):
    chunk = next(p for p in (store.path / "variants" / "damaged").rglob("c*") if p.is_file())
    whole = chunk.read_bytes()
    async with leaves_nothing(server, client):
        chunk.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        error = await refused(client.generate("damaged", "Hi"), "DATA_LOSS")
        assert "damaged" in error.message and str(store.path) not in error.message
    chunk.write_bytes(whole)
    async with grpc.aio.insecure_channel(server.address) as channel:
        load = variants_pb2_grpc.VariantServiceStub(channel).LoadVariant

        async def loaded() -> bool:
            try:
                await load(variants_pb2.LoadVariantRequest(name="damaged"))
            except grpc.RpcError:
                return False
            return True

        async with asyncio.timeout(20):
            while True:
                if await loaded():
                    break
                await asyncio.sleep(0.05)  # its back-off, which nobody is told the end of
    assert await client.generate("damaged", "Hi", max_tokens=3)


# The queue.


async def test_a_queue_has_an_end_and_says_when_to_come_back(server, client):
    async with leaves_nothing(server, client):
        streams = [client.stream("tiny-a", "Hi", **LONG) for _ in range(2)]
        asking = [await begun(stream) for stream in streams]
        queued = [client.stream("tiny-a", "Hi", **LONG) for _ in range(OPTIONS.inbox)]
        waiting = [asyncio.ensure_future(begun(stream)) for stream in queued]
        await until(lambda: held(server)["waiting"] == OPTIONS.inbox)
        error = await refused(client.generate("base", "Hi"), "RESOURCE_EXHAUSTED")
        assert error.retry_after_s
        assert (await client.list_variants()).rows_active == 2  # operators are never refused
        for stream in (*asking, *queued):
            stream.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# The engine.


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_an_engine_that_breaks_answers_everyone_and_says_so(store, how, monkeypatch):
    with running(store, OPTIONS) as server:
        async with AsyncZenClient(server.address, ONCE) as client:
            await breaks_and_says_so(server, client, how, monkeypatch)


async def breaks_and_says_so(
    server: ZenServer, client: AsyncZenClient, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.worker is not None
    monkeypatch.setattr(health, "_HEARTBEAT_S", 0.01)
    gate = threading.Event()

    def breaks(*arguments: Any) -> Any:
        if how == "hangs":
            gate.wait(30)
        raise RuntimeError("my secret")

    running = [await begun(client.stream("tiny-a", "Hi", **LONG)) for _ in range(2)]
    queued = [asyncio.ensure_future(client.generate("tiny-b", "Hi", **LONG)) for _ in range(4)]
    await until(lambda: held(server)["waiting"] == 4)
    monkeypatch.setattr(server.worker._engine, "decode", breaks)
    code = "INTERNAL" if how == "raises" else "UNAVAILABLE"
    if how == "hangs":
        await until(lambda: server.worker._inbox.waiting == 4)
        await asyncio.to_thread(server.worker.abandon, "the engine does not answer any more")
    for answer in (*map(read_on, running), *queued):
        error = await refused(answer, code)
        assert "secret" not in error.message
    await until(lambda: not server.worker.alive)
    error = await refused(client.generate("base", "Hi"), "UNAVAILABLE")
    assert error.retry_after_s
    assert (await client.list_variants()).variants
    assert server._generate.in_flight == 0
    gate.set()


async def read_on(stream: Any) -> None:
    async for _ in stream:
        pass
