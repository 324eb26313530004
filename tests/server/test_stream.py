"""What a caller is told of tokens, in whatever lots they come."""

from collections.abc import Sequence
from typing import Any

import pytest

from server.events import Emit
from server.requests import Finish, Timings, TokenEvent
from server.stream import AnswerStream
from zen_jax.answer_text import AnswerText
from zen_jax.sampling import TokenLogprobs

TIMINGS = Timings(0.0, 0.0, 0.0, 0.0)


def finish(reason: Any = "length", matched_stop: int | None = None, count: int = 99) -> Finish:
    return Finish(reason, matched_stop, 5, count, TIMINGS)


@pytest.fixture
def make(fake: Any) -> Any:
    def stream(*stops: str, min_tokens: int = 0) -> AnswerStream:
        return AnswerStream(None, AnswerText(fake.ByteTokenizer(None), stops, min_tokens))

    return stream


def told(stream: AnswerStream, *lots: Sequence[int], end: Finish | None) -> list[TokenEvent]:
    """The events of tokens in some lots, the last with the finish."""
    events = [
        stream.take(Emit("r", tuple(lot), end if i == len(lots) - 1 else None))
        for i, lot in enumerate(lots)
    ]
    return [event for event in events if event is not None]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def tokens_of(events: list[TokenEvent]) -> bytes:
    return bytes(token for event in events for token in event.token_ids)


def test_text_that_may_begin_a_stop_string_comes_at_the_end(make):
    events = told(make("END"), b"one", b" EN", b"", end=finish())
    assert [event.text for event in events] == ["one", " ", "EN"]
    assert events[-1].finish == finish()


def test_a_stop_token_has_no_text_and_flushes(make):
    events = told(make("xyz"), b"ax", b"y\x00", end=finish("stop", 0))
    assert (text_of(events), tokens_of(events)) == ("axy", b"axy\x00")
    assert events[-1].finish == finish("stop", 0)


def test_nothing_is_told_behind_a_stop_string(make):
    stream = make("END")
    events = told(stream, b"oneE", b"ND!", b"two", end=None)
    assert (text_of(events), tokens_of(events), len(events)) == ("one", b"oneEND", 2)
    assert stream.stopped
    last = stream.take(Emit("r", (), finish("stop")))
    assert last is not None and last.finish is not None
    assert (last.finish.reason, last.finish.matched_text) == ("stop", "END")
    assert last.finish.completion_tokens == 6


def test_a_stop_string_counts_before_what_the_scheduler_found(make):
    for end in (finish("length"), finish("stop", 0)):
        stream = make("ND")
        events = told(stream, b"oE", b"NDxy\x00", end=end)
        assert (text_of(events), tokens_of(events)) == ("oE", b"oEND")
        found = events[-1].finish
        assert found is not None
        assert (found.reason, found.matched_text, found.matched_stop) == ("stop", "ND", None)
        assert found.completion_tokens == 4
        stream = make("ND")
        told(stream, b"END", end=None)
        (late,) = told(stream, b"xy\x00", end=end)
        assert (late.text, late.token_ids) == ("", ()) and late.finish == found.__class__(
            "stop", None, 5, 3, TIMINGS, "ND"
        )


def test_a_stop_string_may_span_lots_and_the_first_tokens_are_free(make):
    assert text_of(told(make("aa", min_tokens=2), b"a", b"a", b"bc", end=finish())) == "aabc"
    assert text_of(told(make("ab"), b"a", b"bc", end=finish())) == ""


def test_logprobs_go_with_the_tokens_that_are_told(make):
    stream = make("b")
    stream.prompt = [TokenLogprobs(1, None), TokenLogprobs(2, -1.0)]
    own = tuple(TokenLogprobs(token, -0.5) for token in b"abc")
    first = stream.take(Emit("r", (97,), None, own[:1]))
    second = stream.take(Emit("r", (98, 99), None, own[1:]))
    assert first is not None and second is not None
    assert (first.logprobs, len(first.prompt_logprobs)) == (own[:1], 2)
    assert (second.logprobs, second.prompt_logprobs) == (own[1:2], ())
