"""The inbox: bounded in requests wherever they wait, open to all else, and it wakes who waits."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.events import Arrived, Cancelled
from server.inbox import Inbox, InboxLimits, Queue
from server.requests import Draining, InboxFull, Request


@pytest.fixture
def arrive(make_request: Callable[..., Request]) -> Callable[[], Arrived]:
    return lambda: Arrived(make_request(), frozenset(), 1, 0.0)


def small(requests: int = 2, **limits: float) -> Inbox:
    return Inbox(InboxLimits(requests, **limits))


def test_events_come_out_in_order_and_once(arrive: Callable[[], Arrived]):
    inbox = small(4)
    first, second = arrive(), Cancelled("x")
    inbox.put_request(first, 0.0)
    inbox.put(second)
    assert inbox.take(0.0) == [first, second]
    assert inbox.take(0.0) == []


def test_taking_requests_out_makes_no_room_until_they_wait_no_longer(
    arrive: Callable[[], Arrived],
):
    inbox = small()
    first, second = arrive(), arrive()
    inbox.put_request(first, 0.0)
    inbox.put_request(second, 0.0)
    inbox.take(0.0)
    full = "2 requests are waiting, which is the limit; try again in 1.5 s"
    with pytest.raises(InboxFull, match=full) as caught:
        inbox.put_request(arrive(), 1.5)
    assert caught.value.retry_after_s == 1.5
    inbox.put(Cancelled("x"))  # never refused
    inbox.planned(Queue.of([second.request]))
    inbox.put_request(arrive(), 0.0)
    assert inbox.waiting == 2
    with pytest.raises(InboxFull):
        inbox.put_request(arrive(), 1.5)


def test_what_was_taken_waits_beside_what_comes_meanwhile(arrive: Callable[[], Arrived]):
    inbox = small(3)
    taken, later = arrive(), arrive()
    inbox.put_request(taken, 0.0)
    inbox.take(0.0)
    inbox.put_request(later, 0.0)
    inbox.planned(Queue.of([taken.request]))
    assert inbox.waiting == 2
    inbox.take(0.0)
    inbox.planned(Queue())
    assert inbox.waiting == 0


def test_a_place_is_held_while_a_request_is_made_ready(arrive: Callable[[], Arrived]):
    inbox = small()
    inbox.put_request(arrive(), 0.0)
    with inbox.reserved(0.0):
        with pytest.raises(InboxFull), inbox.reserved(0.5):
            pass
        with pytest.raises(InboxFull):
            inbox.put_request(arrive(), 0.5)
        assert inbox.waiting == 1
    inbox.put_request(arrive(), 0.0)
    inbox.close("it is over")
    with pytest.raises(Draining, match="it is over"), inbox.reserved(0.0):
        pass


def test_tokens_and_models_have_bounds_of_their_own(
    make_request: Callable[..., Request], fake: Any
):
    inbox = small(100, tokens=10, per_model=2)

    def put(variant: Any = None, tokens: int = 1) -> None:
        request = make_request(variant, prompt=(1,) * tokens)
        inbox.put_request(Arrived(request, frozenset(), 1, 0.0), 0.5)

    put(tokens=40)  # where nothing waits the longest has its turn
    with pytest.raises(InboxFull, match="prompts of 40 tokens are waiting, and with 1 more"):
        put()
    inbox.take(0.0)
    inbox.planned(Queue())
    put(fake.variant("a"), 4)
    put(fake.variant("a", 2), 4)
    inbox.take(0.0)
    with pytest.raises(InboxFull, match="2 requests for zen4-a are waiting, which is the limit"):
        put(fake.variant("a"))
    put(fake.variant("b"), 2)
    with pytest.raises(InboxFull, match="would pass the limit of 10"):
        put()
    assert (inbox.waiting, inbox.waiting_tokens) == (3, 10)


def test_a_closed_inbox_takes_no_requests_but_all_else(arrive: Callable[[], Arrived]):
    inbox = small()
    inbox.close("first reason")
    inbox.close("second reason")
    with pytest.raises(Draining, match="first reason"):
        inbox.put_request(arrive(), 0.0)
    inbox.put(Cancelled("x"))
    assert inbox.take(0.0) == [Cancelled("x")]


@pytest.mark.parametrize("wake", [lambda i: i.put(Cancelled("x")), Inbox.wake])
def test_who_waits_for_ever_is_woken(wake: Callable[[Inbox], None]):
    inbox = small(1)
    taken: list[list[object]] = []
    thread = threading.Thread(target=lambda: taken.append([*inbox.take(None)]))
    thread.start()
    wake(inbox)
    thread.join(10.0)
    assert not thread.is_alive() and len(taken) == 1


def test_waiting_ends_with_its_time():
    began = time.monotonic()
    assert small(1).take(0.02) == []
    assert time.monotonic() - began >= 0.02


@pytest.mark.parametrize("name", ["requests", "tokens", "per_model"])
def test_a_limit_below_one_is_refused(name: str):
    with pytest.raises(ValueError, match=f"limit of {name} is 0"):
        InboxLimits(**{name: 0})
