"""How a call ends: with which status, and what the worker is told."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from server.requests import (
    Draining,
    Failure,
    InboxFull,
    OnEvent,
    Request,
    TokenEvent,
)

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
    worker.refusal = InboxFull(8, 1.5)
    code, _, details = await served.refused(ask())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _retry_s(details) == 1.5
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
