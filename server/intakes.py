"""Takes adapters into the pool that are asked for and are not there, beside serving.

Who waits, and what is taken in next, `server.intake_line` decides. Requests wait on the event loop,
before they are made: from then on they are requests for a member like any other. The taking in has
a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from math import inf
from typing import Protocol

from server import status
from server.faults import log_error
from server.intake_line import Begin, Holder, Line, LineStep, Tell, Verdict
from server.requests import InboxFull, LoadRefused
from server.status import DEFAULT_RETRY_S
from zen_jax.delta.bank import DoesNotFit
from zen_jax.merge.lora import Adapter
from zen_jax.merge.pool import PoolRefusal
from zen_jax.merge.pool_change import Change, Score, Tasks
from zen_jax.merge.pool_folder import PoolBusy, PoolDamaged
from zen_jax.pool_store import NotTakenIn

_log = logging.getLogger(__name__)

# A refusal is looked at anew after so long, though nothing that can be seen has changed.
_REMEMBER_S = 300.0
# Likewise what may be over soon: a fault, an adapter's folder that is being written.
_FAULT_S = 10.0
# Nobody waits longer, be it for those before.
_WAIT_S = 600.0
# An adapter that was taken in may be merged away before it is looked up again; hardly ever twice.
_TRIES = 4


class Pooled(Protocol):
    """What takes adapters in; `zen_jax.pool_store.PoolStore` is one. Called from any thread."""

    def mark(self, name: str) -> str:
        """Of the adapter's files and the pool's table: another is worth another try."""
        ...

    def take_in(self, name: str, score: Score) -> Change:
        """Raises what `PoolStore.take_in` does, and what `score` does."""
        ...


class Intakes:
    """Who waits for an adapter. It belongs to the event loop that `wait` is called on."""

    def __init__(
        self,
        pool: Pooled,
        scorer: Callable[[], Score],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the parts.

        Args:
            pool: what adapters are taken into.
            scorer: gives M, as the pool wants it; called for each adapter on the intake's thread.
            clock: in seconds; deadlines are in its terms.
        """
        self._pool, self._scorer, self._clock = pool, scorer, clock
        self._line = Line()
        self._told: dict[Holder, asyncio.Future[Tell]] = {}
        self._holders = 0
        self._thread: threading.Thread | None = None
        self._refusal: str | None = None

    async def wait(self, name: str, mark: str, deadline: float | None, most: float = inf) -> float:
        """Returns when an adapter is in the pool: how long it was waited for, in seconds.

        Args:
            name: the adapter.
            mark: of it, as it was seen.
            deadline: until when, by the clock; None for as long as anybody may wait.
            most: how many may wait for it.

        Raises:
            LoadRefused: it is not taken in, or not in time.
            InboxFull: so many wait for it already.
        """
        if self._refusal is not None:
            raise LoadRefused("unavailable", self._refusal)
        if len(self._line.waiting.get(name, ())) >= most:
            raise InboxFull(
                f"{most:g} requests for {name} are waiting, which is the limit", DEFAULT_RETRY_S
            )
        self._holders += 1
        holder = self._holders
        told = self._told[holder] = asyncio.get_running_loop().create_future()
        began = self._clock()
        left_s = inf if deadline is None else deadline - began
        try:
            self._do(self._line.ask(holder, name, mark, began))
            async with asyncio.timeout(min(left_s, _WAIT_S)):
                tell = await told
        except TimeoutError:
            if left_s <= _WAIT_S:
                raise LoadRefused("deadline", "the request's deadline has passed") from None
            text = f"{name} was not taken into the pool within {_WAIT_S:g} s"
            raise LoadRefused("timed_out", text) from None
        finally:
            del self._told[holder]
            self._line = self._line.leave(holder)
        if tell.verdict is not None:
            raise LoadRefused(tell.verdict.kind, tell.verdict.message, tell.retry_after_s)
        return self._clock() - began

    def refuse(self, reason: str) -> None:
        """Tells all who wait that it is in vain, and all who come; what is being taken in is given
        up at its next score, with the pool as it was."""
        self._refusal = reason
        for holder, told in self._told.items():
            if not told.done():
                told.set_result(Tell(holder, Verdict("unavailable", reason, 0.0)))

    async def close(self, timeout_s: float) -> bool:
        """Waits for the adapter that is being taken in; returns whether its thread has ended."""
        if self._thread is None:
            return True
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _do(self, step: LineStep) -> None:
        self._line, actions = step
        for action in actions:
            match action:
                case Begin(name):
                    loop = asyncio.get_running_loop()
                    self._thread = threading.Thread(
                        target=self._run, args=(loop, name), name="zen-intake", daemon=True
                    )
                    self._thread.start()
                case Tell(holder):
                    told = self._told.get(holder)
                    if told is not None and not told.done():
                        told.set_result(action)

    def _ended(self, verdict: Verdict | None, mark: str) -> None:
        self._do(self._line.ended(verdict, mark, self._clock()))

    # On the intake's thread.

    def _run(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        mark, verdict = "", None
        try:
            mark = self._pool.mark(name)
            _log.info("taking %s into the pool", name)
            change = self._pool.take_in(name, self._while_wanted(self._scorer()))
            others = f" with {', '.join(change.together)}" if change.together else ""
            _log.info(
                "%s is %s%s in %.2f s, as %s",
                *(name, change.what, others, change.seconds, change.member[:12]),
            )
        except Exception as error:  # whatever it is, it is its waiters' affair alone
            verdict = _verdict(name, error)
        try:
            loop.call_soon_threadsafe(self._ended, verdict, mark)
        except RuntimeError:  # the loop is closed: nobody waits
            return

    def _while_wanted(self, score: Score) -> Score:
        def scored(adapter: Adapter, tasks: Tasks) -> float:
            if self._refusal is not None:
                raise Stopped
            return score(adapter, tasks)

        return scored


async def through[T](
    intakes: Intakes | None,
    find: Callable[[float], Awaitable[T]],
    deadline: float | None = None,
    most: float = inf,
) -> T:
    """What `find` gives, which is told for how long it was waited; adapters that it lacks are taken
    into the pool first.

    Args:
        intakes: None where nothing can be lacking.
        find: raises NotTakenIn for what is lacking.
        deadline: as for `Intakes.wait`, and
        most: likewise.

    Raises:
        StatusError: an adapter is not taken in.
        InboxFull: as `Intakes.wait`.
    """
    waited_s = 0.0
    for _ in range(_TRIES):
        try:
            return await find(waited_s)
        except NotTakenIn as error:
            wanted = error
        assert intakes is not None
        try:
            waited_s += await intakes.wait(wanted.name, wanted.mark, deadline, most)
        except LoadRefused as error:
            raise status.of_failure(
                error.kind, error.message, error.retry_after_s, wanted.name
            ) from None
    raise status.unavailable("the pool is changed too often; try again")


class Stopped(Exception):
    """An intake was given up, since the server stops."""


def _verdict(name: str, error: Exception) -> Verdict:
    """What clients may know of an error; the log knows the rest."""
    match error:
        case PoolRefusal():
            _log.warning("%s", error)
            if error.passing:
                return Verdict("exhausted", str(error), DEFAULT_RETRY_S)
            return Verdict("not_taken_in", str(error), _REMEMBER_S)
        case PoolBusy():
            text = f"{name} waits for another process that changes the pool"
            return Verdict("timed_out", text, DEFAULT_RETRY_S)
        case Stopped():
            return Verdict("unavailable", "the server is stopping", DEFAULT_RETRY_S)
        case PoolDamaged():
            _log.error("%s cannot be taken in: %s", name, error)
            return Verdict("corrupt", "the pool is damaged", _FAULT_S)
        case DoesNotFit():
            return Verdict("does_not_fit", str(error), _REMEMBER_S)
        case ValueError():  # of the adapter's folder, its tasks, or its weights
            error_id = uuid.uuid4().hex[:12]
            _log.error("%s cannot be taken in (error %s): %s", name, error_id, error)
            text = f"{name} is no adapter that the pool can take (error {error_id})"
            return Verdict("load_failed", text, _FAULT_S)
        case _:
            error_id = log_error(error)
            return Verdict("internal", f"a fault in the server (error {error_id})", _FAULT_S)
