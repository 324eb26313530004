"""Lines of log: of calls, and of what is said while one runs."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from server.call_log import LogFormat, Refusals, Seldom, WithRequest, formatter, log_call
from server.records import CallRecord, request_id
from server.requests import Finish, Timings

CALL = CallRecord(
    "call-1",
    token="0123456789ab",
    tenant="acme",
    trace_id="ab" * 16,
    queued_s=1.0,
    model="a",
    version=3,
    prompt_tokens=7,
    samples=1,
    pieces=[(9.0, 4)],
    finishes=[Finish("stop", None, 7, 4, Timings(2.0, 3.0, 4.0, 9.0), None, 5)],
    code="OK",
    seconds=12.0,
)


@contextmanager
def logging_as(kind: LogFormat) -> Iterator[io.StringIO]:
    lines, logger = io.StringIO(), logging.getLogger("server")
    handler = logging.StreamHandler(lines)
    handler.setFormatter(formatter(kind))
    handler.addFilter(WithRequest())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_a_call_is_an_object_a_line():
    with logging_as("json") as lines:
        log_call(CALL)
        log_call(CallRecord("call-2", code="INTERNAL", fault="a fault in the server (error 12)"))
    first, second = (json.loads(line) for line in lines.getvalue().splitlines())
    assert first["request_id"] == "call-1" and first["level"] == "INFO"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert first["call"] == {
        "request_id": "call-1",
        "code": "OK",
        "model": "a",
        "version": 3,
        "tenant": "acme",
        "token": "0123456789ab",
        "trace_id": "ab" * 16,
        "prompt_tokens": 7,
        "answer_tokens": 4,
        "samples": 1,
        "seconds": 12.0,
        "cached_tokens": 5,
        "queued_s": 2.0,
        "load_s": 3.0,
        "prefill_s": 4.0,
        "ttft_s": 10.0,
        "finish": "stop",
    }
    assert second["call"]["fault"] == "a fault in the server (error 12)"
    assert not {"ttft_s", "version"} & second["call"].keys()


def test_a_call_is_a_line_of_text():
    with logging_as("text") as lines:
        log_call(CALL)
    (line,) = lines.getvalue().splitlines()
    assert "request_id=call-1 code=OK model=a version=3" in line and "ttft_s=10.0" in line


def test_what_is_said_for_a_request_has_its_id():
    logger = logging.getLogger("server.somewhere")
    token = request_id.set("call-9")
    try:
        with logging_as("json") as lines:
            logger.warning("two\nlines")
        with logging_as("text") as text:
            logger.warning("hello")
    finally:
        request_id.reset(token)
    with logging_as("text") as other:
        logger.warning("hello")
    assert json.loads(lines.getvalue())["request_id"] == "call-9"
    assert text.getvalue().endswith("hello [request call-9]\n")
    assert other.getvalue().endswith("hello\n")


def test_what_is_said_again_and_again_is_said_once_a_minute():
    now = [0.0]
    seldom = Seldom(lambda: now[0])

    def said(line: int) -> bool:
        return seldom.filter(logging.LogRecord("a", logging.ERROR, "a.py", line, "x", None, None))

    assert [said(1), said(1), said(2), said(2)] == [True, False, True, False]
    now[0] = 59.0
    assert not said(1)
    now[0] = 60.0
    assert said(1) and not said(1)


def test_refusals_are_logged_so_many_a_second(caplog):
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for _ in range(25):
        refusals.log("/a/B", "UNAUTHENTICATED", "")
    assert len(caplog.records) == 10
    now[0] = 1.0
    refusals.log("/a/B", "PERMISSION_DENIED", "0123")
    assert caplog.messages[-1] == (
        "/a/B was not let in: PERMISSION_DENIED, token 0123; 15 more were not logged"
    )
