"""A server takes in adapters that are asked for, while others are answered."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from server import app, cli
from server.app import ZenServer, running
from server.auth import new_token
from server.client import AsyncZenClient, ZenError
from server.client_access import Access
from server.client_retries import Retries
from server.serve_options import ServeOptions
from zen.v1 import variants_pb2, variants_pb2_grpc
from zen_jax.merge.pool_folder import PoolFolder, member_bytes
from zen_jax.pool_store import PoolStore

pytestmark = pytest.mark.usefixtures("compiled")

ONCE = Retries(attempts=1)
# b is merged into a, c is kept.
ALIKE = ("--adapters", 2, "--policy", "kmerge++", "--threshold", 0.5)
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Scores:
    """M of whatever comes, told by the test: it waits until `go` is set.

    Attributes:
        asked: how often it was asked.
        began: set when it is.
        ratio: of a merge; an adapter alone has 1.
    """

    asked: int = 0
    ratio: float = 1.0
    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    def __call__(self, adapter, tasks) -> float:
        self.asked += 1
        self.began.set()
        assert self.go.wait(30)
        (factors,) = adapter.values()
        return 1.0 if self.asked == 1 else self.ratio if factors.rank == 2 else 1.0


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Scores:
    made = Scores()
    monkeypatch.setattr(app, "scorer_of", lambda *given: made)
    return made


@pytest.fixture
def make(zen, adapters, tiny_store, tmp_path) -> Callable[..., PoolStore]:
    """A pool with adapter a in it, and a folder of the others beside it."""

    def made(*options: object, wanted: str = "bc") -> PoolStore:
        path, folder = tmp_path / "pool", tmp_path / "adapters"
        first = ("--store", tiny_store, "--budget-bytes", "1MiB", *options)
        assert zen("add", path, adapters / "a", *first)[0] == 0
        for name in wanted:
            shutil.copytree(adapters / name, folder / name)
        return PoolStore(tiny_store, path, adapters=folder)

    return made


def state(pool: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    files = (f for f in sorted(pool.rglob("*")) if f.is_file() and f.name != "lock")
    return {str(f.relative_to(pool)): f.read_bytes() for f in files}


def options(**more: object) -> ServeOptions:
    return ServeOptions(port=0, rows=4, max_length=64, **more)  # pyright: ignore[reportArgumentType]


def waiting(server: ZenServer) -> int:
    """Requests that wait for an adapter."""
    assert server._intakes is not None
    return len(server._intakes._told)


async def refused(client: AsyncZenClient, name: str, **more: object) -> ZenError:
    with pytest.raises(ZenError) as caught:
        await client.generate(name, "table", **GREEDY, **more)
    return caught.value


async def soon(holds: Callable[[], bool]) -> None:
    """Waits for what another thread does, 10 s at most."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)  # another thread tells this loop nothing
    raise TimeoutError


async def test_one_asked_for_is_taken_in_and_answers(make, zen, adapters, tiny_store, tmp_path):
    """As `zen pool add` takes it in: the same member, of the same bytes, and the same answer."""
    store = make(*ALIKE)
    with running(store, options()) as server:
        async with AsyncZenClient(server.address) as client:
            names = {v.name: v for v in (await client.list_variants()).variants}
            assert set(names) == {"a", "b", "c"} and names["b"].digest == ""
            answers = await asyncio.gather(
                *(client.generate(name, "table", **GREEDY) for name in ("b", "b", "base", "c"))
            )
            again = await client.generate("b", "table", **GREEDY)
            error = await refused(client, "nobody")
            assert (error.code, "no model is called 'nobody'" in str(error)) == ("NOT_FOUND", True)
            assert (await refused(client, "../a")).code == "INVALID_ARGUMENT"
    first, second, base, other = answers
    assert list(again.completion.model.merged_of) == ["a", "b"]
    assert first.token_ids == second.token_ids == again.token_ids
    assert first.completion.model.digest == again.completion.model.digest
    assert first.completion.timings.load_seconds > again.completion.timings.load_seconds
    assert base.completion.timings.load_seconds == 0
    alone = tmp_path / "alone"
    common = ("--store", tiny_store)
    zen("add", alone, adapters / "a", *common, "--budget-bytes", "1MiB", *ALIKE)
    for name in "bc":
        assert zen("add", alone, adapters / name, *common)[0] == 0
    assert state(store.pool.path).keys() == state(alone).keys()
    assert other.completion.model.digest == PoolFolder(alone).read()[1].find("c").id


