"""Who waits for an adapter: the pure line, and what an event loop and a thread make of it."""

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from server.intake_line import Begin, Line, Tell, Verdict
from server.intakes import Intakes, Stopped, through
from server.requests import InboxFull, LoadRefused
from server.status import StatusError
from zen_jax.adapter_folder import AdapterUnusable
from zen_jax.delta.bank import DoesNotFit
from zen_jax.merge.pool import PoolRefusal
from zen_jax.merge.pool_change import Change
from zen_jax.merge.pool_folder import PoolBusy, PoolDamaged
from zen_jax.pool_store import NotTakenIn

NO = Verdict("not_taken_in", "there is no place", 300.0)


def test_each_is_taken_in_once_in_the_order_of_asking() -> None:
    line, did = Line().ask(1, "b", "m", 0.0)
    assert did == (Begin("b"),)
    line, did = line.ask(2, "a", "m", 0.0)
    assert did == ()
    line, did = line.ask(3, "b", "m", 0.0)
    assert did == ()
    line, did = line.ended(None, "m", 1.0)
    assert did == (Tell(1, None), Tell(3, None), Begin("a"))
    line, did = line.ended(None, "m", 2.0)
    assert (did, line) == ((Tell(2, None),), Line())


def test_one_that_nobody_waits_for_is_not_begun_and_one_that_runs_goes_on() -> None:
    line, _ = Line().ask(1, "a", "m", 0.0)
    line, _ = line.ask(2, "b", "m", 0.0)
    line, _ = line.ask(3, "c", "m", 0.0)
    line = line.leave(2).leave(1)
    assert line.running == "a"
    line, did = line.ask(4, "a", "m", 0.0)
    assert did == ()  # it is under way
    line, did = line.ended(None, "m", 1.0)
    assert did == (Tell(4, None), Begin("c"))


def test_a_refusal_is_remembered_for_a_while_and_for_what_it_was() -> None:
    line, _ = Line().ask(1, "a", "m", 0.0)
    line, did = line.ended(NO, "m", 10.0)
    assert did == (Tell(1, NO, 300.0),)
    assert line.ask(2, "a", "m", 309.0)[1] == (Tell(2, NO, 1.0),)
    assert line.ask(2, "a", "m", 310.0)[1] == (Begin("a"),)
    assert line.ask(2, "a", "other", 11.0)[1] == (Begin("a"),)
    later, _ = line.ask(2, "b", "m", 400.0)
    assert not later.refused


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_everybody_is_told_once(seed: int) -> None:
    chance, line = random.Random(seed), Line()
    waiting: dict[int, str] = {}
    running: str | None = None
    holder = 0

    def hear(actions) -> None:
        nonlocal running
        for action in actions:
            if isinstance(action, Begin):
                assert running is None
                assert action.name in waiting.values()
                running = action.name
            else:
                del waiting[action.holder]

    for now in range(300):
        what = chance.choice(["ask", "ask", "leave", "ended"])
        if what == "ask":
            holder += 1
            waiting[holder] = chance.choice("abc")
            line, did = line.ask(holder, waiting[holder], chance.choice("mn"), now)
            hear(did)
        elif what == "leave" and waiting:
            gone = chance.choice(sorted(waiting))
            del waiting[gone]
            line = line.leave(gone)
        elif what == "ended" and running is not None:
            name, running = running, None
            line, did = line.ended(chance.choice([None, NO]), "m", now)
            hear(did)
            assert name not in [waiting[h] for h in waiting if name == waiting[h]] or running
        left = {h for holders in line.waiting.values() for h in holders}
        assert left == set(waiting)
        assert line.running == running
        assert running is not None or not waiting


@dataclass
class Pool:
    """Takes adapters in as the test says.

    Attributes:
        errors: by name, what taking it in raises.
        taken: names, in order.
        go: what each waits for.
    """

    errors: dict[str, Exception] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def mark(self, name: str) -> str:
        return "mark"

    def take_in(self, name: str, score: Callable[..., float]) -> Change:
        self.taken.append(name)
        assert self.go.wait(10)
        score({}, None)
        if name in self.errors:
            raise self.errors[name]
        return Change(name, "kept", "m" * 64)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def intakes_of(pool: Pool) -> Intakes:
    return Intakes(pool, lambda: lambda adapter, tasks: 1.0)


