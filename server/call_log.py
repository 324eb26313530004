"""A line of log for every call that is over, and what each line of log looks like.

A line holds what `server.records.CallRecord` does: neither prompt nor answer nor token.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from server.records import CallRecord, request_id

type LogFormat = Literal["text", "json"]

_log = logging.getLogger(__name__)

_JSON_FIELDS = "{asctime}{levelname}{name}{message}"
_NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_call(record: CallRecord) -> None:
    """Logs a call that is over, as an observer of calls."""
    fields = _fields(record)
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    _log.info("%s", words, extra={"call": fields, "request_id": record.id})


def _fields(record: CallRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.id,
        "code": record.code,
        "model": record.model,
        "version": record.version,
        "tenant": record.tenant,
        "token": record.token,
        "trace_id": record.trace_id,
        "prompt_tokens": record.prompt_tokens,
        "answer_tokens": record.answer_tokens,
        "samples": record.samples,
        "seconds": round(record.seconds, 6),
    }
    if record.finishes:
        first = min(record.finishes, key=lambda finish: finish.timings.first_token_s)
        timings = first.timings
        fields["cached_tokens"] = first.cached_tokens
        fields["queued_s"] = round(timings.queued_s, 6)
        fields["load_s"] = round(timings.load_s, 6)
        fields["prefill_s"] = round(timings.prefill_s, 6)
        fields["ttft_s"] = round(record.queued_s + timings.first_token_s, 6)
        fields["finish"] = ",".join(sorted({finish.reason for finish in record.finishes}))
    if record.fault:
        fields["fault"] = record.fault
    return {name: value for name, value in fields.items() if value != ""}


class WithRequest(logging.Filter):
    """Gives each line the id of the request that it was written for, if there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every line through."""
        name = request_id.get()
        if name and not hasattr(record, "request_id"):
            record.request_id = name
        return True


class _Text(logging.Formatter):
    """One line; those that are written for a request end with its id."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        name = getattr(record, "request_id", "")
        return f"{line} [request {name}]" if name and not hasattr(record, "call") else line


def formatter(kind: LogFormat) -> logging.Formatter:
    """Makes lines of text, or of JSON: an object a line, a call's fields in one of their own."""
    if kind == "text":
        return _Text(_TEXT)
    return JsonFormatter(_JSON_FIELDS, style="{", rename_fields=_NAMES, json_ensure_ascii=False)