async def test_who_asks_waits_as_for_a_load_and_others_do_not(make, scores):
    store = make("--adapters", 2)
    with running(store, options(inbox_per_model=3)) as server:
        async with AsyncZenClient(server.address, retries=ONCE) as client:
            asked = [asyncio.create_task(client.generate("b", "table", **GREEDY)) for _ in "123"]
            await soon(scores.began.is_set)
            await soon(lambda: waiting(server) == 3)
            # Others are answered, one that waits too long or is too many is told so.
            assert (await client.generate("base", "table", **GREEDY)).token_ids
            assert (await client.generate("a", "table", **GREEDY)).token_ids
            assert (await refused(client, "b")).code == "RESOURCE_EXHAUSTED"
            late = await refused(client, "c", timeout_s=0.2)
            assert late.code == "DEADLINE_EXCEEDED"
            asked[0].cancel()
            await soon(lambda: waiting(server) == 2)
            assert scores.asked == 1
            scores.go.set()
            first, second = await asyncio.gather(*asked[1:])
            assert first.token_ids == second.token_ids
            assert list(first.completion.model.merged_of) == ["a", "b"]
    # c was given up before its turn, and b was scored alone and, merged, on a's tasks and its own.
    assert scores.asked == 3
    assert store.table().names() == ["a", "b"]


async def test_an_intake_goes_on_though_who_asked_has_gone(make, scores):
    store = make("--adapters", 2)
    with running(store, options()) as server:
        async with AsyncZenClient(server.address, retries=ONCE) as client:
            asked = asyncio.create_task(client.generate("b", "table", **GREEDY))
            await soon(scores.began.is_set)
            asked.cancel()
            await soon(lambda: waiting(server) == 0)
            scores.go.set()
            await soon(lambda: "b" in store.table().names())


async def test_a_refusal_is_said_and_remembered(make, scores):
    store = make("--adapters", 1, "--gate", 9)
    scores.go.set()
    with running(store, options()) as server:
        async with AsyncZenClient(server.address) as client:
            before = state(store.pool.path)
            error = await refused(client, "b")
            assert error.code == "FAILED_PRECONDITION"
            assert "b is not taken in: the merge into" in str(error)
            assert "all 1 places are taken" in str(error)
            count = scores.asked
            assert str(await refused(client, "b")) == str(error)
            assert scores.asked == count
            assert state(store.pool.path) == before
            # Its files are others: it is looked at anew.
            assert store.adapters is not None
            tasks = store.adapters.path / "b" / "tasks.json"
            tasks.write_bytes(tasks.read_bytes() + b"\n")
            await refused(client, "b")
            assert scores.asked > count
            tasks.unlink()
            error = await refused(client, "b")
            assert (error.code, "/" in str(error)) == ("FAILED_PRECONDITION", False)
            assert "b is no adapter that the pool can take" in str(error)


async def test_a_tenant_starts_no_intake_of_what_it_may_not_see(make, scores, tmp_path):
    store = make("--adapters", 2, wanted="bc")
    file = tmp_path / "tokens.json"
    some = new_token(file, tenant="acme", models=["b", "base"])
    every = new_token(file, tenant="all")
    scores.go.set()
    with running(store, options(tokens=file)) as server:
        address = server.address
        async with AsyncZenClient(address, access=Access(some), retries=ONCE) as client:
            assert (await refused(client, "c")).code == "NOT_FOUND"
            assert scores.asked == 0
            assert [v.name for v in (await client.list_variants()).variants] == ["b"]
            own = await client.generate("b", "table", **GREEDY)
            assert list(own.completion.model.merged_of) == ["b"]
        async with AsyncZenClient(address, access=Access(every)) as client:
            own = await client.generate("b", "table", **GREEDY)
            assert list(own.completion.model.merged_of) == ["a", "b"]


