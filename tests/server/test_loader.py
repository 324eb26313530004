"""Loads: each on its own, whoever asked; one that fails or hangs harms nobody."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from server.events import Loaded, LoadFailed
from server.loader import Loader
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt, WrongBase
from zen_jax.delta.bank import DoesNotFit


class Posts:
    """Where a loader posts to."""

    def __init__(self, loader: Loader) -> None:
        self.events: queue.Queue[Loaded | LoadFailed] = queue.Queue()
        loader.connect(self.events.put)

    def next(self) -> Loaded | LoadFailed:
        return self.events.get(timeout=10.0)


def same(tree: Any) -> Any:
    return tree


def test_a_load_reads_stages_and_waits_to_be_taken(fake: Any):
    main, threads = threading.get_ident(), []

    def stage(tree: Any) -> Any:
        threads.append(threading.get_ident())
        return {"staged": tree["number"], "more": np.zeros(3, np.float32)}

    loader = Loader(fake.read_number, stage)
    posts = Posts(loader)
    loader.start(fake.variant("b"), 7)
    assert posts.next() == Loaded("digest-b1", 7, 4 + 12)
    assert main not in threads
    assert int(loader.take(7)["staged"]) == 2
    assert loader.staged == 0
    with pytest.raises(KeyError):
        loader.take(7)


def _raise(error: Exception) -> Callable[[Variant], Any]:
    def reader(variant: Variant) -> Any:
        raise error

    return reader


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
def test_an_error_is_named_by_its_kind_and_only_the_log_knows_paths(
    error: Exception, kind: str, words: str, fake: Any, caplog: pytest.LogCaptureFixture
):
    loader = Loader(_raise(error), same)
    posts = Posts(loader)
    loader.start(fake.variant("a"), 1)
    event = posts.next()
    assert isinstance(event, LoadFailed)
    assert (event.digest, event.attempt, event.kind) == ("digest-a1", 1, kind)
    assert words in event.message and "secret" not in event.message
    assert loader.close(10.0)
    assert "zen4-a version 1 failed" in caplog.text
    expected = "error " not in event.message  # no fault of the program: one line is enough
    assert [record.exc_info is None for record in caplog.records] == [expected]
    assert all("\n" not in record.getMessage() for record in caplog.records)
    if "error " in event.message:
        error_id = event.message.rpartition("error ")[2].strip(")")
        assert error_id in caplog.text


def test_what_does_not_fit_is_found_while_staging(fake: Any):
    loader = Loader(fake.read_number, _raise(DoesNotFit("head: stored whole")))
    posts = Posts(loader)
    loader.start(fake.variant("a"), 1)
    event = posts.next()
    assert isinstance(event, LoadFailed) and event.kind == "does_not_fit"


def test_a_load_that_hangs_holds_up_no_other_and_its_late_end_is_not_told(fake: Any):
    hang = threading.Event()

    def reader(variant: Variant) -> Any:
        if variant.name == "zen4-a":
            hang.wait(30.0)
        return fake.read_number(variant)

    loader = Loader(reader, same)
    posts = Posts(loader)
    loader.start(fake.variant("a"), 1)
    loader.start(fake.variant("b"), 2)
    assert posts.next() == Loaded("digest-b1", 2, 4)
    loader.abandon(1)
    hang.set()
    assert loader.close(10.0)
    assert posts.events.empty()
    assert loader.staged == 0


def test_when_nothing_comes_back_more_is_refused_at_once(fake: Any):
    hang = threading.Event()
    loader = Loader(lambda variant: hang.wait(30.0), same, max_threads=2)
    posts = Posts(loader)
    for attempt in (1, 2, 3):
        loader.start(fake.variant("a", attempt), attempt)
    event = posts.next()
    assert isinstance(event, LoadFailed) and event.attempt == 3
    assert "does not answer" in event.message
    assert loader.at_work == 2
    hang.set()
    assert loader.close(10.0)


def test_when_the_system_gives_no_thread_the_load_fails(fake: Any, caplog: Any):
    def spawn(task: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    loader = Loader(fake.read_number, same, spawn=spawn)
    posts = Posts(loader)
    loader.start(fake.variant("a"), 1)
    assert isinstance(posts.next(), LoadFailed)
    assert loader.at_work == 0 and caplog.records


def test_giving_up_what_is_staged_frees_it(fake: Any):
    tasks: list[Callable[[], None]] = []
    loader = Loader(fake.read_number, same, spawn=tasks.append)
    posts = Posts(loader)
    loader.start(fake.variant("a"), 1)
    tasks.pop()()
    assert isinstance(posts.next(), Loaded) and loader.staged == 1
    loader.abandon(1)
    assert loader.staged == 0


def test_the_log_tells_how_long_a_load_took(fake: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    times = iter((10.0, 12.5))
    tasks: list[Callable[[], None]] = []
    loader = Loader(fake.read_number, same, clock=lambda: next(times), spawn=tasks.append)
    Posts(loader)
    loader.start(fake.variant("a"), 1)
    tasks.pop()()
    assert "loaded zen4-a version 1: 4 bytes in 2.500 s" in caplog.text


def test_a_loader_that_is_not_connected_says_so(fake: Any):
    tasks: list[Callable[[], None]] = []
    loader = Loader(fake.read_number, same, spawn=tasks.append)
    loader.start(fake.variant("a"), 1)
    with pytest.raises(RuntimeError, match="call connect first"):
        tasks.pop()()
