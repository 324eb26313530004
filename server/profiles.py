"""Recordings by jax.profiler of what a running server's host and devices do."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path

import jax

MOST_S = 60.0


class ProfileUnderWay(Exception):
    """Another recording is being made."""


class Profiles:
    """A folder of recordings, one made at a time.

    They hold names of functions and programs and when they ran, and no values.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the folder and makes it, for nobody else to read.

        Raises:
            ValueError: it cannot be made or written.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / ".probe"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"profiles is {str(folder)!r}, which cannot be written: {error.strerror}"
            ) from None
        self._folder = folder
        self._lock = threading.Lock()

    async def capture(self, seconds: float) -> tuple[str, int]:
        """Records for a while; returns the recording's name in the folder, and its bytes.

        A caller that goes away leaves it to end by itself.

        Raises:
            ProfileUnderWay: there is one already, this process's or another tool's.
        """
        if not self._lock.acquire(blocking=False):
            raise ProfileUnderWay("a profile is being recorded")
        return await asyncio.shield(asyncio.create_task(self._capture(seconds)))

    async def _capture(self, seconds: float) -> tuple[str, int]:
        try:
            name = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            target = self._folder / name
            target.mkdir(mode=0o700)
            try:
                await asyncio.to_thread(jax.profiler.start_trace, target)
            except RuntimeError:
                target.rmdir()
                raise ProfileUnderWay("a profile is being recorded by another tool") from None
            try:
                await asyncio.sleep(seconds)  # what is recorded takes place meanwhile
            finally:
                await asyncio.to_thread(jax.profiler.stop_trace)
            files = [path for path in target.rglob("*") if path.is_file()]
            return name, sum(path.stat().st_size for path in files)
        finally:
            self._lock.release()
