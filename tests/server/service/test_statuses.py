"""How a call ends: with which status, and what the worker is told."""

import asyncio
import logging
from dataclasses import replace
from typing import Any, get_args

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from server import status
from server.requests import (
    Draining,
    Failure,
    FailureKind,
    InboxFull,
    OnEvent,
    Request,
    TokenEvent,
)
from server.status import Violation
from server.status_table import PAGE, TABLE, with_table

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


async def test_an_unknown_model_is_not_found(served, worker, ask):
    code, text, (detail,) = await served.refused(ask("nobody"))
    assert code is grpc.StatusCode.NOT_FOUND
    info = error_details_pb2.ResourceInfo()
    assert detail.Unpack(info)
    assert (info.resource_type, info.resource_name) == ("zen.v1.Variant", "nobody")
    assert "nobody" in text
    assert worker.requests == []


async def test_a_damaged_manifest_is_data_loss(served, worker, ask):
    code, text, _ = await served.refused(ask("torn"))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "torn" in text
    assert worker.requests == []


async def test_a_variant_without_a_tokenizer_cannot_be_served(served, worker, ask):
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
async def test_a_failure_becomes_a_status_after_its_text(served, worker, kind, code, ask):
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


async def test_a_full_inbox_says_when_to_come_back(served, worker, ask):
    worker.refusal = InboxFull("8 requests are waiting", 1.5)
    code, _, details = await served.refused(ask())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _retry_s(details) == 1.5
    assert served.service.in_flight == 0


async def test_a_full_queue_refuses_before_anything_is_tokenized(served, worker, parts, ask):
    worker.full = InboxFull("8 requests are waiting", 1.5)
    before = parts.tokenizer.encoded
    code, text, details = await served.refused(ask("nobody"))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _retry_s(details) == 1.5 and "8 requests" in text
    worker.full = Draining("resting")
    code, text, _ = await served.refused(ask())
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "resting")
    assert parts.tokenizer.encoded == before and worker.requests == []
    assert served.service.in_flight == 0


async def test_a_draining_worker_is_unavailable(served, worker, ask):
    worker.refusal = Draining()
    code, _, details = await served.refused(ask())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert _retry_s(details) > 0


async def test_nothing_is_taken_before_accept_or_after_refuse(served, worker, parts, ask):
    served.service.refuse("the server is resting")
    code, text, _ = await served.refused(ask())
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the server is resting")
    assert worker.requests == []
    served.service.accept(worker, parts.limits)
    assert await served.generate(ask())


def _first_token_only(request: Request, on_event: OnEvent) -> None:
    on_event(TokenEvent(request.id, "x", (1,)))


async def _is_cancelled(worker: Any, within_s: float) -> bool:
    return await asyncio.to_thread(worker.cancel_seen.wait, within_s)


async def test_cancelling_reaches_the_worker_at_once(served, worker, ask):
    worker.script = _first_token_only
    call = served.stub.Generate(ask())
    await call.read()
    call.cancel()
    assert await _is_cancelled(worker, 1)
    assert worker.cancelled == [worker.requests[0].id]
    await asyncio.sleep(0)  # lets the handler, which was just cancelled, leave
    assert served.service.in_flight == 0


async def test_a_client_that_goes_away_is_cancelled(served, worker, ask):
    worker.script = _first_token_only
    call = served.stub.Generate(ask())
    await call.read()
    await served.channel.close()
    assert await _is_cancelled(worker, 1)


async def test_a_deadline_that_passes_mid_stream_is_cancelled(served, worker, ask):
    worker.script = _first_token_only
    call = served.stub.Generate(ask(), timeout=1.0)
    await call.read()
    with pytest.raises(grpc.RpcError):
        await call.read()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await _is_cancelled(worker, 2)


async def test_a_reader_that_stops_reading_is_cut_off(served, worker, ask):
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


async def test_a_reader_that_goes_away_while_stuck_leaves_no_error(served, worker, caplog, ask):
    def flood(request, on_event):
        while not worker.cancel_seen.wait(0.005):
            on_event(TokenEvent(request.id, "x" * 100_000, (1,)))

    worker.script = flood
    call = served.stub.Generate(ask())
    await call.read()
    assert await _is_cancelled(worker, 5)
    call.cancel()
    await asyncio.sleep(0.1)  # time for a record that is not to come
    assert caplog.records == []
    assert served.service.in_flight == 0


async def test_events_after_the_end_disturb_nobody(served, worker, parts, ask):
    def script(request, on_event):
        on_event(TokenEvent(request.id, "x", (1,)))
        worker.cancel_seen.wait(5)
        on_event(TokenEvent(request.id, "y", (2,)))

    worker.script = script
    call = served.stub.Generate(ask())
    await call.read()
    call.cancel()
    assert await _is_cancelled(worker, 1)
    worker.script = parts.answer("again")
    assert (await served.generate(ask()))[-1].text == "again"


async def test_a_fault_sends_an_id_and_no_text(served, worker, caplog, ask):
    with caplog.at_level(logging.ERROR):
        code, text, _ = await served.refused(ask(prompt="boom, said I"))
    assert code is grpc.StatusCode.INTERNAL
    error_id = text.split()[-1].rstrip(")")
    assert len(error_id) == 12
    assert error_id in caplog.text
    assert "RuntimeError" in caplog.text
    assert "said I" not in text + caplog.text
    assert worker.requests == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x02\xff\xfe",  # a model's name that is not UTF-8
        b"\x12\x03\xed\xa0\x80",  # half of a surrogate pair as a prompt
        b"\x0a\x7f",  # shorter than it says
        b"\xff\xff\xff\xff\xff",
    ],
)
async def test_what_is_no_message_is_an_invalid_argument(served, worker, data, caplog):
    call = served.channel.unary_stream("/zen.v1.GenerateService/Generate")(data)
    with pytest.raises(grpc.RpcError):
        await call.read()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    rich = await rpc_status.aio.from_call(call)
    assert rich is not None
    bad = error_details_pb2.BadRequest()
    assert rich.details[0].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == ["message"]
    assert worker.requests == [] and not caplog.records


def test_every_status_is_described_and_every_description_is_of_one_that_is_sent():
    made = [
        status.invalid_argument([Violation("x", "y")]),
        status.not_found("a", "b", "c"),
        status.already_exists("a", "b", "c"),
        status.unauthenticated(""),
        status.permission_denied(""),
        *(status.of_failure(kind, "", 1.0, "x") for kind in get_args(FailureKind.__value__)),
    ]
    assert {error.status.code for error in made} == set(TABLE)
    for error in made:
        kinds = [detail.TypeName() for detail in error.status.details]
        described = TABLE[error.status.code].details
        assert kinds == ([f"google.rpc.{described}"] if described else [])


def test_the_page_holds_the_table():
    page = PAGE.read_text()
    assert with_table(page) == page
    with pytest.raises(ValueError, match="expected 2"):
        with_table("no place")


async def test_more_samples_than_may_ever_wait_are_refused_for_good(served, worker, parts, ask):
    served.service.accept(worker, replace(parts.limits, samples=3))
    code, text, _ = await served.refused(ask(n=4))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "this server takes 3 at a time" in text and worker.requests == []
    assert (served.service.at_once(1), served.service.at_once(2)) == (3, 1)
    assert await served.generate(ask(n=3))