async def test_two_who_ask_wait_for_one_intake(pool) -> None:
    intakes = intakes_of(pool)
    asked = [asyncio.create_task(intakes.wait("a", "mark", None)) for _ in range(2)]
    await asyncio.sleep(0)  # both ask
    pool.go.set()
    assert all(waited >= 0 for waited in await asyncio.gather(*asked))
    assert pool.taken == ["a"]
    assert await intakes.close(5)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (PoolRefusal("a is not taken in: all 2 places are taken"), "not_taken_in", "all 2 places"),
        (PoolRefusal("5 bytes are lacking", passing=True), "exhausted", "5 bytes"),
        (PoolBusy("/pool is being changed"), "timed_out", "another process"),
        (AdapterUnusable("a: /secret has no tasks.json"), "load_failed", "can take"),
        (ValueError("/secret has token ids outside"), "load_failed", "can take"),
        (DoesNotFit("a has rank 16"), "does_not_fit", "rank 16"),
        (PoolDamaged("/secret/pool.json"), "corrupt", "the pool is damaged"),
        (RuntimeError("/secret"), "internal", "a fault in the server"),
        (OSError(28, "no space left on /secret"), "internal", "a fault in the server"),
    ],
)
async def test_what_is_said_of_each_failure(pool, error, kind, said) -> None:
    pool.errors["a"] = error
    pool.go.set()
    intakes = intakes_of(pool)
    for _ in range(2):
        with pytest.raises(LoadRefused, match=said) as caught:
            await intakes.wait("a", "mark", None)
        assert caught.value.kind == kind
        assert "secret" not in str(caught.value)
    assert pool.taken == ["a"]  # it was remembered
    with pytest.raises(LoadRefused):
        await intakes.wait("a", "another mark", None)
    assert pool.taken == ["a", "a"]


async def test_time_and_room_are_bounded(pool) -> None:
    now = 0.0
    intakes = Intakes(pool, lambda: lambda adapter, tasks: 1.0, clock=lambda: now)
    with pytest.raises(LoadRefused) as caught:
        await intakes.wait("a", "mark", 0.05)
    assert caught.value.kind == "deadline"
    first = asyncio.create_task(intakes.wait("a", "mark", None))
    await asyncio.sleep(0)  # it asks
    with pytest.raises(InboxFull, match="1 requests for a are waiting"):
        await intakes.wait("a", "mark", None, 1)
    pool.go.set()
    await first


async def test_a_server_that_stops_keeps_nobody(pool) -> None:
    intakes = intakes_of(pool)
    asked = [asyncio.create_task(intakes.wait(name, "mark", None)) for name in "ab"]
    await asyncio.sleep(0)  # both ask
    intakes.refuse("the server is stopping")
    for task in asked:
        with pytest.raises(LoadRefused, match="stopping") as caught:
            await task
        assert caught.value.kind == "unavailable"
    pool.go.set()  # its score is refused then: the pool is as it was
    assert await intakes.close(5)
    assert pool.taken == ["a"]
    with pytest.raises(LoadRefused, match="stopping"):
        await intakes.wait("c", "mark", None)
    with pytest.raises(Stopped):
        intakes._while_wanted(lambda adapter, tasks: 1.0)({}, None)  # pyright: ignore[reportArgumentType]


async def test_what_is_lacking_is_taken_in_and_looked_up_again(pool) -> None:
    pool.go.set()
    waits: list[float] = []

    async def find(waited_s: float) -> str:
        waits.append(waited_s)
        if len(waits) == 1:
            raise NotTakenIn("a", "mark")
        return "a"

    assert await through(intakes_of(pool), find) == "a"
    assert waits[0] == 0 and waits[1] > 0

    async def lost(waited_s: float) -> str:
        raise NotTakenIn("b", "mark")

    with pytest.raises(StatusError, match="the pool is changed too often"):
        await through(intakes_of(pool), lost)
    assert pool.taken == ["a", *"bbbb"]
