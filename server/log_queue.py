"""Lines of log on their way to where they are read: whoever writes one never waits for that."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TextIO

_MOST_LINES = 4096
# For what is still to be written when the program ends.
_CLOSING_S = 2.0


class Lines:
    """Has a thread write lines to a stream.

    A reader that stands still, such as a full pipe, loses lines and holds up no request. How many
    were lost is said once it reads again.
    """

    def __init__(self, stream: TextIO, most: int = _MOST_LINES) -> None:
        """Begins.

        Args:
            stream: where lines go.
            most: how many may wait.
        """
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(most)
        self._lost = 0
        # A daemon: a stream that takes nothing must not keep the program from ending.
        self._thread = threading.Thread(target=self._write, name="zen-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Takes a line; loses it if too many wait."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Ends once all is written, or after a while."""
        try:
            self._waiting.put(None, timeout=_CLOSING_S)
        except queue.Full:
            return
        self._thread.join(_CLOSING_S)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            lost, self._lost = self._lost, 0
            try:
                self._stream.write(f"{line}\n")
                if lost:
                    self._stream.write(f"{lost} lines of log were lost: nobody read them\n")
                self._stream.flush()
            except (OSError, ValueError):  # nobody can read it any more
                continue


class Onto(logging.Handler):
    """Formats what is logged and gives it to `lines`."""

    def __init__(self, lines: Lines) -> None:
        """Takes where lines go; several handlers may share it."""
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record."""
        try:
            self._lines.put(self.format(record))
        except Exception:  # as the library's handlers do with one that cannot be formatted
            self.handleError(record)
