"""GenerateService over a real channel, with a worker that does what each test says."""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from server.requests import (
    Draining,
    Failure,
    Finish,
    FinishReason,
    InboxFull,
    OnEvent,
    Request,
    Timings,
    TokenEvent,
)
from server.router import Router
from server.service import GenerateService, Limits
from server.status import ErrorInterceptor, StatusError
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt, VariantNotFound
from zen_jax.tokenizer import Tokenizer

CODER = Variant("coder", 3, "d1g3st", Path("/nowhere"))
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
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
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancel_seen: threading.Event = field(default_factory=threading.Event)

    def submit(self, request: Request, on_event: OnEvent) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        threading.Thread(target=self.script, args=(request, on_event)).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.cancel_seen.set()


def finish(reason: FinishReason = "length", matched_stop: int | None = None) -> Finish:
    return Finish(reason, matched_stop, 5, 2, Timings(0.1, 0.2, 0.3, 0.6))


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
async def served(worker: FakeWorker) -> AsyncIterator[Served]:
    service = GenerateService(
        router=Router(FakeStore()),
        tokenizers=find_tokenizer,
        write_timeout_s=1.0,
    )
    service.accept(worker, LIMITS)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(generate_pb2_grpc.GenerateServiceStub(channel), service, channel)
    await server.stop(None)


def ask(model="coder", prompt="Hi", **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=model, prompt=prompt, sampling=pb.Sampling(**sampling))


async def test_token_ids_end_with_the_models_own_vocabulary(served, worker):
    own = {"base": 264, "coder": 266}
    limits = Limits(64, 320, lambda variant: own["base" if variant is None else variant.name])
    served.service.accept(worker, limits)
    for model, size in own.items():
        for fields in ({"token_ids": pb.TokenIds(ids=[size])}, {"prompt": "Hi"}):
            sampling = pb.Sampling(stop_token_ids=[size] if "prompt" in fields else [])
            request = pb.GenerateRequest(model=model, sampling=sampling, **fields)
            code, details, _ = await served.refused(request)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert f"0 to {size - 1}" in details


async def test_an_answer_is_streamed_and_ends_with_an_account(served, worker):
    messages = await served.generate(ask(seed=7))
    assert "".join(m.text for m in messages) == "Hello"
    assert [i for m in messages for i in m.token_ids] == [0, 1]
    assert [m.HasField("completion") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].completion == pb.Completion(
        finish_reason=pb.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=5, completion_tokens=2),
        seed=7,
        timings=pb.Timings(
            queued_seconds=0.1, load_seconds=0.2, prefill_seconds=0.3, first_token_seconds=0.6
        ),
        model=pb.ModelInfo(name="coder", version=3, digest="d1g3st"),
    )
    assert worker.cancelled == []
    assert served.service.in_flight == 0


async def test_text_is_sent_before_the_next_comes(served, worker):
    proceed = threading.Event()

    def script(request, on_event):
        on_event(TokenEvent(request.id, "first", (1,)))
        assert proceed.wait(5)
        on_event(TokenEvent(request.id, "", (2,), finish("stop", 2)))

    worker.script = script
    call = served.stub.Generate(ask())
    assert (await call.read()).text == "first"
    proceed.set()
    last = await call.read()
    assert last.completion.finish_reason == pb.FINISH_REASON_STOP
    assert last.completion.matched_stop_token_id == 2
    assert last.completion.HasField("matched_stop_token_id")
    assert await call.read() is EOF


async def test_the_worker_gets_what_was_asked(served, worker):
    started = time.monotonic()
    await served.generate(
        ask(
            max_tokens=3,
            temperature=0,
            top_k=4,
            top_p=0.5,
            seed=0,
            stop_token_ids=[9, 8],
            ignore_eos=True,
        ),
        timeout=100,
    )
    (request,) = worker.requests
    assert request.variant == CODER
    assert request.token_ids == (1, ord("H"), ord("i"))
    assert request.seed == 0
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (3, 0, 4)
    assert (sampling.top_p, sampling.stop_token_ids, sampling.ignore_eos) == (0.5, (9, 8), True)
    assert 95 < request.deadline - started < 105


async def test_what_is_left_out_takes_its_default(served, worker):
    messages = await served.generate(ask("base"))
    (request,) = worker.requests
    sampling = request.sampling
    assert request.variant is None
    assert request.deadline is None
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1, 0, 1)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((), False)
    assert sampling.max_tokens == LIMITS.max_length - 3  # less than the default of 128
    assert messages[-1].completion.seed == request.seed
    assert messages[-1].completion.model == pb.ModelInfo(name="base")


async def test_the_server_chooses_different_seeds(served, worker):
    for _ in range(3):
        await served.generate(ask())
    assert len({request.seed for request in worker.requests}) == 3


async def test_tokens_and_messages_go_in_as_well(served, worker):
    await served.generate(pb.GenerateRequest(model="coder", token_ids=pb.TokenIds(ids=[263, 0])))
    turns = pb.Messages(messages=[pb.Message(role="user", content="four")])
    await served.generate(pb.GenerateRequest(model="coder", messages=turns))
    assert [request.token_ids for request in worker.requests] == [(263, 0), (2, 4)]


