"""grpc.health.v1: what lives, what takes requests, and each variant under a name of its own.

live                        the process answers and its engine, if there is one, does its work
(the empty name), GenerateService, OperationService   requests are taken, the state can be asked
zen.v1.VariantService       variants can be listed
variants/NAME               requests for the variant NAME are taken, and it can be loaded as far
                            as is known
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from server import status
from server.auth import Right, caller
from server.router import Router
from server.worker import Worker
from zen.v1 import generate_pb2, operations_pb2, variants_pb2
from zen_jax.checkpoint.manifest import VariantCorrupt
from zen_jax.checkpoint.store import Store

_log = logging.getLogger(__name__)

LIVE = "live"
GENERATE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name
VARIANTS = variants_pb2.DESCRIPTOR.services_by_name["VariantService"].full_name
OPERATIONS = operations_pb2.DESCRIPTOR.services_by_name["OperationService"].full_name
VARIANT_PREFIX = "variants/"

_STATUS = health_pb2.HealthCheckResponse
# As the protocol proposes.
_MOST_LISTED = 100
_HEARTBEAT_S = 0.5
# Looking at 500 variants takes some milliseconds.
_VARIANTS_EVERY_S = 2.0


class Servicer(health_pb2_grpc.HealthServicer):
    """Answers from what `tell` was told. A variant that the caller may not know of is unknown.

    The library's own for asyncio holds a lock while it writes: one client that reads nothing would
    keep everybody else, and the end of the server, waiting. It belongs to one event loop.

    Attributes:
        told: by name.
    """

    def __init__(self, write_timeout_s: float) -> None:
        """Takes how long a watcher may leave what was sent unread, in seconds."""
        self._write_timeout_s = write_timeout_s
        self.told: dict[str, int] = {}
        self._changed = asyncio.Event()

    def tell(self, name: str, word: int) -> None:
        """Sets what is said of a name."""
        self.told[name] = word
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """What is said of a name; NOT_FOUND where there is none."""
        name = request.service
        if not _visible(name) or name not in self.told:
            raise status.not_found("grpc.health.v1.Service", name, "there is no such service")
        return _said(self.told[name])

    async def List(self, request: Any, context: Any) -> Any:
        """What is said of all names that the caller may know of."""
        seen = {name: word for name, word in self.told.items() if _visible(name)}
        if len(seen) > _MOST_LISTED:
            text = f"there are {len(seen)} names; more than {_MOST_LISTED} are not listed"
            raise status.resource_exhausted(text, None)
        kind = health_pb2.HealthListResponse  # pyright: ignore[reportAttributeAccessIssue]
        return kind(statuses={name: _said(word) for name, word in seen.items()})

    async def Watch(self, request: Any, context: Any) -> None:
        """Sends what is said of a name whenever it changes."""
        name: str = request.service
        known, last = _visible(name), None
        while True:
            changed = self._changed
            word: int = _STATUS.SERVICE_UNKNOWN
            if known and name in self.told:
                word = self.told[name]
            if word != last:
                last = word
                try:
                    async with asyncio.timeout(self._write_timeout_s):
                        await context.write(_said(word))
                except TimeoutError:
                    text = f"nothing was read for {self._write_timeout_s:g} s"
                    raise status.cancelled(text) from None
            await changed.wait()


def _said(word: int) -> Any:
    return _STATUS(status=word)  # pyright: ignore[reportArgumentType]


def _visible(service: str) -> bool:
    name = service.removeprefix(VARIANT_PREFIX)
    return name == service or (caller().may(Right.list) and caller().may_use(name))


class Health:
    """The servicer of grpc.health.v1. It belongs to the event loop that it is served from."""

    def __init__(self, store: Store, router: Router, write_timeout_s: float) -> None:
        """Takes what variants are looked up in, and how long a watcher may leave what was sent
        unread, in seconds."""
        self.servicer = Servicer(write_timeout_s)
        self._stopping = False
        self._store, self._router = store, router

    async def started(self) -> None:
        """The port is open, and no engine is there yet."""
        await self._set({LIVE: True, VARIANTS: True, "": False, GENERATE: False, OPERATIONS: False})

    async def ready(self) -> None:
        """Requests are taken."""
        await self._set({"": True, GENERATE: True, OPERATIONS: True})
        await self.look(frozenset())

    async def dead(self) -> None:
        """The engine has died; only what needs none still works."""
        names = ("", GENERATE, LIVE, *self.servicer.told)
        await self._set({name: name in (VARIANTS, OPERATIONS) for name in names})

    async def stopping(self) -> None:
        """Everything is NOT_SERVING from here on."""
        self._stopping = True
        for name in self.servicer.told:
            self.servicer.tell(name, _STATUS.NOT_SERVING)

    async def look(self, failed: frozenset[str]) -> None:
        """Says of each variant whether it can be served.

        Args:
            failed: digests of versions whose last load failed.
        """
        sound = await asyncio.to_thread(_sound, self._store, self._router, failed)
        statuses: dict[str, bool | None] = {VARIANT_PREFIX + name: ok for name, ok in sound.items()}
        gone = [n for n in self.servicer.told if n.startswith(VARIANT_PREFIX) and n not in statuses]
        await self._set(statuses | dict.fromkeys(gone))

    async def _set(self, serving: Mapping[str, bool | None]) -> None:
        """Sets what has changed; None is for a name that is gone."""
        if self._stopping:
            return
        words = {
            True: _STATUS.SERVING,
            False: _STATUS.NOT_SERVING,
            None: _STATUS.SERVICE_UNKNOWN,
        }
        for name, state in serving.items():
            if self.servicer.told.get(name) != words[state]:
                if state is False and name.startswith(VARIANT_PREFIX):
                    _log.warning("%s cannot be served; `zen verify` may say why", name)
                self.servicer.tell(name, words[state])


def _sound(store: Store, router: Router, failed: frozenset[str]) -> dict[str, bool]:
    """By name, whether its newest version is neither damaged nor failed to load."""
    sound = {}
    for name in store.names():
        try:
            variant = router.resolve(name)
        except VariantCorrupt:
            sound[name] = False
        except ValueError:  # deleted meanwhile
            continue
        else:
            sound[name] = variant is not None and variant.digest not in failed
    return sound


class Watchdog:
    """Counts how long a worker has not gone round though it has something to do."""

    def __init__(self, hang_s: float) -> None:
        """Takes how long it may, in seconds."""
        self._hang_s = hang_s
        self._last: int | None = None
        self._stuck_s = 0.0

    def beat(self, pulse: int | None, passed_s: float) -> bool:
        """Whether it hangs.

        Args:
            pulse: `Worker.pulse` now.
            passed_s: since the last beat. Of more than two beats' time the rest was a pause of the
                whole process, and not the worker's fault.
        """
        if pulse is None or pulse != self._last:
            self._last, self._stuck_s = pulse, 0.0
        else:
            self._stuck_s += min(passed_s, 2 * _HEARTBEAT_S)
        return self._stuck_s >= self._hang_s


async def watch(
    worker: Worker,
    health_: Health,
    hang_s: float,
    lost: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Looks after a worker until it dies or hangs, and says so then.

    Args:
        hang_s: for how long it may not go round, in seconds.
        lost: called when no requests can be taken any more, before those that are left are
            answered.
        clock: in seconds.
    """
    dog = Watchdog(hang_s)
    at = looked_at = clock()
    while worker.alive:
        await asyncio.sleep(_HEARTBEAT_S)  # who hangs tells nobody: it has to be looked at
        now = clock()
        if dog.beat(worker.pulse, now - at):
            _log.error("the engine has not answered for %g s and is given up", hang_s)
            lost()
            await asyncio.to_thread(worker.abandon, "the engine does not answer any more")
        elif now - looked_at >= _VARIANTS_EVERY_S:
            looked_at = now
            await health_.look(_failed(worker.snapshot().variants))
        at = now
    lost()
    _log.error("the engine has stopped; no requests are taken any more")
    await health_.dead()


def _failed(variants: Iterable[Any]) -> frozenset[str]:
    return frozenset(status.variant.digest for status in variants if status.failure is not None)
