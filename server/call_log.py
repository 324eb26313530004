"""A line of log for every call that is over, and what each line of log looks like.

A line holds what `server.records.CallRecord` does: neither prompt nor answer nor token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from server.auth import caller
from server.records import CallRecord, request_id

type LogFormat = Literal["text", "json"]

_log = logging.getLogger(__name__)

_REFUSALS_A_SECOND = 10
_SELDOM_S = 60.0

_JSON_FIELDS = "{levelname}{name}{message}"
_NAMES = {"levelname": "level", "name": "logger"}
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_call(record: CallRecord) -> None:
    """Logs a call that is over, as an observer of calls."""
    _log.info("call ended", extra={"call": _fields(record), "request_id": record.id})


def _fields(record: CallRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.id,
        "code": record.code,
        "model": record.model,
        "version": record.version if record.model else "",
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


def log_operator(what: str) -> None:
    """Says what an operator asked for, and by which token."""
    by = caller()
    who = f"token {by.token} of tenant {by.tenant or '-'}" if by.token else "somebody"
    _log.info("%s asked for: %s", who, what)


class Refusals:
    """Logs calls that are not let in, so many a second at most: a stranger can make any number."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes a clock, in seconds."""
        self._clock = clock
        self._second, self._said, self._unsaid = 0, 0, 0

    def log(self, where: str, code: str, token: str) -> None:
        """One call: its method or route, why, and the id of its token, "" if none is known."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._said = second, 0
        if self._said >= _REFUSALS_A_SECOND:
            self._unsaid += 1
            return
        before = f"; {self._unsaid} more were not logged" if self._unsaid else ""
        self._said, self._unsaid = self._said + 1, 0
        by = f", token {token}" if token else ""
        _log.warning("%s was not let in: %s%s%s", where, code, by, before)


class WithRequest(logging.Filter):
    """Gives each line the id of the request that it was written for, if there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every line through."""
        name = request_id.get()
        if name and not hasattr(record, "request_id"):
            record.request_id = name
        return True


class Seldom(logging.Filter):
    """Lets through what a logger says but once a minute, however often it says it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes a clock, in seconds."""
        super().__init__()
        self._clock, self._said = clock, dict[tuple[str, int], float]()

    def filter(self, record: logging.LogRecord) -> bool:
        """By the place that it is said at; what is said there may vary."""
        now, place = self._clock(), (record.pathname, record.lineno)
        if now - self._said.get(place, -_SELDOM_S) < _SELDOM_S:
            return False
        self._said[place] = now
        return True


class _Text(logging.Formatter):
    """One line; a call's fields follow, or the id of the request that it is written for."""

    def format(self, record: logging.LogRecord) -> str:
        line, name = super().format(record), getattr(record, "request_id", "")
        call: dict[str, Any] | None = getattr(record, "call", None)
        if call is not None:
            return " ".join([line, *(f"{key}={value}" for key, value in call.items())])
        return f"{line} [request {name}]" if name else line


def formatter(kind: LogFormat) -> logging.Formatter:
    """Makes lines of text, or of JSON: an object a line, a call's fields in one of their own."""
    if kind == "text":
        return _Text(_TEXT)
    return JsonFormatter(
        _JSON_FIELDS, style="{", rename_fields=_NAMES, timestamp="time", json_ensure_ascii=False
    )
