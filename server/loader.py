"""Carries out the delta cache's loads, off the worker's thread.

Each load is a task of its own that belongs to the loader: whoever asked for it may go away. A load
reads a variant to host memory, stages it on the device, and posts `Loaded` or `LoadFailed`. What is
staged stays here until the worker takes it. How many run at a time, how long one may take, and when
a failed one is tried again is decided by the cache's table; a load given up there may hang here
without holding up any other.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from server.events import Loaded, LoadFailed
from zen_jax.checkpoint.manifest import NotServedYet, VariantCorrupt, WrongBase
from zen_jax.delta.bank import DoesNotFit

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

type Post = Callable[[Loaded | LoadFailed], None]
type Spawn = Callable[[Callable[[], None]], None]

_log = logging.getLogger(__name__)


class Loader:
    """Runs loads and keeps what they staged.

    Attributes:
        max_threads: loads that may be at work, those that were given up and hang included; more
            are refused at once, since the storage does not answer.
    """

    def __init__(
        self,
        reader: Callable[[Variant], Any],
        stage: Callable[[Any], Any],
        *,
        max_threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
        spawn: Spawn | None = None,
    ) -> None:
        """Take the two steps of a load, both called on a thread of the load's own.

        Args:
            reader: variant -> host tree, verified. VariantCorrupt when it is damaged.
            stage: host tree -> device tree, ready for `Engine.write_slot`. DoesNotFit when the
                bank has no room for it.
            max_threads: see the class.
            clock: seconds, for what is logged.
            spawn: runs a task in the background; a daemon thread each by default.
        """
        self.max_threads = max_threads
        self._reader = reader
        self._stage = stage
        self._clock = clock
        self._spawn = spawn or _spawn_thread
        self._post: Post | None = None
        self._lock = threading.Condition()
        self._wanted: set[int] = set()
        self._staged: dict[int, Any] = {}
        self._at_work = 0

    def connect(self, post: Post) -> None:
        """Say where `Loaded` and `LoadFailed` go; called from the loads' threads."""
        self._post = post

    @property
    def at_work(self) -> int:
        """Loads whose task has not ended, given up or not."""
        return self._at_work

    @property
    def staged(self) -> int:
        """Loads whose weights wait to be taken."""
        return len(self._staged)

    def start(self, variant: Variant, attempt: int) -> None:
        """Begin a load; `attempt` was never used before."""
        with self._lock:
            busy = self._at_work >= self.max_threads
            if not busy:
                self._at_work += 1
                self._wanted.add(attempt)
        if busy:
            message = f"{variant.name} cannot be loaded: the storage does not answer"
            self._tell(LoadFailed(variant.digest, attempt, "load_failed", message))
            return
        try:
            self._spawn(lambda: self._run(variant, attempt))
        except RuntimeError as error:  # the system gives no more threads
            with self._lock:
                self._at_work -= 1
                self._wanted.discard(attempt)
            self._tell(_failure(variant, attempt, error))

    def abandon(self, attempt: int) -> None:
        """Give a load up: it posts nothing any more, and what it stages is freed."""
        with self._lock:
            self._wanted.discard(attempt)
            self._staged.pop(attempt, None)

    def take(self, attempt: int) -> Any:
        """What a load has staged; it is the caller's from here on."""
        with self._lock:
            return self._staged.pop(attempt)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Give up all loads; wait up to `timeout_s` for their tasks. Returns whether all ended."""
        with self._lock:
            self._wanted.clear()
            self._staged.clear()
            return self._lock.wait_for(lambda: self._at_work == 0, timeout_s)

    def _run(self, variant: Variant, attempt: int) -> None:
        began = self._clock()
        staged, event = None, None
        try:
            staged = self._stage(self._reader(variant))
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(staged))
            event = Loaded(variant.digest, attempt, size)
            _log.info(
                "loaded %s version %d: %d bytes in %.3f s",
                *(variant.name, variant.version, size, self._clock() - began),
            )
        except Exception as error:  # whatever a load can raise is its waiters' affair alone
            staged, event = None, _failure(variant, attempt, error)
        finally:
            with self._lock:
                wanted = attempt in self._wanted
                self._wanted.discard(attempt)
                if wanted and staged is not None:
                    self._staged[attempt] = staged
                self._at_work -= 1
                self._lock.notify_all()
        if wanted and event is not None:
            self._tell(event)

    def _tell(self, event: Loaded | LoadFailed) -> None:
        if self._post is None:
            raise RuntimeError("the loader is not connected; call connect first")
        self._post(event)


def _failure(variant: Variant, attempt: int, error: Exception) -> LoadFailed:
    """What clients may know of a load's error; the log knows the rest."""
    error_id = uuid.uuid4().hex[:12]
    expected = isinstance(error, VariantCorrupt | DoesNotFit | NotServedYet | WrongBase)
    _log.error(
        "loading %s version %d failed (error %s): %s",
        *(variant.name, variant.version, error_id, " ".join(str(error).split())),
        exc_info=None if expected else error,  # where it was found says nothing more
    )
    if isinstance(error, VariantCorrupt):
        message = (
            f"{variant.name} version {variant.version} is damaged in the store; run zen verify"
        )
        return LoadFailed(variant.digest, attempt, "corrupt", message)
    if isinstance(error, DoesNotFit | NotServedYet):
        return LoadFailed(variant.digest, attempt, "does_not_fit", f"{variant.name}: {error}")
    if isinstance(error, WrongBase):
        return LoadFailed(variant.digest, attempt, "load_failed", str(error))
    message = f"{variant.name} could not be loaded (error {error_id})"
    return LoadFailed(variant.digest, attempt, "load_failed", message)


def _spawn_thread(task: Callable[[], None]) -> None:
    threading.Thread(target=task, name="zen-load", daemon=True).start()
