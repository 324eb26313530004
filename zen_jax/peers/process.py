"""A worker process, from the side of who asks it: a line of JSON there, a line back."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

# Seconds that a worker gets to end by itself once its input has ended.
_PARTING_S = 5.0


class WorkerFailed(ValueError):
    """A worker did not start, ended, took too long, or said that it cannot."""


class Worker:
    """A process that answers in JSON; it ends with the block that it is used in.

    Attributes:
      name: what it is called in errors.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        """Starts the process.

        Args:
          name: what it is called in errors.
          command: program and arguments.
          environment: added to this process's own.
          patience_s: seconds that it has for an answer.

        Raises:
          WorkerFailed: it cannot be started.
        """
        self.name, self._patience_s, self._late = name, patience_s, False
        self._errors = tempfile.TemporaryFile("w+b")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | dict(environment or {}),
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._errors.close()
            raise WorkerFailed(f"{name} cannot be started: {command[0]}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The reply to a request.

        Raises:
          WorkerFailed: it ended, took too long, answered no JSON, or said that it cannot.
        """
        timer = threading.Timer(self._patience_s, self._give_up)
        timer.start()
        try:
            line = self._exchange(json.dumps(request) + "\n")
        finally:
            timer.cancel()
        try:
            reply = json.loads(line)
        except ValueError:
            raise WorkerFailed(self._what_happened(line)) from None
        if not isinstance(reply, dict):
            raise WorkerFailed(self._what_happened(line))
        if "error" in reply:
            raise WorkerFailed(f"{self.name} says: {reply['error']}")
        return reply

    def close(self) -> None:
        """Ends the process, by force if it does not end with its input."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
        except OSError:
            pass  # it has ended already
        try:
            process.wait(_PARTING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._errors.close()

    def _exchange(self, text: str) -> str:
        """Writes a line and reads one; what is read is empty when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except OSError:
            return ""
        return self._process.stdout.readline()

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _what_happened(self, line: str) -> str:
        if self._late:
            return f"{self.name} did not answer within {self._patience_s:g} s"
        if line:
            return f"{self.name} answered {line.strip()[:80]!r}; expected a line of JSON"
        try:
            status = self._process.wait(_PARTING_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its output and runs on"
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        return f"{self.name} ended with status {status}; the last it said: {told[-1][:200]}"
