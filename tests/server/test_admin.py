"""VariantService over a real channel and a real store, with a worker that records."""

import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from server.admin import VariantService
from server.requests import Draining, LoadRefused
from server.router import Router
from server.snapshot import VariantStatus, WorkerSnapshot
from server.status import ErrorInterceptor, StatusError
from zen.v1 import variants_pb2 as pb
from zen.v1 import variants_pb2_grpc
from zen_jax.checkpoint.manifest import Variant
from zen_jax.checkpoint.store import Store

EMPTY = WorkerSnapshot(
    variants=(),
    slots=2,
    rows=4,
    rows_in_use=1,
    waiting=0,
    alive=True,
    step_s=0.01,
    host_used=0,
    host_budget=float("inf"),
    loads=0,
    host_share=0.1,
    compiles=8,
)


@dataclass
class FakeWorker:
    """Answers every call with `answer`, and records it."""

    seen: WorkerSnapshot = EMPTY
    answer: Exception | None = None
    calls: list[tuple] = field(default_factory=list)
    over: bool = False

    def _ask(self, *call) -> Future[None]:
        if self.over:
            raise Draining
        self.calls.append(call)
        future: Future[None] = Future()
        if self.answer is None:
            future.set_result(None)
        else:
            future.set_exception(self.answer)
        return future

    def load(self, variant: Variant) -> Future[None]:
        return self._ask("load", variant.name)

    def unload(self, variant: Variant) -> Future[None]:
        return self._ask("unload", variant.name)

    def pin(self, variant: Variant, pinned: bool) -> Future[None]:
        return self._ask("pin", variant.name, pinned)

    def snapshot(self) -> WorkerSnapshot:
        return self.seen


@dataclass
class Served:
    stub: variants_pb2_grpc.VariantServiceStub
    service: VariantService


@pytest.fixture
def store(tiny_store: Path) -> Store:
    return Store(tiny_store)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
async def served(store: Store, worker: FakeWorker) -> AsyncIterator[Served]:
    service = VariantService(store, Router(store))
    service.attach(worker)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    variants_pb2_grpc.add_VariantServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(variants_pb2_grpc.VariantServiceStub(channel), service)
    await server.stop(None)


async def test_all_are_listed_with_what_the_worker_knows(served, store, worker):
    a, b = store.variant("tiny-a"), store.variant("tiny-b")
    worker.seen = replace(
        EMPTY,
        variants=(
            VariantStatus(replace(a, digest="older"), "resident", 0, False, 0, 0, 9, None, None),
            VariantStatus(a, "resident", 1, True, 3, 0, 1234, None, None),
            VariantStatus(b, "failed", None, False, 0, 2, 0, "it is torn", 9.0),
        ),
    )
    listed = await served.stub.ListVariants(pb.ListVariantsRequest())
    assert (listed.slots, listed.rows, listed.rows_active) == (2, 4, 1)
    assert list(listed.variants) == [
        pb.Variant(
            name="tiny-a",
            version=1,
            digest=a.digest,
            state=pb.VARIANT_STATE_RESIDENT,
            slot=1,
            pinned=True,
            leases=3,
            bytes=1243,
        ),
        pb.Variant(
            name="tiny-b",
            version=1,
            digest=b.digest,
            state=pb.VARIANT_STATE_FAILED,
            waiting=2,
            failure="it is torn",
        ),
        pb.Variant(
            name="tiny-c",
            version=1,
            digest=store.variant("tiny-c").digest,
            state=pb.VARIANT_STATE_ABSENT,
        ),
    ]
    one = await served.stub.GetVariant(pb.GetVariantRequest(name="tiny-a"))
    assert one.variant == listed.variants[0]


CALLS: list[tuple[str, Callable, tuple]] = [
    ("LoadVariant", pb.LoadVariantRequest, ("load", "tiny-a")),
    ("UnloadVariant", pb.UnloadVariantRequest, ("unload", "tiny-a")),
    ("PinVariant", pb.PinVariantRequest, ("pin", "tiny-a", False)),
]
METHODS = [*CALLS, ("GetVariant", pb.GetVariantRequest, ())]


@pytest.mark.parametrize("method, request_, call", CALLS)
async def test_the_worker_is_asked(served, worker, method, request_, call):
    answer = await getattr(served.stub, method)(request_(name="tiny-a"))
    assert worker.calls == [call]
    assert (answer.variant.name, answer.variant.version) == ("tiny-a", 1)


async def test_a_pin_is_passed_on(served, worker):
    await served.stub.PinVariant(pb.PinVariantRequest(name="tiny-b", pinned=True))
    assert worker.calls == [("pin", "tiny-b", True)]


