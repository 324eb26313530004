"""Lines of log that nobody reads hold nobody up."""

import io
import logging
import threading
from typing import Any

from server.log_queue import Lines, Onto


class Pipe(io.StringIO):
    """Takes nothing until it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_now = threading.Event()
        self.held = threading.Event()

    def write(self, text: str) -> int:
        self.held.set()
        self.read_now.wait(20)
        return super().write(text)


def record(number: int) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, "line %d", (number,), None)


def test_a_reader_that_stands_still_loses_lines_and_holds_nobody_up():
    pipe = Pipe()
    lines = Lines(pipe, most=3)
    handler = Onto(lines)
    handler.handle(record(0))
    assert pipe.held.wait(20)
    for i in range(1, 10):
        handler.handle(record(i))
    pipe.read_now.set()
    lines.close()
    said = pipe.getvalue().splitlines()
    assert [line for line in said if line.startswith("line")] == [f"line {i}" for i in range(4)]
    assert "6 lines of log were lost: nobody read them" in said


def test_all_is_written_at_the_end_and_a_closed_stream_is_no_fault():
    stream = io.StringIO()
    lines = Lines(stream)
    handler = Onto(lines)
    for i in range(100):
        handler.handle(record(i))
    lines.close()
    assert stream.getvalue().count("\n") == 100
    stream.close()
    late = Lines(stream)
    Onto(late).handle(record(0))
    late.close()


def test_the_end_does_not_wait_for_a_reader(monkeypatch: Any):
    monkeypatch.setattr("server.log_queue._CLOSING_S", 0.1)
    pipe = Pipe()
    lines = Lines(pipe, most=1)
    for i in range(3):
        lines.put(str(i))
    lines.close()
    assert not pipe.getvalue()
    pipe.read_now.set()
