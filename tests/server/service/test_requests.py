"""What a request may say, and what the worker gets of it."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from server.auth import ANYBODY, Identity, Right, answering
from server.incoming import Limits
from server.records import CallRecord
from server.requests import TokenEvent
from server.router import Hold, Router
from server.service import GenerateService
from server.status import StatusError
from zen.v1 import generate_pb2 as pb
from zen_jax.sampling import SamplingParams

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


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
        usage=pb.Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3),
        seed=7,
        timings=pb.Timings(
            queued_seconds=0.1, load_seconds=0.2, prefill_seconds=0.3, first_token_seconds=0.6
        ),
        model=pb.ModelInfo(name="coder", version=3, digest="d1g3st"),
    )
    assert worker.cancelled == []
    assert served.service.in_flight == 0


async def test_text_is_sent_before_the_next_comes(served, worker, parts):
    proceed = threading.Event()

    def script(request, on_event):
        on_event(TokenEvent(request.id, "first", (1,)))
        assert proceed.wait(5)
        on_event(TokenEvent(request.id, "", (2,), parts.finish("stop", 2)))

    worker.script = script
    call = served.stub.Generate(ask())
    assert (await call.read()).text == "first"
    proceed.set()
    last = await call.read()
    assert last.completion.finish_reason == pb.FINISH_REASON_STOP
    assert last.completion.matched_stop_token_id == 2
    assert last.completion.HasField("matched_stop_token_id")
    assert await call.read() is EOF


async def test_the_worker_gets_what_was_asked(served, worker, parts):
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
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={5: 2.5, 6: -1},
            min_tokens=2,
            stop=["end", "\n\n"],
            logprobs=0,
            prompt_logprobs=3,
        ),
        timeout=100,
    )
    (request,) = worker.requests
    assert request.variant == parts.coder
    assert request.token_ids == (1, ord("H"), ord("i"))
    assert request.seed == 0
    assert request.sampling == SamplingParams(
        max_tokens=3,
        temperature=0,
        top_k=4,
        top_p=0.5,
        seed=0,
        stop_token_ids=(9, 8),
        ignore_eos=True,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={5: 2.5, 6: -1},
        min_tokens=2,
        stop=("end", "\n\n"),
        n=1,
        logprobs=0,
        prompt_logprobs=3,
    )
    assert 95 < request.deadline - started < 105
    assert request.priority == 0


async def test_the_worker_gets_the_priority(served, worker):
    await served.generate(_urgent(7))
    assert [request.priority for request in worker.requests] == [7]


async def test_what_is_left_out_takes_its_default(served, worker, parts):
    messages = await served.generate(ask("base"))
    (request,) = worker.requests
    assert request.variant is None
    assert request.deadline is None
    room = parts.limits.max_length - 3  # less than the default of 128
    assert request.sampling == SamplingParams(max_tokens=room)
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


def _urgent(priority: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="coder", prompt="Hi", priority=priority)


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
        (ask(min_tokens=62), ["sampling.min_tokens"]),
        (ask(n=17, stop=[""]), ["sampling.n", "sampling.stop[0]"]),
        (ask("", "", top_p=float("nan")), ["model", "prompt", "sampling.top_p"]),
        (_urgent(11), ["priority"]),
        (_urgent(-11), ["priority"]),
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
        ask(min_tokens=61),
        ask(prompt="x" * 62),
        ask(top_k=-1),
        ask(top_p=1),
        _tokens(*[0] * 63),
        ask(seed=2**64 - 1),
        _urgent(10),
        _urgent(-10),
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
    served, monkeypatch, request_, field, parts
):
    def never(*_: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(parts.tokenizer, "encode", never)
    monkeypatch.setattr(parts.tokenizer, "chat", never)
    code, text, _ = await served.refused(request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith(f"{field}: is ") and "context of 64" in text


async def _happens(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    def wait() -> bool:
        end = time.monotonic() + within_s
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)  # a poll with an end: the other thread gives no signal
        return condition()

    assert await asyncio.to_thread(wait)


async def test_calls_that_wait_to_be_tokenized_take_no_turn_once_they_are_over(
    served, worker, monkeypatch, parts
):
    monkeypatch.setattr(parts.tokenizer, "gate", threading.Event())
    monkeypatch.setattr(parts.tokenizer, "encoded", 0)
    slow = [asyncio.create_task(served.generate(ask(prompt="slow"))) for _ in range(2)]
    await _happens(lambda: parts.tokenizer.encoded == 2)
    # Nobody else gets a turn: these end while they wait.
    gone = [served.stub.Generate(ask()) for _ in range(20)]
    late = [served.stub.Generate(ask(), timeout=1.0) for _ in range(20)]
    await _happens(lambda: served.service.in_flight == 42)
    for call in gone:
        call.cancel()
    await _happens(lambda: served.service.in_flight == 2)
    assert [await call.code() for call in late] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 20
    parts.tokenizer.gate.set()
    await asyncio.gather(*slow)
    await served.generate(ask())
    assert parts.tokenizer.encoded == 3
    assert len(worker.requests) == 3


def test_a_deadline_that_has_passed_ends_the_preparation(worker, parts):
    service = GenerateService(router=Router(parts.store()), tokenizers=parts.find_tokenizer)
    with pytest.raises(StatusError, match="deadline"):
        service._prepare(
            ask(), time.monotonic() - 1, parts.limits, 8, ANYBODY, CallRecord("x"), Hold(), 0.0
        )


async def test_a_requests_id_is_its_own_while_it_runs(served, worker, parts):
    """Given or made up; another may have it once the first is over."""
    begun, gate = threading.Event(), threading.Event()

    def script(request, on_event):
        begun.set()
        gate.wait(10)
        parts.answer("a")(request, on_event)

    worker.script = script
    named = (("x-request-id", "mine-1"),)
    first = served.stub.Generate(ask(), metadata=named)
    reading = asyncio.ensure_future(first.read())
    assert await asyncio.to_thread(begun.wait, 10)
    assert worker.requests[0].id == "/mine-1"
    second = served.stub.Generate(ask(), metadata=named)
    with pytest.raises(grpc.RpcError):
        await second.read()
    assert await second.code() is grpc.StatusCode.ALREADY_EXISTS
    told = dict(tuple(await second.trailing_metadata()))
    assert told["x-request-id"] == "mine-1" and told["grpc-status-details-bin"]
    gate.set()
    assert (await reading).text == "a"
    await first.read()  # its end
    assert ("x-request-id", "mine-1") in tuple(await first.trailing_metadata())
    assert [m.text for m in await served.generate(ask(), metadata=named)] == ["a"]
    for bad in ("a/b", "x" * 65, "a b", "mine-1#1"):
        call = served.stub.Generate(ask(), metadata=(("x-request-id", bad),))
        with pytest.raises(grpc.RpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(worker.requests) == 2
    # What its samples are called no caller can give.
    await served.generate(ask(n=2), metadata=named)
    assert [request.id for request in worker.requests[2:]] == ["/mine-1", "/mine-1#1"]


async def test_every_call_leaves_a_record_however_it_ends(served, worker, records, parts):
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await served.generate(ask(), metadata=(("traceparent", parent),))
    await served.refused(ask(model="nobody"))
    worker.script = lambda request, on_event: None
    call = served.stub.Generate(ask(), timeout=0.2)
    with pytest.raises(grpc.RpcError):
        await call.read()
    assert await served.service.idle(10)
    await asyncio.sleep(0)  # the record is kept in the same turn as the call ends
    assert [record.code for record in records] == ["OK", "NOT_FOUND", "CANCELLED"]
    first = records[0]
    assert (first.model, first.version, first.samples) == ("coder", 3, 1)
    assert (first.prompt_tokens, first.answer_tokens) == (3, 2)
    assert (first.traceparent, first.trace_id) == (parent, "ab" * 16) and first.seconds > 0
    assert [finish.completion_tokens for finish in first.finishes] == [2]
    assert (records[1].model, records[1].finishes) == ("", [])
    assert len({record.id for record in records}) == 3


@pytest.mark.parametrize("rights", [{Right.generate}, {Right.generate, Right.operate}])
async def test_a_model_that_the_token_does_not_name_is_not_asked(served, worker, rights):
    """Not by an operator either, who sees it."""
    answering(Identity("1", "acme", frozenset({"base"}), frozenset(rights)))
    written: list[pb.GenerateResponse] = []

    async def write(message: pb.GenerateResponse) -> None:
        written.append(message)

    await served.service.run(ask("base"), None, write)
    assert "".join(message.text for message in written) == "Hello"
    with pytest.raises(StatusError, match="coder") as refused:
        await served.service.run(ask("coder"), None, write)
    assert refused.value.status.code == code_pb2.NOT_FOUND
    assert len(worker.requests) == 1
