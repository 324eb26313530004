"""The spans of calls: when they begin and end, whose children they are, and what they say."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from server.records import CallRecord, usable_traceparent
from server.requests import Finish, Timings
from server.traces import Traces

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


def record(traceparent: str = "", **given) -> CallRecord:
    """A call that came at 1,000 s and was queued 1 s later."""
    finish = Finish("stop", None, 7, 4, Timings(2.0, 3.0, 4.0, 9.0), None, 5)
    fields = {
        "tenant": "acme",
        "traceparent": traceparent,
        "began_ns": 1_000 * 10**9,
        "queued_s": 1.0,
        "model": "a",
        "version": 3,
        "prompt_tokens": 7,
        "samples": 1,
        "pieces": [(9.0, 1), (11.0, 3)],
        "finishes": [finish],
        "code": "OK",
        "seconds": 12.0,
    }
    return CallRecord("call-1", **{**fields, **given})


def spans(*records: CallRecord, share: float = 1.0):
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, share)
    for each in records:
        traces.observe(each)
    traces.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_the_parts_of_a_call_follow_each_other_and_belong_to_the_callers_trace():
    call = record(SAMPLED)
    made = spans(call)
    at = {
        name: tuple(((at or 0) - call.began_ns) / 1e9 for at in (span.start_time, span.end_time))
        for name, span in made.items()
    }
    assert at == {
        "Generate": (0, 12),
        "prepare": (0, 1),
        "load": (1, 4),
        "queue": (4, 6),
        "prefill": (6, 10),
        "decode": (10, 12),
    }
    whole = made["Generate"]
    assert f"{whole.context.trace_id:032x}" == TRACE == call.trace_id
    assert f"{whole.parent.span_id:016x}" == PARENT and whole.parent.is_remote
    for name in at.keys() - {"Generate"}:
        assert made[name].parent.span_id == whole.context.span_id
    said = dict(whole.attributes)
    assert said["gen_ai.request.model"] == "a" and said["zen.variant.version"] == 3
    assert said["gen_ai.usage.input_tokens"] == 7 and said["gen_ai.usage.output_tokens"] == 4
    assert said["gen_ai.usage.cache_read.input_tokens"] == 5
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert whole.status.status_code is StatusCode.UNSET


def test_a_call_without_a_trace_begins_one_by_its_share():
    call = record()
    assert set(spans(call)) == {"Generate", "prepare", "load", "queue", "prefill", "decode"}
    assert len(call.trace_id) == 32 and call.trace_id != TRACE
    assert spans(record(), share=0.0) == {}
    assert set(spans(record(SAMPLED), share=0.0)) > {"Generate"}, "the caller has decided"
    assert spans(record(UNSAMPLED)) == {}


@pytest.mark.parametrize(("code", "fault"), [("NOT_FOUND", False), ("INTERNAL", True)])
def test_faults_of_the_server_are_errors(code: str, fault: bool):
    made = spans(record(code=code, finishes=[], queued_s=0.0, model=""))
    assert set(made) == {"Generate"}
    assert (made["Generate"].status.status_code is StatusCode.ERROR) == fault
    assert dict(made["Generate"].attributes)["rpc.response.status_code"] == code


def test_a_variant_that_was_there_is_no_wait_and_one_token_no_decoding():
    finish = Finish("length", None, 7, 1, Timings(2.0, 0.0, 4.0, 6.0))
    assert set(spans(record(finishes=[finish]))) == {"Generate", "prepare", "queue", "prefill"}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        SAMPLED + "-1",
        f"01-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        SAMPLED.upper(),
    ],
)
def test_what_is_no_traceparent_is_none(header: str):
    assert usable_traceparent(header) == ("", "")


def test_a_traceparent_names_its_trace():
    assert usable_traceparent(SAMPLED) == (SAMPLED, TRACE)
