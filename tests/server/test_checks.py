"""What is said against a request before anything is looked up."""

import pytest

from server.incoming import Limits, check
from zen.v1 import generate_pb2 as pb

LIMITS = Limits(max_length=64, vocab_size=264)
NAN, INF = float("nan"), float("inf")


def ask(model: str = "coder", prompt: str = "Hi", **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=model, prompt=prompt, sampling=pb.Sampling(**sampling))


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="coder", token_ids=pb.TokenIds(ids=ids))


def messages(*roles: str) -> pb.GenerateRequest:
    turns = [pb.Message(role=role, content="said") for role in roles]
    return pb.GenerateRequest(model="coder", messages=pb.Messages(messages=turns))


@pytest.mark.parametrize(
    "request_, fields",
    [
        (ask(""), ["model"]),
        (pb.GenerateRequest(model="coder"), ["input"]),
        (ask(prompt=""), ["prompt"]),
        (tokens(), ["token_ids.ids"]),
        (tokens(3, 264, 9000), ["token_ids.ids[1]"]),
        (messages(), ["messages.messages"]),
        (messages("user", ""), ["messages.messages[1].role"]),
        (ask(max_tokens=0), ["sampling.max_tokens"]),
        (ask(max_tokens=-1), ["sampling.max_tokens"]),
        (ask(temperature=NAN), ["sampling.temperature"]),
        (ask(temperature=INF), ["sampling.temperature"]),
        (ask(temperature=-0.1), ["sampling.temperature"]),
        (ask(temperature=101), ["sampling.temperature"]),
        (ask(top_k=-2), ["sampling.top_k"]),
        (ask(top_p=0), ["sampling.top_p"]),
        (ask(top_p=1.01), ["sampling.top_p"]),
        (ask(top_p=NAN), ["sampling.top_p"]),
        (ask(stop_token_ids=[1, 264]), ["sampling.stop_token_ids[1]"]),
        (ask(stop_token_ids=[1] * 65), ["sampling.stop_token_ids"]),
        (ask(min_p=-0.1), ["sampling.min_p"]),
        (ask(min_p=NAN), ["sampling.min_p"]),
        (ask(repetition_penalty=0), ["sampling.repetition_penalty"]),
        (ask(repetition_penalty=INF), ["sampling.repetition_penalty"]),
        (ask(presence_penalty=2.5), ["sampling.presence_penalty"]),
        (ask(frequency_penalty=NAN), ["sampling.frequency_penalty"]),
        (ask(logit_bias={264: 1.0}), ["sampling.logit_bias"]),
        (ask(logit_bias={7: NAN}), ["sampling.logit_bias[7]"]),
        (ask(logit_bias={7: -INF}), ["sampling.logit_bias[7]"]),
        (ask(min_tokens=-1), ["sampling.min_tokens"]),
        (ask(min_tokens=4, max_tokens=3), ["sampling.min_tokens"]),
        (ask(min_tokens=129), ["sampling.min_tokens"]),
        (ask(stop=["a", ""]), ["sampling.stop[1]"]),
        (ask(stop=["a" * 257]), ["sampling.stop[0]"]),
        (ask(stop=["a"] * 17), ["sampling.stop"]),
        (ask(n=0), ["sampling.n"]),
        (ask(n=17), ["sampling.n"]),
        (ask(logprobs=-1), ["sampling.logprobs"]),
        (ask(logprobs=21), ["sampling.logprobs"]),
        (ask(prompt_logprobs=21), ["sampling.prompt_logprobs"]),
        (
            ask("", "", max_tokens=0, temperature=NAN, stop_token_ids=[999]),
            [
                "model",
                "prompt",
                "sampling.max_tokens",
                "sampling.temperature",
                "sampling.stop_token_ids[0]",
            ],
        ),
    ],
)
def test_every_bad_field_is_named(request_, fields):
    violations = list(check(request_, LIMITS))
    assert [violation.field for violation in violations] == fields
    assert all(violation.description for violation in violations)


@pytest.mark.parametrize(
    "request_",
    [
        ask(),
        ask(max_tokens=1, temperature=0, top_k=-1, top_p=1, seed=2**64 - 1),
        ask(temperature=100, top_k=0, top_p=1e-6, stop_token_ids=[0, 263]),
        ask(min_p=1, repetition_penalty=0.5, presence_penalty=-2, frequency_penalty=2, n=16),
        ask(logit_bias={0: -100, 263: 100}, min_tokens=128, stop=["é" * 128] * 16),
        ask(logprobs=0, prompt_logprobs=20),
        tokens(0, 263),
        messages("user", "assistant"),
    ],
)
def test_what_is_good_is_let_through(request_):
    assert list(check(request_, LIMITS)) == []


def test_a_description_does_not_grow_with_the_request():
    many = [2**32 - 1] * 100_000
    asked = [
        tokens(*many),
        ask(stop_token_ids=many),
        ask(stop=["a"] * 100_000),
        ask(logit_bias=dict.fromkeys(range(10_000), 200.0)),
    ]
    found = [violation for request in asked for violation in check(request, LIMITS)]
    assert len(found) == len(asked)
    assert all(len(violation.description) < 200 for violation in found)