async def test_the_server_stops_during_an_intake(make, zen, scores, adapters, tiny_store):
    store = make("--adapters", 2)
    before = state(store.pool.path)
    with running(store, options(drain_s=0.2)) as server:
        async with AsyncZenClient(server.address, retries=ONCE) as client:
            asked = [asyncio.create_task(refused(client, name)) for name in "bc"]
            await soon(scores.began.is_set)
            await soon(lambda: waiting(server) == 2)
            threading.Timer(0.5, scores.go.set).start()  # after the drain
            stopping = asyncio.run_coroutine_threadsafe(server.stop(), server._loop)  # pyright: ignore[reportArgumentType]
            codes = [(await task).code for task in asked]
            assert codes == ["UNAVAILABLE", "UNAVAILABLE"]
            assert not await asyncio.wrap_future(stopping)
    assert state(store.pool.path) == before
    assert zen("add", store.pool.path, adapters / "b", "--store", tiny_store)[0] == 0


async def test_one_in_line_is_answered_though_the_server_stops(make, scores):
    store = make("--adapters", 2)
    with running(store, options(drain_s=20)) as server:
        async with AsyncZenClient(server.address, retries=ONCE) as client:
            asked = asyncio.create_task(client.generate("b", "table", **GREEDY))
            await soon(scores.began.is_set)
            stopping = asyncio.run_coroutine_threadsafe(server.stop(), server._loop)  # pyright: ignore[reportArgumentType]
            assert (await refused(client, "base")).code == "UNAVAILABLE"
            scores.go.set()
            assert list((await asked).completion.model.merged_of) == ["a", "b"]
            assert await asyncio.wrap_future(stopping)


async def test_another_process_that_changes_the_pool_is_waited_for(make, scores):
    store = make("--adapters", 2)
    scores.go.set()
    with running(store, options()) as server:
        async with AsyncZenClient(server.address) as client:
            with PoolFolder(store.pool.path)._changing():
                asked = asyncio.create_task(client.generate("b", "table", **GREEDY))
                await soon(lambda: waiting(server) == 1)
                assert (await client.generate("a", "table", **GREEDY)).token_ids
                assert scores.asked == 0
            assert list((await asked).completion.model.merged_of) == ["a", "b"]


async def test_operators_load_one_into_the_pool_too(make, scores):
    store = make("--adapters", 2)
    scores.go.set()
    with running(store, options(operators=True)) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = variants_pb2_grpc.VariantServiceStub(channel)
            loaded = await stub.LoadVariant(variants_pb2.LoadVariantRequest(name="b"))
            assert loaded.variant.digest == store.table().find("b").id
            pinned = variants_pb2.PinVariantRequest(name="c", pinned=True)
            held = await stub.PinVariant(pinned)
            assert held.variant.digest == store.table().find("c").id
    assert all(not member.leases for member in store.table().members.values())


