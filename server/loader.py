"""Carries out the delta cache's loads, off the worker's thread, and keeps what they bring.

Each load is a task of its own that belongs to the loader: whoever asked for it may go away. One
reads a variant into host memory, checks it and leaves it there in the bank's shapes (`start`);
another puts that on the device (`put`), where it stays beside the bank until the worker takes it.
Every stage is told to the cache's table, which decides how many run at a time, how long a stage may
take, when a failed one is tried again and whose copy in host memory is dropped. A load given up
there may hang here without holding up any other; what it holds counts until it has ended.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from server.events import Advanced, Fetched, Loaded, LoadEnded, LoadEvent, LoadFailed
from zen_jax.checkpoint.manifest import NotServedYet, VariantCorrupt, WrongBase
from zen_jax.delta.bank import DoesNotFit

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

type Post = Callable[[LoadEvent], None]
type Spawn = Callable[[Callable[[], None]], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stages:
    """The stages of a load, each called on a thread of the load's own.

    Attributes:
        read: variant -> its files in host memory.
        verify: those -> a host tree in the bank's shapes. VariantCorrupt where they are not what
            was published, DoesNotFit where the bank has no room for a part.
        put: a host tree -> a device tree, ready for `Engine.write_slot`.
    """

    read: Callable[[Variant], Any]
    verify: Callable[[Any], Any]
    put: Callable[[Any], Any]


@dataclass
class _Task:
    """A load that runs, and whether anybody still wants it."""

    variant: Variant
    began: float
    wanted: bool = True


class Loader:
    """Runs loads and keeps what they brought.

    Attributes:
        max_threads: loads that may be at work, those that were given up and hang included; more
            are refused at once, since the storage does not answer.
        started: variants whose reading was begun.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        max_threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
        spawn: Spawn | None = None,
    ) -> None:
        """Take the stages.

        Args:
            stages: of every load.
            max_threads: see the class.
            clock: seconds, for what is logged.
            spawn: runs a stage in the background; a daemon thread each by default.
        """
        self.max_threads = max_threads
        self.started = 0
        self._stages = stages
        self._clock = clock
        self._spawn = spawn or _spawn_thread
        self._post: Post | None = None
        self._lock = threading.Condition()
        self._tasks: dict[int, _Task] = {}
        self._host: dict[str, tuple[int, Any]] = {}
        self._staged: dict[int, Any] = {}

    def connect(self, post: Post) -> None:
        """Say where events go; called from the loads' threads."""
        self._post = post

    @property
    def at_work(self) -> int:
        """Loads whose task has not ended, given up or not."""
        return len(self._tasks)

    @property
    def staged(self) -> int:
        """Loads whose weights wait to be taken."""
        return len(self._staged)

    @property
    def held(self) -> frozenset[str]:
        """Digests of the copies in host memory."""
        with self._lock:
            return frozenset(self._host)

    def start(self, variant: Variant, attempt: int) -> None:
        """Begin to read a variant; `attempt` was never used before. Posts `Fetched` at the end."""
        self.started += 1
        self._begin(variant, attempt, lambda: self._read(variant, attempt))

    def put(self, variant: Variant, attempt: int) -> None:
        """Begin to put a copy in host memory on the device. Posts `Loaded` at the end."""
        with self._lock:
            _, tree = self._host[variant.digest]
        self._begin(variant, attempt, lambda: self._put(variant, attempt, tree))

    def abandon(self, attempt: int) -> None:
        """Give a load up: what it brings is freed, and it posts nothing but `LoadEnded`."""
        with self._lock:
            task = self._tasks.get(attempt)
            if task is not None:
                task.wanted = False
                return
            self._forget(attempt)
        self._tell(LoadEnded(attempt))

    def drop(self, attempt: int) -> None:
        """Free what a load has staged."""
        with self._lock:
            self._staged.pop(attempt, None)

    def drop_host(self, digest: str) -> None:
        """Free a copy in host memory."""
        with self._lock:
            self._host.pop(digest, None)

    def take(self, attempt: int) -> Any:
        """What a load has staged; it is the caller's from here on."""
        with self._lock:
            return self._staged.pop(attempt)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Give up all loads; wait up to `timeout_s` for their tasks. Returns whether all ended."""
        with self._lock:
            self._post = _nowhere
            for task in self._tasks.values():
                task.wanted = False
            self._staged.clear()
            self._host.clear()
            return self._lock.wait_for(lambda: not self._tasks, timeout_s)

    # On the loads' threads.

    def _read(self, variant: Variant, attempt: int) -> None:
        raw = self._stages.read(variant)
        self._next(attempt, "verify", lambda: self._verify(variant, attempt, raw))

    def _verify(self, variant: Variant, attempt: int, raw: Any) -> None:
        tree = self._stages.verify(raw)
        size = _bytes(tree)
        with self._lock:
            task = self._tasks[attempt]
            if task.wanted:
                self._host[variant.digest] = attempt, tree
        _log.info(
            "read %s version %d: %d bytes in %.3f s",
            *(variant.name, variant.version, size, self._clock() - task.began),
        )
        self._end(attempt, Fetched(variant.digest, attempt, size))

    def _put(self, variant: Variant, attempt: int, tree: Any) -> None:
        staged = self._stages.put(tree)
        size = _bytes(staged)
        with self._lock:
            task = self._tasks[attempt]
            if task.wanted:
                self._staged[attempt] = staged
        _log.info(
            "loaded %s version %d: %d bytes on the device in %.3f s",
            *(variant.name, variant.version, size, self._clock() - task.began),
        )
        self._end(attempt, Loaded(variant.digest, attempt, size))

    # Steps of both.

    def _begin(self, variant: Variant, attempt: int, stage: Callable[[], None]) -> None:
        with self._lock:
            busy = len(self._tasks) >= self.max_threads
            if not busy:
                self._tasks[attempt] = _Task(variant, self._clock())
        if busy:
            message = f"{variant.name} cannot be loaded: the storage does not answer"
            self._tell(LoadFailed(variant.digest, attempt, "load_failed", message))
        else:
            self._go(variant, attempt, stage)

    def _next(self, attempt: int, name: Any, stage: Callable[[], None]) -> None:
        """Go on with another stage, unless nobody wants it any more."""
        with self._lock:
            task = self._tasks[attempt]
        if not task.wanted:
            self._end(attempt, None)
            return
        self._tell(Advanced(task.variant.digest, attempt, name))
        self._go(task.variant, attempt, stage)

    def _go(self, variant: Variant, attempt: int, stage: Callable[[], None]) -> None:
        def run() -> None:
            try:
                stage()
            except Exception as error:  # whatever a load can raise is its waiters' affair alone
                self._end(attempt, _failure(variant, attempt, error))

        try:
            self._spawn(run)
        except RuntimeError as error:  # the system gives no more threads
            self._end(attempt, _failure(variant, attempt, error))

    def _end(self, attempt: int, event: LoadEvent | None) -> None:
        """A task is over; `event` tells of it, if somebody wants to know."""
        with self._lock:
            task = self._tasks.pop(attempt)
            if not task.wanted:
                self._forget(attempt)
            self._lock.notify_all()
        self._tell(event if task.wanted and event is not None else LoadEnded(attempt))

    def _forget(self, attempt: int) -> None:
        """Free all that a load brought; with the lock held."""
        self._staged.pop(attempt, None)
        for digest, (brought_by, _) in list(self._host.items()):
            if brought_by == attempt:
                del self._host[digest]

    def _tell(self, event: LoadEvent) -> None:
        if self._post is None:
            raise RuntimeError("the loader is not connected; call connect first")
        self._post(event)


def _nowhere(event: LoadEvent) -> None:
    """Where events go when nobody is left to hear them."""


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


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
