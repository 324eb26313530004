"""OpenTelemetry traces of calls: where each one's time went, as spans.

    Generate            the call, from when it came; a child of the caller's span, if it named one
      prepare           checked and tokenized
      load              waiting for the variant, if it was not in memory
      queue             waiting for a row
      prefill           reading the prompt, to the first token
      decode            the tokens after it

Spans are made when the call is over, from what was kept of it, so that nothing of this is done
while it runs. They hold names of models, counts and ids: neither prompt nor answer nor token.
Attributes are those of OpenTelemetry's conventions for generative AI where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.records import TRACEPARENT, CallRecord
from server.requests import Finish

# Those of a full buffer are dropped, oldest first.
_MOST_SPANS = 8192
_EXPORT_TIMEOUT_S = 5.0
_CLOSING_S = 3.0
# Faults of the server, as OpenTelemetry's conventions for RPC name them; others are the caller's.
_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}


class Traces:
    """Makes and sends the spans of one server's calls; `observe` is an observer of them."""

    def __init__(self, exporter: SpanExporter, share: float) -> None:
        """Takes what sends spans.

        Args:
            exporter: closed by `close`.
            share: of the calls that belong to no trace yet, from 0 to 1, those that begin one.
                Others are as their caller decided.
        """
        resource = Resource.create({"service.name": "zen", "service.version": version("zen-jax")})
        sampler = ParentBased(TraceIdRatioBased(share))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MOST_SPANS, schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("zen", version("zen-jax"))

    @classmethod
    def to(cls, endpoint: str, share: float) -> Traces:
        """Sends them by OTLP over gRPC.

        Args:
            endpoint: such as `http://localhost:4317`; with https it is TLS, by the system's roots.
            share: as above.
        """
        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S), share)

    def observe(self, record: CallRecord) -> None:
        """Makes the spans of a call that is over."""
        parent = TraceContextTextMapPropagator().extract(
            {TRACEPARENT: record.traceparent} if record.traceparent else {}, Context()
        )
        span = self._tracer.start_span(
            "Generate", parent, SpanKind.SERVER, _attributes(record), start_time=record.began_ns
        )
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
        if span.is_recording():
            if record.code in _FAULTS:
                span.set_status(StatusCode.ERROR, record.code)
            inside = set_span_in_context(span, Context())
            for name, attributes, start_s, end_s in _parts(record):
                part = self._tracer.start_span(
                    name, inside, attributes=attributes, start_time=_at(record, start_s)
                )
                part.end(_at(record, end_s))
        span.end(_at(record, record.seconds))

    def close(self) -> None:
        """Sends what is left and ends; what a collector does not take in some seconds is lost."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSING_S)


def _at(record: CallRecord, seconds: float) -> int:
    return record.began_ns + round(1e9 * seconds)


def _attributes(record: CallRecord) -> dict[str, str | int | list[str]]:
    attributes: dict[str, str | int | list[str]] = {
        "rpc.system.name": "grpc",
        "rpc.response.status_code": record.code,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "zen",
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.answer_tokens,
        "zen.request.id": record.id,
        "zen.tenant": record.tenant,
        "zen.samples": record.samples,
    }
    if record.model:
        attributes["gen_ai.request.model"] = record.model
        attributes["zen.variant.version"] = record.version
    if record.finishes:
        attributes["gen_ai.response.finish_reasons"] = [f.reason for f in record.finishes]
        cached = sum(finish.cached_tokens for finish in record.finishes)
        attributes["gen_ai.usage.cache_read.input_tokens"] = cached
    return attributes


type _Part = tuple[str, dict[str, int], float, float]


def _parts(record: CallRecord) -> Iterator[_Part]:
    """Name, attributes, beginning and end, in seconds from when the call came."""
    if record.queued_s:
        yield "prepare", {}, 0.0, record.queued_s
    for i, finish in enumerate(record.finishes):
        yield from _answer_parts(record, finish, {"zen.finished": i})


def _answer_parts(record: CallRecord, finish: Finish, own: dict[str, int]) -> Iterator[_Part]:
    """Of one sample: a variant is waited for before a row is."""
    at, timings = record.queued_s, finish.timings
    steps = (
        ("load", timings.load_s),
        ("queue", timings.queued_s),
        ("prefill", timings.prefill_s),
    )
    for name, seconds in steps:
        if seconds or name != "load":
            yield name, own, at, at + seconds
        at += seconds
    if finish.completion_tokens > 1:
        tokens = {"gen_ai.usage.output_tokens": finish.completion_tokens}
        yield "decode", own | tokens, at, max(at, record.seconds)
