"""What answers are put together from: tokens as text, where each stands, and what was counted."""

import math

import pytest

from server.http.pieces import Counts, Spelling, Track, finish_of, told, usage_of
from zen.v1 import generate_pb2 as pb
from zen_jax.tokenizer import Tokenizer
from zen_jax.training.bytes_tokenizer import BOS, EOS, build_tokenizer


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Spelling(Tokenizer(build_tokenizer(), names=names))


def logprobs(*tokens: int) -> list[pb.TokenLogprobs]:
    return [pb.TokenLogprobs(token_id=token, logprob=-1) for token in tokens]


@pytest.mark.parametrize(
    "token, text, own",
    [
        (97, "a", [97]),
        (0xC3, "bytes:\\xc3", [0xC3]),
        (0, "\0", [0]),
        (EOS, "<|eos|>", None),
        (9999, "", None),
    ],
)
def test_a_token_by_itself(spelling, token, text, own):
    spelled = spelling.spell(token, -1.5)
    assert (spelled.text, spelled.bytes, spelled.logprob) == (text, own, -1.5)
    assert spelling.spell(token, -2.5).logprob == -2.5


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_json_has_no_infinity(spelling, logprob):
    assert spelling.spell(97, logprob).logprob == -9999.0


def test_where_tokens_stand(spelling):
    track = Track(spelling)
    prompt = track.prompt(logprobs(BOS, *"é€".encode()), "é€")
    assert [entry.offset for entry in prompt] == [0, 0, 0, 1, 1, 1]
    answer = track.answer(logprobs(97)) + track.answer(logprobs(*"ö".encode(), 98))
    assert [entry.offset for entry in answer] == [2, 3, 3, 4]
    track = Track(spelling)
    track.prompt(logprobs(0xC3), "\ufffd")  # half a character, which is shown as one
    assert track.answer(logprobs(97))[0].offset == 1


def test_the_token_that_ends_a_text_is_none_of_its():
    message = pb.GenerateResponse(logprobs=logprobs(97, EOS))
    assert [one.token_id for one in told(message)] == [97, EOS]
    assert finish_of(message) is None
    message.completion.finish_reason = pb.FINISH_REASON_STOP
    message.completion.matched_stop_token_id = EOS
    assert [one.token_id for one in told(message)] == [97]
    assert finish_of(message) == "stop"


def test_a_prompt_counts_once_and_as_it_was_read_first():
    counts = [Counts(), Counts()]
    for cached in (32, 0, 64):
        counts[0].add(pb.Usage(prompt_tokens=70, completion_tokens=5, cached_tokens=cached))
    counts[1].add(pb.Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=3))
    assert usage_of(counts) == {
        "prompt_tokens": 77,
        "completion_tokens": 16,
        "total_tokens": 93,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
