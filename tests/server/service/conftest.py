"""GenerateService over a real channel, with a worker that does what each test says."""

import functools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_status import rpc_status

from server.incoming import Limits
from server.records import CallRecord
from server.requests import (
    Finish,
    FinishReason,
    OnEvent,
    Request,
    Timings,
    TokenEvent,
)
from server.router import Router
from server.service import GenerateService
from server.status import ErrorInterceptor
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt, VariantNotFound
from zen_jax.tokenizer import Tokenizer

CODER = Variant("coder", 3, "d1g3st", Path("/nowhere"))
LIMITS = Limits(max_length=64, vocab_size=264)


class FakeStore:
    """Knows "coder", "mute" without a tokenizer, and "torn", whose manifest is damaged."""

    def variant(self, name: str) -> Variant:
        if name == "torn":
            raise VariantCorrupt("torn/1", "manifest.json", "is not an object")
        if name not in ("coder", "mute"):
            raise VariantNotFound(name)
        return replace(CODER, name=name)


class FakeTokenizer(Tokenizer):
    """One token per character; `boom` stands for a fault inside.

    Attributes:
        encoded: how many texts were tokenized.
        gate: what tokenizing waits for.
    """

    encoded = 0
    gate = threading.Event()

    def __init__(self) -> None:
        """Needs none of what a tokenizer is made of."""

    @functools.cached_property
    def longest_bytes(self) -> int:
        return 4

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        FakeTokenizer.encoded += 1
        if text.startswith("slow"):
            self.gate.wait(10)
        if text.startswith("boom"):
            raise RuntimeError(f"cannot encode {text}")
        return [1] * add_bos + [ord(c) % 256 for c in text]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[0]["role"] == "nobody":
            raise ValueError("no role nobody" + "!" * 100_000)
        return [2] + [len(m["content"]) for m in messages]


def find_tokenizer(variant: Variant | None) -> Tokenizer:
    if variant is not None and variant.name == "mute":
        raise ValueError("/secret/path/tokenizer.json is missing")
    return FakeTokenizer()


@dataclass
class FakeWorker:
    """Calls `script(request, on_event)` in a thread for each request, and records the rest."""

    script: Callable[[Request, OnEvent], None] = lambda request, on_event: None
    refusal: Exception | None = None
    full: Exception | None = None
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancel_seen: threading.Event = field(default_factory=threading.Event)

    def reserved(self) -> AbstractContextManager[None]:
        if self.full is not None:
            raise self.full
        return nullcontext()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        threading.Thread(target=self.script, args=(request, on_event)).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.cancel_seen.set()


def finish(
    reason: FinishReason = "length", matched_stop: int | None = None, text: str | None = None
) -> Finish:
    return Finish(reason, matched_stop, 5, 2, Timings(0.1, 0.2, 0.3, 0.6), text, 3)


def answer(*texts: str) -> Callable[[Request, OnEvent], None]:
    def script(request: Request, on_event: OnEvent) -> None:
        for i, text in enumerate(texts):
            last = finish() if i == len(texts) - 1 else None
            on_event(TokenEvent(request.id, text, (i,), last))

    return script


@dataclass
class Served:
    stub: generate_pb2_grpc.GenerateServiceStub
    service: GenerateService
    channel: grpc.aio.Channel

    async def generate(self, request: pb.GenerateRequest, **options) -> list[pb.GenerateResponse]:
        return [message async for message in self.stub.Generate(request, **options)]

    async def refused(self, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, list]:
        call = self.stub.Generate(request)
        with pytest.raises(grpc.RpcError):
            async for _ in call:
                pass
        rich = await rpc_status.aio.from_call(call)
        return await call.code(), await call.details(), list(rich.details if rich else ())


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(answer("Hel", "lo"))


@pytest.fixture
def records() -> list[CallRecord]:
    """What is kept of calls that are over."""
    return []


@pytest.fixture
async def served(worker: FakeWorker, records: list[CallRecord]) -> AsyncIterator[Served]:
    service = GenerateService(
        router=Router(FakeStore()),
        tokenizers=find_tokenizer,
        write_timeout_s=1.0,
        observers=[records.append],
    )
    service.accept(worker, LIMITS)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(generate_pb2_grpc.GenerateServiceStub(channel), service, channel)
    await server.stop(None)


@pytest.fixture
def ask() -> Callable[..., pb.GenerateRequest]:
    """Makes a request of a model, a prompt and sampling settings."""

    def make(model="coder", prompt="Hi", **sampling) -> pb.GenerateRequest:
        return pb.GenerateRequest(model=model, prompt=prompt, sampling=pb.Sampling(**sampling))

    return make


@pytest.fixture
def parts() -> SimpleNamespace:
    """What the service of these tests is made of."""
    return SimpleNamespace(
        coder=CODER,
        limits=LIMITS,
        store=FakeStore,
        tokenizer=FakeTokenizer,
        find_tokenizer=find_tokenizer,
        finish=finish,
        answer=answer,
    )
