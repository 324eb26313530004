"""Stop strings and unfinished characters: whatever the cuts, one text, and nothing leaks."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_jax.answer_text import AnswerText, StopFinder
from zen_jax.tokenizer import Tokenizer


class Bytes(Tokenizer):
    """Token i is byte i."""

    def __init__(self) -> None:
        """Needs none of what a tokenizer is made of."""
        self.spelling: Any = SimpleNamespace(spaces=0)

    def token_bytes(self, token_id: int, first: bool = False) -> bytes | None:
        return bytes([token_id])


def read(pieces: list[str], *stops: str) -> tuple[list[str], str | None]:
    """What each piece gave, the last entry being the flush, and the match."""
    finder = StopFinder(stops)
    given = [finder.push(piece) for piece in pieces]
    return [*given, finder.flush()], finder.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "given", "matched"),
    [
        (["Hello", " STOP", " more"], ["STOP"], ["Hello", " ", "", ""], "STOP"),
        (["a ST", "OP"], ["STOP"], ["a ", "", ""], "STOP"),
        (["a ST", "ILL"], ["STOP"], ["a ", "STILL", ""], None),
        (["a ST"], ["STOP"], ["a ", "ST"], None),
        (["aab", "aabaac"], ["aabaac"], ["", "aab", ""], "aabaac"),
        (["x\n", "\n"], ["\n\n"], ["x", "", ""], "\n\n"),
        (["abc"], ["b", "abc"], ["a", ""], "b"),
        (["ab", "cd"], ["bcd", "abcd"], ["", "", ""], "abcd"),
        (["one two"], [], ["one two", ""], None),
        (["end", "left"], ["end"], ["", "", ""], "end"),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str], given: list[str], matched: str | None
) -> None:
    assert read(pieces, *stops) == (given, matched)


texts = st.text("abé", max_size=30)


@given(texts, st.lists(st.text("abé", min_size=1, max_size=5), max_size=4), st.data())
def test_the_cuts_do_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    """Against a plain search for the stop string that is complete first."""
    ends = [
        (i + len(s), -len(s), s) for s in stops for i in range(len(text)) if text[i:].startswith(s)
    ]
    pieces, at = [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        pieces.append(text[at : at + size])
        at += size
    given, matched = read(pieces, *stops)
    if not ends:
        assert ("".join(given), matched) == (text, None)
    else:
        end, _, stop = min(ends)
        assert ("".join(given), matched) == (text[: end - len(stop)], stop)


@given(texts, st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_than_a_beginning_is_held_back(text: str, stops: list[str]) -> None:
    finder, given = StopFinder(stops), ""
    for i, character in enumerate(text):
        given += finder.push(character)
        if finder.matched is not None:
            return
        held = text[len(given) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def answer(data: bytes, *stops: str, min_tokens: int = 0) -> tuple[list[str], str | None]:
    """The text that each byte gives, then the flush."""
    text = AnswerText(Bytes(), stops, min_tokens)
    given = [text.push(byte) for byte in data]
    return [*given, text.flush()], text.matched


def test_a_character_appears_when_it_is_whole() -> None:
    assert answer("aé€".encode()) == (["a", "", "é", "", "", "€", ""], None)
    assert answer(b"a\xe2\x82") == (["a", "", "", "\ufffd"], None)


def test_a_stop_string_is_found_across_characters_and_tokens() -> None:
    given, matched = answer("xé€y".encode(), "é€")
    assert ("".join(given), matched) == ("x", "é€")
    given, matched = answer("xé".encode() + b"\xe2", "é€")
    assert ("".join(given), given[-1], matched) == ("xé\ufffd", "é\ufffd", None)


def test_no_stop_string_counts_within_min_tokens() -> None:
    assert "".join(answer(b"abab", "ab", min_tokens=2)[0]) == "ab"
    assert answer(b"abab", "ab", min_tokens=4)[1] is None
    assert "".join(answer(b"abab", "ab", min_tokens=4)[0]) == "abab"
    # One that ends behind them counts, even if it begins before.
    assert "".join(answer(b"xab", "ab", min_tokens=2)[0]) == "x"


def test_overlapping_with_one_that_did_not_count() -> None:
    assert "".join(answer(b"aaa", "aa", min_tokens=2)[0]) == "a"
