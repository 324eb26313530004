"""A worker that fails in any way is one error that says which and how."""

import sys

import pytest

from zen_jax.peers.process import Worker, WorkerFailed

_ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_requests_are_answered_in_turn_and_it_ends_with_the_block() -> None:
    with Worker("echo", program(_ECHO)) as worker:
        for number in range(3):
            assert worker.ask(do="run", number=number) == {"do": "run", "number": number}
    assert worker._process.returncode == 0


def test_the_environment_is_added() -> None:
    code = "import os; input(); print('{\"it\": \"%s\"}' % os.environ['ZEN_TEST_PEER'])"
    with Worker("one", program(code), {"ZEN_TEST_PEER": "yes"}) as worker:
        assert worker.ask() == {"it": "yes"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no\\nmemory left')", "it ended with status 1.*: memory left"),
        ("input(); print('hello')", "it answered 'hello'; expected a line of JSON"),
        ("input(); print('[1]')", r"it answered '\[1\]'; expected a line of JSON"),
        ('input(); print(\'{"error": "no model"}\')', "it says: no model"),
        ("pass", "it ended with status 0; the last it said: nothing"),
    ],
)
def test_what_went_wrong_is_told(code: str, message: str) -> None:
    with Worker("it", program(code)) as worker, pytest.raises(WorkerFailed, match=message):
        worker.ask(do="load")


def test_one_that_does_not_answer_is_ended() -> None:
    code = "import sys\nfor _ in sys.stdin: pass"
    with Worker("it", program(code), patience_s=0.01) as worker:
        with pytest.raises(WorkerFailed, match=r"it did not answer within 0\.01 s"):
            worker.ask(do="load")
        assert worker._process.wait() < 0


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(WorkerFailed, match="it cannot be started: /no/such/python"):
        Worker("it", ["/no/such/python"])
