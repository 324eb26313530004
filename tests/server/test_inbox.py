"""The inbox: bounded in requests wherever they wait, open to all else, and it wakes who waits."""

import threading
import time
from collections.abc import Callable

import pytest

from server.events import Arrived, Cancelled
from server.inbox import Inbox
from server.requests import Draining, InboxFull, Request


@pytest.fixture
def arrive(make_request: Callable[..., Request]) -> Callable[[], Arrived]:
    return lambda: Arrived(make_request(), frozenset(), 1, 0.0)


def test_events_come_out_in_order_and_once(arrive: Callable[[], Arrived]):
    inbox = Inbox(4)
    first, second = arrive(), Cancelled("x")
    inbox.put_request(first, 0.0)
    inbox.put(second)
    assert inbox.take(0.0) == [first, second]
    assert inbox.take(0.0) == []


def test_taking_requests_out_makes_no_room_until_they_wait_no_longer(
    arrive: Callable[[], Arrived],
):
    inbox = Inbox(2)
    inbox.put_request(arrive(), 0.0)
    inbox.put_request(arrive(), 0.0)
    inbox.take(0.0)
    with pytest.raises(InboxFull, match="2 requests are waiting.*try again in 1.5 s") as caught:
        inbox.put_request(arrive(), 1.5)
    assert (caught.value.limit, caught.value.retry_after_s) == (2, 1.5)
    inbox.put(Cancelled("x"))  # never refused
    inbox.settle(1)
    inbox.put_request(arrive(), 0.0)
    assert inbox.waiting == 2


def test_a_closed_inbox_takes_no_requests_but_all_else(arrive: Callable[[], Arrived]):
    inbox = Inbox(2)
    inbox.close("first reason")
    inbox.close("second reason")
    with pytest.raises(Draining, match="first reason"):
        inbox.put_request(arrive(), 0.0)
    inbox.put(Cancelled("x"))
    assert inbox.take(0.0) == [Cancelled("x")]


@pytest.mark.parametrize("wake", [lambda i: i.put(Cancelled("x")), Inbox.wake])
def test_who_waits_for_ever_is_woken(wake: Callable[[Inbox], None]):
    inbox = Inbox(1)
    taken: list[list[object]] = []
    thread = threading.Thread(target=lambda: taken.append([*inbox.take(None)]))
    thread.start()
    wake(inbox)
    thread.join(10.0)
    assert not thread.is_alive() and len(taken) == 1


def test_waiting_ends_with_its_time():
    began = time.monotonic()
    assert Inbox(1).take(0.02) == []
    assert time.monotonic() - began >= 0.02


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit is 0"):
        Inbox(0)