def _messages(*turns: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.Message(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(model="coder", messages=pb.Messages(messages=messages))


def _tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="coder", token_ids=pb.TokenIds(ids=ids))


@pytest.mark.parametrize(
    "request_, fields",
    [
        (ask("m" * 3_000_000), ["model"]),
        (ask("../../etc/passwd"), ["model"]),
        (ask(prompt="x" * 64), ["prompt"]),
        (_tokens(*[3] * 64), ["token_ids"]),
        (_messages(("nobody", "secret")), ["messages"]),
        (ask(max_tokens=62), ["sampling.max_tokens"]),
        (ask("", "", top_p=float("nan")), ["model", "prompt", "sampling.top_p"]),
    ],
)
async def test_a_bad_field_is_named(served, worker, request_, fields):
    code, text, (detail,) = await served.refused(request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    assert detail.Unpack(bad_request)
    assert [violation.field for violation in bad_request.field_violations] == fields
    assert all(violation.description for violation in bad_request.field_violations)
    assert all(name in text for name in fields)
    assert "secret" not in text
    assert worker.requests == []


@pytest.mark.parametrize(
    "request_",
    [
        ask(max_tokens=61),
        ask(prompt="x" * 62),
        ask(top_k=-1),
        ask(top_p=1),
        _tokens(*[0] * 63),
        ask(seed=2**64 - 1),
    ],
)
async def test_the_last_good_value_is_accepted(served, request_):
    assert (await served.generate(request_))[-1].HasField("completion")


@pytest.mark.parametrize(
    "request_, field",
    [
        (ask(prompt="x" * (63 * 4 + 1)), "prompt"),
        (ask(prompt="é" * (63 * 2 + 1)), "prompt"),
        (_messages(*[("user", "x" * 51)] * 5), "messages"),
        (_tokens(*[3] * 1_000_000), "token_ids"),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    served, monkeypatch, request_, field
):
    def never(*_: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(FakeTokenizer, "encode", never)
    monkeypatch.setattr(FakeTokenizer, "chat", never)
    code, text, _ = await served.refused(request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith(f"{field}: is ") and "context of 64" in text


async def _happens(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    def wait() -> bool:
        end = time.monotonic() + within_s
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)
        return condition()

    assert await asyncio.to_thread(wait)


async def test_calls_that_wait_to_be_tokenized_take_no_turn_once_they_are_over(
    served, worker, monkeypatch
):
    monkeypatch.setattr(FakeTokenizer, "gate", threading.Event())
    monkeypatch.setattr(FakeTokenizer, "encoded", 0)
    slow = [asyncio.create_task(served.generate(ask(prompt="slow"))) for _ in range(2)]
    await _happens(lambda: FakeTokenizer.encoded == 2)
    # Nobody else gets a turn: these end while they wait.
    gone = [served.stub.Generate(ask()) for _ in range(20)]
    late = [served.stub.Generate(ask(), timeout=1.0) for _ in range(20)]
    await _happens(lambda: served.service.in_flight == 42)
    for call in gone:
        call.cancel()
    await _happens(lambda: served.service.in_flight == 2)
    assert [await call.code() for call in late] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 20
    FakeTokenizer.gate.set()
    await asyncio.gather(*slow)
    await served.generate(ask())
    assert FakeTokenizer.encoded == 3
    assert len(worker.requests) == 3


def test_a_deadline_that_has_passed_ends_the_preparation(worker):
    service = GenerateService(router=Router(FakeStore()), tokenizers=find_tokenizer)
    with pytest.raises(StatusError, match="deadline"):
        service._prepare(ask(), time.monotonic() - 1, LIMITS)


async def test_an_unknown_model_is_not_found(served, worker):
    code, text, (detail,) = await served.refused(ask("nobody"))
    assert code is grpc.StatusCode.NOT_FOUND
    info = error_details_pb2.ResourceInfo()
    assert detail.Unpack(info)
    assert (info.resource_type, info.resource_name) == ("zen.v1.Variant", "nobody")
    assert "nobody" in text
    assert worker.requests == []


async def test_a_damaged_manifest_is_data_loss(served, worker):
    code, text, _ = await served.refused(ask("torn"))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "torn" in text
    assert worker.requests == []


async def test_a_variant_without_a_tokenizer_cannot_be_served(served, worker):
    code, text, _ = await served.refused(ask("mute"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "mute" in text
    assert "secret" not in text
    assert worker.requests == []


@pytest.mark.parametrize(
    "kind, code",
    [
        ("cancelled", grpc.StatusCode.CANCELLED),
        ("deadline", grpc.StatusCode.DEADLINE_EXCEEDED),
        ("load_failed", grpc.StatusCode.FAILED_PRECONDITION),
        ("does_not_fit", grpc.StatusCode.FAILED_PRECONDITION),
        ("corrupt", grpc.StatusCode.DATA_LOSS),
        ("exhausted", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("withdrawn", grpc.StatusCode.ABORTED),
        ("unavailable", grpc.StatusCode.UNAVAILABLE),
        ("internal", grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_failure_becomes_a_status_after_its_text(served, worker, kind, code):
    def script(request, on_event):
        on_event(TokenEvent(request.id, "so far", (1,)))
        on_event(Failure(request.id, kind, "what went wrong", 2.5))

    worker.script = script
    call = served.stub.Generate(ask())
    assert (await call.read()).text == "so far"
    with pytest.raises(grpc.RpcError):
        await call.read()
    assert await call.code() is code
    assert "what went wrong" in await call.details()
    if kind in ("exhausted", "unavailable"):
        rich = await rpc_status.aio.from_call(call)
        assert rich is not None
        assert _retry_s(list(rich.details)) == 2.5
    assert worker.cancelled == []


def _retry_s(details: list) -> float:
    retry_info = error_details_pb2.RetryInfo()
    assert details[0].Unpack(retry_info)
    return retry_info.retry_delay.ToTimedelta().total_seconds()


async def test_a_full_inbox_says_when_to_come_back(served, worker):
    worker.refusal = InboxFull(8, 1.5)
    code, _, details = await served.refused(ask())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _retry_s(details) == 1.5
    assert served.service.in_flight == 0


async def test_a_draining_worker_is_unavailable(served, worker):
    worker.refusal = Draining()
    code, _, details = await served.refused(ask())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert _retry_s(details) > 0


async def test_nothing_is_taken_before_accept_or_after_refuse(served, worker):
    served.service.refuse("the server is resting")
    code, text, _ = await served.refused(ask())
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the server is resting")
    assert worker.requests == []
    served.service.accept(worker, LIMITS)
    assert await served.generate(ask())


def _first_token_only(request: Request, on_event: OnEvent) -> None:
    on_event(TokenEvent(request.id, "x", (1,)))


async def _is_cancelled(worker: FakeWorker, within_s: float) -> bool:
    return await asyncio.to_thread(worker.cancel_seen.wait, within_s)


async def test_cancelling_reaches_the_worker_at_once(served, worker):
    worker.script = _first_token_only
    call = served.stub.Generate(ask())
    await call.read()
    call.cancel()
    assert await _is_cancelled(worker, 1)
    assert worker.cancelled == [worker.requests[0].id]
    await asyncio.sleep(0)
    assert served.service.in_flight == 0


async def test_a_client_that_goes_away_is_cancelled(served, worker):
    worker.script = _first_token_only
    call = served.stub.Generate(ask())
    await call.read()
    await served.channel.close()
    assert await _is_cancelled(worker, 1)


async def test_a_deadline_that_passes_mid_stream_is_cancelled(served, worker):
    worker.script = _first_token_only
    call = served.stub.Generate(ask(), timeout=1.0)
    await call.read()
    with pytest.raises(grpc.RpcError):
        await call.read()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await _is_cancelled(worker, 2)


async def test_a_reader_that_stops_reading_is_cut_off(served, worker):
    def endless(request, on_event):
        for _ in range(400):
            if worker.cancel_seen.wait(0.005):
                return
            on_event(TokenEvent(request.id, "x" * 100_000, (1,)))

    worker.script = endless
    call = served.stub.Generate(ask())
    await call.read()
    assert await _is_cancelled(worker, 5)
    with pytest.raises(grpc.RpcError):
        while await call.read() is not EOF:
            pass
    assert await call.code() is grpc.StatusCode.CANCELLED


async def test_a_reader_that_goes_away_while_stuck_leaves_no_error(served, worker, caplog):
    def flood(request, on_event):
        while not worker.cancel_seen.wait(0.005):
            on_event(TokenEvent(request.id, "x" * 100_000, (1,)))

    worker.script = flood
    call = served.stub.Generate(ask())
    await call.read()
    assert await _is_cancelled(worker, 5)
    call.cancel()
    await asyncio.sleep(0.1)
    assert caplog.records == []
    assert served.service.in_flight == 0


async def test_events_after_the_end_disturb_nobody(served, worker):
    def script(request, on_event):
        on_event(TokenEvent(request.id, "x", (1,)))
        worker.cancel_seen.wait(5)
        on_event(TokenEvent(request.id, "y", (2,)))

    worker.script = script
    call = served.stub.Generate(ask())
    await call.read()
    call.cancel()
    assert await _is_cancelled(worker, 1)
    worker.script = answer("again")
    assert (await served.generate(ask()))[-1].text == "again"


async def test_a_fault_sends_an_id_and_no_text(served, worker, caplog):
    with caplog.at_level(logging.ERROR):
        code, text, _ = await served.refused(ask(prompt="boom, said I"))
    assert code is grpc.StatusCode.INTERNAL
    error_id = text.split()[-1].rstrip(")")
    assert len(error_id) == 12
    assert error_id in caplog.text
    assert "RuntimeError" in caplog.text
    assert "said I" not in text + caplog.text
    assert worker.requests == []