async def test_one_that_still_answers_counts_until_its_last_token(
    make, zen, scores, adapters, tiny_store, monkeypatch
):
    """B holds while a request runs on a member that was merged away: what would fit beside the
    others does not yet, and does after the last token."""
    scores.go.set()
    wide = make(*ALIKE)
    alone = wide.table()
    (a,) = alone.members.values()
    task = len((adapters / "a" / "tasks.json").read_bytes())
    room = member_bytes(wide.pool.load(a.id).adapter, 2)
    limit = alone.used + a.bytes + 2 * task + room - 1
    shutil.rmtree(wide.pool.path)
    shutil.rmtree(wide.adapters.path)  # pyright: ignore[reportOptionalMemberAccess]
    store = make("--budget-bytes", limit, *ALIKE)
    file = store.pool.member_path(store.table().find("a").id)
    with running(store, options()) as server:
        engine, go, decoding = server.engine, threading.Event(), threading.Event()
        assert engine is not None
        decode = engine.decode

        def held(*given):
            decoding.set()
            assert go.wait(30)
            return decode(*given)

        monkeypatch.setattr(engine, "decode", held)
        async with AsyncZenClient(server.address, retries=ONCE) as client:
            running_a = asyncio.create_task(client.generate("a", "table", **GREEDY))
            await soon(decoding.is_set)
            assert store.table().find("a").leases == 1
            assert zen("add", store.pool.path, adapters / "b", "--store", tiny_store)[0] == 0
            table = store.table()
            assert file.exists() and list(table.leaving) == [file.stem]
            on_disk = sum(f.stat().st_size for f in (store.pool.path / "members").iterdir())
            counted = [*table.members.values(), *table.leaving.values()]
            assert on_disk == sum(member.bytes for member in counted)
            assert limit >= table.used > limit - room
            # From outside as from within.
            status, _, err = zen("add", store.pool.path, adapters / "c", "--store", tiny_store)
            assert (status, "answer their last requests" in err) == (2, True)
            error = await refused(client, "c")
            assert error.code == "RESOURCE_EXHAUSTED" and error.retry_after_s
            assert "bytes are lacking" in str(error)
            assert not running_a.done()
            go.set()
            assert list((await running_a).completion.model.merged_of) == ["a"]
            await soon(lambda: not file.exists())
            patient = AsyncZenClient(server.address)
            async with patient:
                assert list((await patient.generate("c", "t")).completion.model.merged_of) == ["c"]
            assert store.table().used <= limit
            assert not store.table().leaving


def test_options_that_cannot_be(make, tiny_store, tmp_path, capsys):
    store = make("--adapters", 2)
    for given, said in (
        (["--adapters", str(tmp_path)], "--adapters is for a pool"),
        (["--pool", str(store.pool.path), "--adapters", str(tmp_path / "no")], "is no folder"),
    ):
        assert cli.run(["serve", str(tiny_store), *given]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_nothing_outside_the_folder_is_read(make, tmp_path):
    store = make("--adapters", 2)
    folder = store.adapters
    assert folder is not None
    outside = tmp_path / "outside"
    shutil.copytree(folder.path / "b", outside)
    (folder.path / "linked").symlink_to(outside)
    (folder.path / ".hidden").symlink_to(folder.path / "b")
    shutil.copytree(folder.path / "b", folder.path / "piped")
    (folder.path / "piped" / "adapter_model.safetensors").unlink()
    os.mkfifo(folder.path / "piped" / "adapter_model.safetensors")
    shutil.copytree(folder.path / "b", folder.path / "leaky")
    (folder.path / "leaky" / "tasks.json").unlink()
    (folder.path / "leaky" / "tasks.json").symlink_to(outside / "tasks.json")
    shutil.copytree(folder.path / "b", folder.path / "within")
    (folder.path / "within" / "tasks.json").unlink()
    (folder.path / "within" / "tasks.json").symlink_to(folder.path / "b" / "tasks.json")
    assert folder.names() == ["b", "c", "leaky", "piped", "within"]
    assert store.names() == ["a", "b", "c", "leaky", "piped", "within"]
    for name in ("linked", ".hidden", "..", "../outside", "base", "b/../b", ""):
        assert not folder.holds(name)
    shapes = {name: entry.shape for name, entry in store.base().tensors.items()}
    for name, most, said in (
        ("leaky", 10**6, "leads out"),
        ("piped", 10**6, "is no file"),
        ("b", 10, "tasks.json has"),
        ("linked", 10**6, "there is none"),
    ):
        with pytest.raises(ValueError, match=said):
            folder.read(name, shapes, most)
    assert folder.read("within", shapes, 10**6).name == "within"
    assert json.loads(folder.read("b", shapes, 10**6).tasks)["metric"] == "text"
