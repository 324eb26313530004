"""Loads: each on its own, whoever asked; one that fails or hangs, in any stage, harms nobody."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from server.events import Advanced, Fetched, Loaded, LoadEnded, LoadEvent, LoadFailed
from server.loader import Loader
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt, WrongBase
from zen_jax.delta.bank import DoesNotFit

Task = Callable[[], None]


class Posts:
    """Where a loader posts to."""

    def __init__(self, loader: Loader) -> None:
        self.events: queue.Queue[LoadEvent] = queue.Queue()
        loader.connect(self.events.put)

    def next(self) -> LoadEvent:
        """The next event, but that another stage was begun."""
        while isinstance(event := self.events.get(timeout=10.0), Advanced):
            pass
        return event


def test_a_load_goes_over_host_memory_and_waits_on_the_device_to_be_taken(fake: Any):
    main, threads = threading.get_ident(), []

    def put(tree: Any) -> Any:
        threads.append(threading.get_ident())
        return {"staged": tree["number"], "more": np.zeros(3, np.float32)}

    loader = Loader(fake.stages(put=put))
    posts = Posts(loader)
    b = fake.variant("b")
    loader.start(b, 7)
    assert posts.events.get(timeout=10.0) == Advanced("digest-b1", 7, "verify")
    assert posts.next() == Fetched("digest-b1", 7, 4)
    assert loader.held == {"digest-b1"}
    loader.put(b, 8)
    assert posts.next() == Loaded("digest-b1", 8, 4 + 12)
    assert main not in threads
    assert int(loader.take(8)["staged"]) == 2
    assert loader.staged == 0 and loader.held == {"digest-b1"} and loader.started == 1
    with pytest.raises(KeyError):
        loader.take(8)
    loader.drop_host("digest-b1")
    assert not loader.held


def _raise(error: Exception) -> Callable[[Any], Any]:
    def stage(what: Any) -> Any:
        raise error

    return stage


@pytest.mark.parametrize("stage", ["read", "verify", "put"])
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (VariantCorrupt("zen4-a/1", "/secret/path", "bits"), "corrupt", "damaged in the store"),
        (DoesNotFit("q_proj: 2 levels; the bank has room for 1"), "does_not_fit", "2 levels"),
        (WrongBase("zen4-a was made against another base"), "load_failed", "another base"),
        (OSError("/secret/path is gone"), "load_failed", "could not be loaded (error "),
        (MemoryError(), "load_failed", "could not be loaded"),
    ],
)
def test_an_error_in_any_stage_is_named_by_its_kind_and_only_the_log_knows_paths(
    error: Exception, kind: str, words: str, stage: str, fake: Any, caplog: Any
):
    loader = Loader(fake.stages(**{stage: _raise(error)}))
    posts = Posts(loader)
    a, attempt = fake.variant("a"), 1
    loader.start(a, attempt)
    if stage == "put":
        assert posts.next() == Fetched("digest-a1", 1, 4)
        attempt = 2
        loader.put(a, attempt)
    event = posts.next()
    assert isinstance(event, LoadFailed)
    assert (event.digest, event.attempt, event.kind) == ("digest-a1", attempt, kind)
    assert words in event.message and "secret" not in event.message
    assert loader.staged == 0 and loader.held == ({"digest-a1"} if stage == "put" else set())
    assert loader.close(10.0)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "zen4-a version 1 failed" in record.getMessage() and "\n" not in record.getMessage()
    expected = "error " not in event.message  # no fault of the program: one line is enough
    assert (record.exc_info is None) == expected
    if "error " in event.message:
        error_id = event.message.rpartition("error ")[2].strip(")")
        assert error_id in caplog.text


@pytest.mark.parametrize("stage", ["read", "verify", "put"])
def test_a_stage_that_hangs_holds_up_no_other_and_only_its_end_is_told(stage: str, fake: Any):
    hang = threading.Event()

    def slow(what: Any) -> Any:
        if what == fake.variant("a") or (not isinstance(what, Variant) and what["number"] == 1):
            hang.wait(30.0)
        return fake.read_number(what) if isinstance(what, Variant) else what

    loader = Loader(fake.stages(**{stage: slow}))
    posts = Posts(loader)
    a, b = fake.variant("a"), fake.variant("b")
    loader.start(a, 1)
    if stage == "put":
        assert posts.next() == Fetched("digest-a1", 1, 4)
        loader.put(a, 3)
    loader.start(b, 2)
    assert posts.next() == Fetched("digest-b1", 2, 4)
    loader.put(b, 4)
    assert posts.next() == Loaded("digest-b1", 4, 4)
    hung = 3 if stage == "put" else 1
    loader.abandon(hung)
    assert posts.events.empty(), "it holds memory until it has ended"
    hang.set()
    assert posts.next() == LoadEnded(hung)
    assert loader.staged == 1 and "digest-b1" in loader.held
    assert ("digest-a1" in loader.held) == (stage == "put")
    assert loader.close(10.0) and posts.events.empty()


def test_when_nothing_comes_back_more_is_refused_at_once(fake: Any):
    hang = threading.Event()
    loader = Loader(fake.stages(lambda variant: hang.wait(30.0)), max_threads=2)
    posts = Posts(loader)
    for attempt in (1, 2, 3):
        loader.start(fake.variant("a", attempt), attempt)
    event = posts.next()
    assert isinstance(event, LoadFailed) and event.attempt == 3
    assert "does not answer" in event.message
    assert loader.at_work == 2
    loader.close()
    hang.set()
    assert loader.close(10.0)


def test_when_the_system_gives_no_thread_the_load_fails(fake: Any, caplog: Any):
    def spawn(task: Task) -> None:
        raise RuntimeError("can't start new thread")

    loader = Loader(fake.stages(), spawn=spawn)
    posts = Posts(loader)
    loader.start(fake.variant("a"), 1)
    assert isinstance(posts.next(), LoadFailed)
    assert loader.at_work == 0 and caplog.records


def by_hand(fake: Any, **named: Any) -> tuple[Loader, Posts, list[Task]]:
    """A loader whose stages run when they are called."""
    tasks: list[Task] = []
    loader = Loader(fake.stages(), spawn=tasks.append, **named)
    return loader, Posts(loader), tasks


def test_giving_up_frees_whatever_it_brought_and_says_so_at_once(fake: Any):
    loader, posts, tasks = by_hand(fake)
    a = fake.variant("a")
    loader.start(a, 1)
    tasks.pop()()
    tasks.pop()()
    assert isinstance(posts.next(), Fetched) and loader.held
    loader.put(a, 2)
    tasks.pop()()
    assert isinstance(posts.next(), Loaded) and loader.staged == 1
    loader.abandon(2)
    assert loader.staged == 0 and posts.next() == LoadEnded(2)
    loader.abandon(1)
    assert not loader.held and posts.next() == LoadEnded(1)


def test_a_load_given_up_between_two_stages_goes_no_further(fake: Any):
    loader, posts, tasks = by_hand(fake)
    loader.start(fake.variant("a"), 1)
    loader.abandon(1)
    tasks.pop()()
    assert not tasks and posts.next() == LoadEnded(1)


def test_the_log_tells_how_long_a_load_took(fake: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    times = iter((10.0, 12.5, 20.0, 21.0))
    loader, posts, tasks = by_hand(fake, clock=lambda: next(times))
    loader.start(fake.variant("a"), 1)
    tasks.pop()()
    tasks.pop()()
    loader.put(fake.variant("a"), 2)
    tasks.pop()()
    assert "read zen4-a version 1: 4 bytes in 2.500 s" in caplog.text
    assert "loaded zen4-a version 1: 4 bytes on the device in 1.000 s" in caplog.text


def test_a_loader_that_is_not_connected_says_so(fake: Any):
    tasks: list[Task] = []
    loader = Loader(fake.stages(), spawn=tasks.append)
    loader.start(fake.variant("a"), 1)
    with pytest.raises(RuntimeError, match="call connect first"):
        tasks.pop()()
