"""What health says of the engine and of each variant, and when a worker is taken to hang."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from server import health
from server.auth import ANYBODY, Identity, Right, answering
from server.health import GENERATE, LIVE, VARIANTS, Health, Watchdog, watch
from server.router import Router
from server.status import StatusError
from zen_jax.checkpoint.store import Store

_STATUS = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING, UNKNOWN = _STATUS.SERVING, _STATUS.NOT_SERVING, _STATUS.SERVICE_UNKNOWN


async def told(of: Health, *names: str) -> list[int]:
    requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
    return [(await of.servicer.Check(request, None)).status for request in requests]


@pytest.fixture
def store(tiny_store: Path, tmp_path: Path) -> Store:
    """To be changed."""
    shutil.copytree(tiny_store, tmp_path / "store")
    return Store(tmp_path / "store")


async def test_each_variant_has_a_name_that_says_whether_it_can_be_served(store: Store):
    of = Health(store, Router(store), 5.0)
    await of.started()
    await of.ready()
    names = [f"variants/tiny-{letter}" for letter in "abc"]
    assert await told(of, *names) == [SERVING] * 3
    (store.path / "variants" / "tiny-a" / "1" / "manifest.json").write_text("{")
    shutil.rmtree(store.path / "variants" / "tiny-b")
    await of.look(frozenset([store.variant("tiny-c").digest]))
    assert await told(of, *names) == [NOT_SERVING, UNKNOWN, NOT_SERVING]
    assert await told(of, "", GENERATE, LIVE) == [SERVING] * 3
    await of.look(frozenset())
    assert await told(of, *names) == [NOT_SERVING, UNKNOWN, SERVING]


class Watcher:
    """A call of Watch that is read, or not."""

    def __init__(self, reads: bool):
        self.reads = asyncio.Event()
        self.had: asyncio.Queue[int] = asyncio.Queue()
        if reads:
            self.reads.set()

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        self.had.put_nowait(message.status)


def begin(of: Health, watcher: Watcher, name: str) -> "asyncio.Task[None]":
    request = health_pb2.HealthCheckRequest(service=name)
    return asyncio.ensure_future(of.servicer.Watch(request, watcher))


async def test_who_watches_is_told_each_change(store: Store):
    of, watcher = Health(store, Router(store), 5.0), Watcher(True)
    task = begin(of, watcher, "")
    async with asyncio.timeout(20):
        assert await watcher.had.get() == UNKNOWN
        await of.started()
        assert await watcher.had.get() == NOT_SERVING
        await of.ready()
        assert await watcher.had.get() == SERVING
        await of.stopping()
        assert await watcher.had.get() == NOT_SERVING
        await of.ready()  # too late to be said
    assert watcher.had.empty() and await told(of, "", LIVE) == [NOT_SERVING] * 2
    task.cancel()


async def test_a_watcher_that_reads_nothing_holds_nobody_up_and_is_given_up(store: Store):
    of, deaf, watcher = Health(store, Router(store), 0.2), Watcher(False), Watcher(True)
    await of.started()
    task = begin(of, deaf, "")
    await asyncio.sleep(0)  # it writes
    other = begin(of, watcher, "")
    async with asyncio.timeout(20):
        await of.ready()
        while await watcher.had.get() != SERVING:
            pass
        with pytest.raises(StatusError, match="nothing was read"):
            await task
        await of.stopping()
        assert await watcher.had.get() == NOT_SERVING
    other.cancel()


async def test_what_is_listed_is_what_the_caller_may_know_of(store: Store):
    of = Health(store, Router(store), 5.0)
    await of.started()
    await of.ready()

    async def listed(identity: Identity) -> dict[str, int]:
        answering(identity)
        found = await of.servicer.List(None, None)
        return {name: said.status for name, said in found.statuses.items()}

    everything = await listed(ANYBODY)
    assert everything["variants/tiny-a"] == everything[""] == everything[LIVE] == SERVING
    one = Identity(rights=frozenset({Right.list}), models=frozenset({"tiny-b"}))
    variants = [name for name in await listed(one) if name.startswith("variants/")]
    assert variants == ["variants/tiny-b"]
    with pytest.raises(StatusError, match="no such service"):
        await told(of, "variants/tiny-a")
    for i in range(100):
        of.servicer.tell(f"more-{i}", SERVING)
    with pytest.raises(StatusError, match="more than 100"):
        await listed(ANYBODY)


async def test_a_dead_engine_is_told_everywhere_but_for_the_list(store: Store):
    of = Health(store, Router(store), 5.0)
    await of.started()
    assert await told(of, LIVE, VARIANTS, GENERATE, "") == [SERVING] * 2 + [NOT_SERVING] * 2
    await of.ready()
    await of.dead()
    names = (LIVE, GENERATE, "", "variants/tiny-a", VARIANTS)
    assert await told(of, *names) == [NOT_SERVING] * 4 + [SERVING]


@pytest.mark.parametrize(
    "beats, hangs",
    [
        ([(1, 0.5), (1, 0.5), (1, 0.5)], [False, False, True]),
        ([(1, 0.5), (2, 0.5), (2, 0.5), (3, 0.5), (3, 0.5)], [False] * 5),
        ([(1, 0.5), (None, 9.0), (None, 9.0), (1, 9.0)], [False] * 4),
        # The whole process stood still: it had no chance to go round.
        ([(1, 0.5), (1, 0.5), (2, 3600.0), (2, 0.5)], [False] * 4),
    ],
)
def test_who_goes_round_does_not_hang(beats: list[tuple[int | None, float]], hangs: list[bool]):
    dog = Watchdog(1.0)
    assert [dog.beat(pulse, passed) for pulse, passed in beats] == hangs


def test_a_pause_of_the_process_counts_no_more_than_two_beats():
    dog = Watchdog(1.5)
    assert not dog.beat(1, 0.5)
    assert not dog.beat(1, 3600.0)
    assert dog.beat(1, 0.5)


async def test_a_worker_that_hangs_is_given_up(
    store: Store, worlds: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(health, "_HEARTBEAT_S", 0.01)
    world = worlds()
    release = world.engine.hangs["decode"] = threading.Event()
    caller = world.submit(make_request(max_tokens=40))
    of = Health(store, Router(store), 5.0)
    await of.ready()
    lost: list[bool] = []
    ticks = iter(range(1000))
    async with asyncio.timeout(20):
        await watch(world.worker, of, 0.05, lambda: lost.append(True), lambda: next(ticks) / 100)
    release.set()
    assert caller.failure.kind == "unavailable"
    assert "does not answer" in caller.failure.message
    assert lost
    assert await told(of, "", GENERATE, LIVE) == [NOT_SERVING] * 3
