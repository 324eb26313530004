"""Compiled programs: made ahead for the shapes they are called with, counted, kept on disk.

A program is called with arrays of the shapes that it was compiled for, or refuses: what is compiled
while serving is a program that was not asked for before, and the count shows it.
"""

import hashlib
import logging
import os
import platform
import stat
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

_UNUSABLE = "Some donated buffers were not usable"


class Programs:
    """Functions, each with what it is called with, compiled when first needed or all at once."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, tuple[str, Any, Callable[[], tuple[Any, ...]]]] = {}
        self._compiled: dict[Hashable, Any] = {}

    def add(
        self, key: Hashable, name: str, function: Any, arguments: Callable[[], tuple[Any, ...]]
    ) -> None:
        """Adds a program.

        Args:
          key: to call it by.
          name: shown while it is compiled.
          function: jitted.
          arguments: gives its arguments, arrays or `jax.ShapeDtypeStruct`.
        """
        self._functions[key] = (name, function, arguments)

    @property
    def compiles(self) -> int:
        """How many programs have been compiled so far."""
        return len(self._compiled)

    def lowered(self, key: Hashable) -> Any:
        """A program before it is compiled, for a look at what it does.

        Raises:
          UserWarning: a donated array cannot be reused for a result, so that it would be copied.
        """
        _, function, arguments = self._functions[key]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_UNUSABLE)
            return function.lower(*arguments())

    def __call__(self, key: Hashable, *arguments: Any) -> Any:
        """Runs a program, compiled now if it was not before."""
        program = self._compiled.get(key)
        if program is None:
            program = self._compiled[key] = self.lowered(key).compile()
        return program(*arguments)

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compiles what is not compiled yet, several at a time.

        Args:
          progress: told the name of what was done, how many are done and how many there are; what
            it raises ends the compiling.
        """
        tell = progress or (lambda name, done, total: None)
        keys = [key for key in self._functions if key not in self._compiled]
        running: dict[Future[Any], Hashable] = {}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            try:
                # Tracing takes turns in any case; compiling runs beside it.
                for key in keys:
                    running[pool.submit(self.lowered(key).compile)] = key
                for future in as_completed(running):
                    self._compiled[running[future]] = future.result()
                    done = sum(key in self._compiled for key in keys)
                    tell(self._functions[running[future]][0], done, len(keys))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def keep_compiled(folder: Path | None = None) -> Path | None:
    """Keeps what is compiled on disk from now on, so that the next start compiles nothing.

    Does nothing when JAX was told of a folder already, or where the folder cannot be written. What
    is kept is run as it is, so neither is a folder used that others could write: programs are
    compiled anew then, and the log says why.

    Args:
      folder: None takes zen-jax/compiled in the user's cache folder, one for each kind of
        processor, since a program is made for one.

    Returns:
      The folder in use, or None.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return Path(jax.config.jax_compilation_cache_dir)
    if folder is None:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(caches) / "zen-jax" / "compiled" / _processor()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        wrong = _not_ours(folder)
    except OSError:
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    if wrong is not None:
        _log.warning("%s can be written by others: no compiled program is kept", wrong)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


def _not_ours(folder: Path) -> Path | None:
    """The folder, or one above it, through which others could exchange its files; None if none."""
    folder = folder.resolve()
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # sticky: only owners move things
            return above
    return None


def _processor() -> str:
    """A name for this kind of processor: programs hold instructions that others may lack."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        described = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"
