"""Renders chat templates, which come with checkpoints and so are programs nobody vouches for.

Jinja's sandbox keeps a template away from Python's insides, but not from a string of gigabytes or
a loop of hours: both can happen inside one C call that no hook in this process would see. So a
template is rendered in a child process that the operating system limits: its memory, and the
processor time of each rendering. The child also counts the characters that come out. It speaks
JSON over a socket, imports nothing but Jinja, gets none of this process's environment, and starts
at the first rendering (about 0.1 s; later ones take well under a millisecond).

Requests wait for one another where templates are rendered. So one that takes long again and again,
though never too long, or is stopped each time, is not rendered at all until some time has passed.

Where the system has no limit on address space (macOS), only time and output are bounded.

Knows nothing of tokens; see `zen_jax.tokenizer`.
"""

import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE = 256 * 1024  # characters of a template
MAX_OUTPUT = 4 * 1024 * 1024  # characters that it may write
CPU_SECONDS = 0.5  # of one rendering
FREE_SECONDS = 0.05  # of each rendering; an honest one takes less
BUDGET_SECONDS = 2.0  # beyond that, for all renderings of a template together
REFILL = 0.1  # of a second that comes back to them in a second
WAIT_SECONDS = 30.0  # for the child's answer on a busy machine
MEMORY_BYTES = 512 * 1024 * 1024  # address space of the child; 30 MB are used at rest
_INHERITED = ("LD_LIBRARY_PATH", "PATH")  # what a Python built to be shared needs to start


class ChatTemplate:
    """A chat template, rendered in its own limited process. Safe to use from any thread."""

    def __init__(
        self,
        source: str,
        cpu_seconds: float = CPU_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps the template; whether it is one shows at the first rendering.

        Args:
          source: the template.
          cpu_seconds: processor time that one rendering may take.
          clock: in seconds.

        Raises:
          ValueError: it is longer than `MAX_SOURCE`.
        """
        if len(source) > MAX_SOURCE:
            raise ValueError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are taken"
            )
        self._source = source
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._release: Callable[[], object] = lambda: None  # ends the child, once
        self._clock = clock
        self._budget, self._counted_at = BUDGET_SECONDS, clock()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for these variables.

        Args:
          variables: what the template may name; values that JSON can hold.

        Raises:
          ValueError: the template is broken, refuses the variables, or passes a limit. The message
            repeats nothing of the variables.
        """
        request = _pack({"source": self._source, "variables": dict(variables)})
        with self._lock:
            self._refill()
            reply = self._ask(request)
            self._budget -= max(0.0, reply.get("seconds", self._cpu_seconds) - FREE_SECONDS)
        if "text" in reply:
            return reply["text"]
        raise ValueError(f"the chat template {reply['error']}")

    def close(self) -> None:
        """Ends the child, if there is one; a later rendering starts another."""
        with self._lock:
            self._stop()

    def _refill(self) -> None:
        now = self._clock()
        earned = REFILL * (now - self._counted_at)
        self._budget, self._counted_at = min(BUDGET_SECONDS, self._budget + earned), now
        if self._budget <= 0:
            raise ValueError(
                "the chat template has taken too much processor time of late; try again in "
                f"{1 - self._budget / REFILL:.0f} s"
            )

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._child is not None and self._child.process.poll() is not None:
            self._stop()  # ended by something else since the last rendering
        if self._child is None:
            self._child = _Child(self._cpu_seconds)
            self._release = weakref.finalize(self, self._child.stop)
        link = self._child.link
        try:
            link.send_bytes(request)
            if link.poll(WAIT_SECONDS):
                return _unpack(link.recv_bytes(6 * MAX_OUTPUT + 1024))  # 6: a control character
            failure = f"gave no answer for {WAIT_SECONDS:g} s"
        except (EOFError, OSError):  # the child is gone: the system has ended it
            failure = f"needs more than {self._cpu_seconds:g} s or {MEMORY_BYTES} bytes to render"
        self._stop()
        return {"error": failure}

    def _stop(self) -> None:
        if self._child is not None:
            self._child = None
            self._release()


class _Child:
    """The process that renders, and this end of the socket to it."""

    def __init__(self, cpu_seconds: float) -> None:
        self.link, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(theirs.fileno()), str(cpu_seconds)],
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def stop(self) -> None:
        """Ends it at once."""
        self.link.close()
        self.process.kill()
        self.process.wait()


def _pack(value: Any) -> bytes:
    """JSON; lone surrogates pass, for the tokenizer to judge."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _unpack(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


# From here on: what runs in the child.


class _RefusedError(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    """Jinja's own `tojson` escapes for HTML, which no chat template expects."""
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=1)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment.from_string(source)


def _render(source: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """{"text": ...}, or {"error": ...} without a word of the variables."""
    chunks, size = [], 0
    try:
        for chunk in _compile(source).generate(variables):
            size += len(chunk)
            if size > MAX_OUTPUT:
                return {"error": f"writes more than {MAX_OUTPUT} characters"}
            chunks.append(chunk)
    except _RefusedError as error:
        # The reason is told only when it stands in the template; else it may quote a message.
        reason = error.message or ""
        told = f": {reason}" if reason and reason in source else ""
        return {"error": f"refuses these messages{told}"}
    except TemplateSyntaxError as error:
        return {"error": f"is no valid Jinja template (line {error.lineno})"}
    except MemoryError:
        return {"error": f"needs more than {MEMORY_BYTES} bytes of memory"}
    except Exception as error:  # whatever a template can raise is the template's failure
        return {"error": f"fails with {type(error).__name__}"}
    return {"text": "".join(chunks)}


def _serve(link: Connection, cpu_seconds: float) -> None:
    """Answers requests until the other end closes; the signal's default action ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while True:
        try:
            request = _unpack(link.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        before = time.process_time()
        reply = _render(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.send_bytes(_pack({**reply, "seconds": time.process_time() - before}))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