@pytest.mark.parametrize("method, request_, call", METHODS)
@pytest.mark.parametrize(
    "name, code",
    [
        ("nobody", grpc.StatusCode.NOT_FOUND),
        ("base", grpc.StatusCode.INVALID_ARGUMENT),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
        ("../tiny-a", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_name_that_is_none(served, worker, method, request_, call, name, code):
    rpc = getattr(served.stub, method)(request_(name=name))
    with pytest.raises(grpc.RpcError):
        await rpc
    assert await rpc.code() is code
    detail = (await rpc_status.aio.from_call(rpc)).details[0]
    if code is grpc.StatusCode.NOT_FOUND:
        info = error_details_pb2.ResourceInfo()
        assert detail.Unpack(info)
        assert info.resource_name == name
    else:
        bad_request = error_details_pb2.BadRequest()
        assert detail.Unpack(bad_request)
        assert [v.field for v in bad_request.field_violations] == ["name"]
    assert worker.calls == []


@pytest.mark.parametrize(
    "answer, code",
    [
        (LoadRefused("load_failed", "no disk"), grpc.StatusCode.FAILED_PRECONDITION),
        (LoadRefused("does_not_fit", "3 levels"), grpc.StatusCode.FAILED_PRECONDITION),
        (LoadRefused("corrupt", "torn"), grpc.StatusCode.DATA_LOSS),
        (LoadRefused("exhausted", "all pinned", 2.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (LoadRefused("withdrawn", "unloaded"), grpc.StatusCode.ABORTED),
        (RuntimeError("a secret path"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_the_worker_refuses_becomes_a_status(served, worker, answer, code):
    worker.answer = answer
    rpc = served.stub.LoadVariant(pb.LoadVariantRequest(name="tiny-a"))
    with pytest.raises(grpc.RpcError) as refused:
        await rpc
    assert await rpc.code() is code
    assert "secret" not in str(refused.value)


async def test_a_worker_that_has_ended_is_unavailable(served, worker):
    worker.over = True
    rpc = served.stub.LoadVariant(pb.LoadVariantRequest(name="tiny-a"))
    with pytest.raises(grpc.RpcError):
        await rpc
    assert await rpc.code() is grpc.StatusCode.UNAVAILABLE
    assert await served.stub.GetVariant(pb.GetVariantRequest(name="tiny-a"))


@pytest.mark.parametrize("harm", ["deleted", "damaged", "followed by version 2"])
async def test_what_is_in_memory_can_be_seen_and_let_go_whatever_the_store_has(
    tiny_store, tmp_path, worker, harm
):
    path = tmp_path / "store"
    shutil.copytree(tiny_store, path)
    store = Store(path)
    b = store.variant("tiny-b")
    worker.seen = replace(
        EMPTY, variants=(VariantStatus(b, "resident", 1, True, 3, 0, 1234, None, None),)
    )
    if harm == "deleted":
        shutil.rmtree(path / "variants" / "tiny-b")
    elif harm == "damaged":
        (path / "variants" / "tiny-b" / "1" / "manifest.json").write_text("{}")
    else:
        worker.seen = replace(
            worker.seen,
            variants=(
                replace(worker.seen.variants[0], variant=replace(b, version=0, digest="old")),
            ),
        )
    service = VariantService(store, Router(store))
    service.attach(worker)
    listed = await service.ListVariants(pb.ListVariantsRequest(), None)
    one = (await service.GetVariant(pb.GetVariantRequest(name="tiny-b"), None)).variant
    assert [v.name for v in listed.variants] == ["tiny-a", "tiny-b", "tiny-c"]
    for shown in (listed.variants[1], one):
        assert (shown.pinned, shown.leases, shown.bytes) == (True, 3, 1234)
    await service.PinVariant(pb.PinVariantRequest(name="tiny-b", pinned=False), None)
    await service.UnloadVariant(pb.UnloadVariantRequest(name="tiny-b"), None)
    assert worker.calls == [("pin", "tiny-b", False), ("unload", "tiny-b")]
    if harm != "followed by version 2":  # what is new needs the store
        with pytest.raises(StatusError):
            await service.PinVariant(pb.PinVariantRequest(name="tiny-b", pinned=True), None)
        with pytest.raises(StatusError):
            await service.LoadVariant(pb.LoadVariantRequest(name="tiny-b"), None)


async def test_a_damaged_variant_hides_no_other(tiny_store, tmp_path, worker):
    path = tmp_path / "torn"
    shutil.copytree(tiny_store, path)
    (path / "variants" / "tiny-b" / "1" / "manifest.json").write_text("{}")
    store = Store(path)
    service = VariantService(store, Router(store))
    listed = await service.ListVariants(pb.ListVariantsRequest(), None)
    assert [v.name for v in listed.variants] == ["tiny-a", "tiny-b", "tiny-c"]
    assert listed.variants[1].state == pb.VARIANT_STATE_FAILED
    assert "manifest.json" in listed.variants[1].failure
    assert str(tmp_path) not in listed.variants[1].failure


async def test_who_asked_for_what_is_logged(served, caplog):
    caplog.set_level("INFO", "server.call_log")
    await served.stub.LoadVariant(pb.LoadVariantRequest(name="tiny-b"))
    await served.stub.PinVariant(pb.PinVariantRequest(name="tiny-b", pinned=True))
    await served.stub.UnloadVariant(pb.UnloadVariantRequest(name="tiny-b"))
    said = [message.partition(": ")[2] for message in caplog.messages]
    assert said == ["load tiny-b", "pin tiny-b", "unload tiny-b"]
