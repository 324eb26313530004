"""From JSON to protobuf: what is taken, what is refused, and by which name."""

import json
from typing import Any

import pytest

from server.http import chat, completions
from server.http.body import MAX_BODY_BYTES, ClientGone, parse, read_body
from server.http.errors import HttpError
from zen.v1 import generate_pb2 as pb

HI = [{"role": "user", "content": "Hi"}]


def of_chat(header: str | None = None, **fields: Any) -> Any:
    return chat.call_of({"model": "m", "messages": HI} | fields, header)


def of_completion(header: str | None = None, **fields: Any) -> Any:
    return completions.call_of({"model": "m", "prompt": "Hi"} | fields, header)


SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 7,
    "min_p": 0.25,
    "seed": 2**64 - 1,
    "presence_penalty": -1.5,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "min_tokens": 3,
    "max_tokens": 9,
    "ignore_eos": True,
    "n": 2,
    "stop_token_ids": [1, 2],
    "stop": ["a", "b"],
    "logit_bias": {"5": -1, "0": 0.5},
}


@pytest.mark.parametrize("make", [of_chat, of_completion])
def test_every_setting_arrives(make):
    call = make(**SAMPLING, priority=-3, timeout=7)
    sampling = call.requests[0].sampling
    found = {name: getattr(sampling, name) for name in SAMPLING if name != "logit_bias"}
    expected = SAMPLING | {"logit_bias": None}
    del expected["logit_bias"]
    assert {
        n: list(v) if isinstance(expected[n], list) else v for n, v in found.items()
    } == expected
    assert dict(sampling.logit_bias) == {5: -1, 0: 0.5}
    assert call.requests[0].priority == -3
    assert (call.timeout_s, call.samples, call.model) == (7, 2, "m")


def test_nothing_given_is_nothing_set():
    nulls = dict.fromkeys([*SAMPLING, "logprobs", "stream", "tools", "user"])
    for call in (of_chat(), of_completion(), of_chat(**nulls), of_completion(**nulls)):
        assert call.requests[0].sampling == pb.Sampling()
        assert (call.stream, call.include_usage, call.timeout_s) == (False, False, None)
    assert of_completion().max_tokens == 16
    assert of_chat().max_tokens > 10**9


def test_messages_and_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None}
    given = [{"role": "user", "content": parts}, answer | {"annotations": []}]
    turns = of_chat(messages=given).requests[0].messages.messages
    assert [(turn.role, turn.content) for turn in turns] == [("user", "ab"), ("assistant", "c")]


@pytest.mark.parametrize(
    "prompt, texts, ids",
    [
        ("a", ["a"], [[]]),
        (["a", "b"], ["a", "b"], [[], []]),
        ([1, 2], [""], [[1, 2]]),
        ([[1], [2, 3]], ["", ""], [[1], [2, 3]]),
        (["a", [1]], ["a", ""], [[], [1]]),
        ([[]], [""], [[]]),
    ],
)
def test_prompts(prompt, texts, ids):
    requests = of_completion(prompt=prompt).requests
    assert [request.prompt for request in requests] == texts
    assert [list(request.token_ids.ids) for request in requests] == ids
    assert all(request.WhichOneof("input") for request in requests)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_logprobs_of_a_chat(fields, expected):
    sampling = of_chat(**fields).requests[0].sampling
    assert (sampling.logprobs if sampling.HasField("logprobs") else None) == expected


def test_logprobs_of_a_completion():
    sampling = of_completion(logprobs=2).requests[0].sampling
    assert sampling.logprobs == 2 and not sampling.HasField("prompt_logprobs")
    sampling = of_completion(logprobs=2, echo=True).requests[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)


def test_max_tokens_by_either_name():
    assert of_chat(max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    assert of_chat(max_completion_tokens=5, max_tokens=5).requests[0].sampling.max_tokens == 5
    for name in ("max_tokens", "max_completion_tokens"):
        assert of_chat(**{name: 0}).param_of(0, "sampling.max_tokens") == name


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "safety_identifier": "x"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"best_of": 1, "suffix": "", "service_tier": "auto", "parallel_tool_calls": True},
    ],
)
def test_what_asks_for_nothing_is_taken(fields):
    assert of_completion(**fields).requests == of_completion().requests


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"nonsense": 1}, "nonsense"),
        ({"temprature": 0.5}, "temprature"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 1e301}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"n": "2"}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": [1]}, "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous": 1}}, "stream_options.continuous"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop_token_ids": 1}, "stop_token_ids"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[1]"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"priority": 0.5}, "priority"),
    ],
)
@pytest.mark.parametrize("make", [of_chat, of_completion])
def test_a_field_that_will_not_do_is_named(make, fields, param):
    with pytest.raises(HttpError) as refused:
        make(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize(
    "make, fields, param",
    [
        (of_chat, {"prompt": "x"}, "prompt"),
        (of_chat, {"echo": True}, "echo"),
        (of_chat, {"messages": None}, "messages"),
        (of_chat, {"messages": "Hi"}, "messages"),
        (of_chat, {"messages": HI * 4097}, "messages"),
        (of_chat, {"messages": ["Hi"]}, "messages[0]"),
        (of_chat, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
        (of_chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (of_chat, {"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
        (of_chat, {"messages": [HI[0] | {"name": "me"}]}, "messages[0].name"),
        (of_chat, {"messages": [HI[0] | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            of_chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            of_chat,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (of_chat, {"top_logprobs": 2}, "top_logprobs"),
        (of_chat, {"logprobs": 2}, "logprobs"),
        (of_chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        (of_completion, {"messages": HI}, "messages"),
        (of_completion, {"prompt": None}, "prompt"),
        (of_completion, {"prompt": []}, "prompt"),
        (of_completion, {"prompt": 5}, "prompt"),
        (of_completion, {"prompt": [1, "a"]}, "prompt[1]"),
        (of_completion, {"prompt": ["a", 1]}, "prompt[1]"),
        (of_completion, {"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        (of_completion, {"prompt": ["a"] * 257}, "prompt"),
        (of_completion, {"prompt": ["a"] * 200, "n": 4}, "prompt"),
        (of_completion, {"n": 2**31 - 1}, "n"),
        (of_completion, {"logprobs": True}, "logprobs"),
        (of_completion, {"echo": True, "logprobs": 1, "n": 2}, "n"),
    ],
)
def test_what_one_of_them_refuses(make, fields, param):
    with pytest.raises(HttpError) as refused:
        make(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "header, body, expected",
    [("2.5", None, 2.5), ("2", 1, 1), ("1", 2.5, 1), (None, 3, 3)],
)
def test_the_shorter_time_counts(header, body, expected):
    assert of_chat(header, timeout=body).timeout_s == expected


@pytest.mark.parametrize("header", ["", "-1", "nan", "1e3", "1_0", "0", "soon"])
def test_a_time_that_is_none(header):
    with pytest.raises(HttpError, match=r"imeout"):
        of_chat(header)


@pytest.mark.parametrize(
    "make, field, param",
    [
        (of_chat, "messages.messages[3].role", "messages[3].role"),
        (of_chat, "messages", "messages"),
        (of_chat, "input", "messages"),
        (of_chat, "sampling.logprobs", "top_logprobs"),
        (of_chat, "sampling.stop[2]", "stop[2]"),
        (of_chat, "priority", "priority"),
        (of_completion, "sampling.prompt_logprobs", "logprobs"),
        (of_completion, "token_ids.ids[4]", "prompt[4]"),
        (of_completion, "input", "prompt"),
    ],
)
def test_a_violation_has_the_clients_name(make, field, param):
    assert make().param_of(0, field) == param


def test_a_violation_of_one_of_several_prompts():
    call = of_completion(prompt=[[1], [2]])
    assert call.param_of(1, "token_ids.ids[4]") == "prompt[1][4]"
    assert call.param_of(1, "token_ids") == "prompt[1]"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "\xc3"}',
        b'{"model": "\\ud800"}',
        b'{"model": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"m": {"a": 1, "a": 2}}',
        b'{"a": 1' + b"0" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        '\ufeff{"a": 1}'.encode(),
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_what_is_no_json_object(body):
    with pytest.raises(HttpError) as refused:
        parse(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
    json.loads(refused.value.body())


def test_what_is_one():
    assert parse('{"a": "é\\ud83d\\ude00", "b": [1.5, null]}'.encode()) == {
        "a": "é😀",
        "b": [1.5, None],
    }


def receiving(*messages: dict[str, Any]) -> Any:
    given = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(given)

    return receive


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_comes_in_parts():
    assert await read_body({}, receiving(part(b"a"), part(b"b", False))) == b"ab"


@pytest.mark.parametrize(
    "headers, parts, status",
    [
        ({"content-type": "text/plain"}, [], 415),
        ({"content-length": "9" * 30}, [], 413),
        ({}, [part(b"x" * (MAX_BODY_BYTES + 1), False)], 413),
        ({}, [part(b"x" * MAX_BODY_BYTES)] * 9, 413),
    ],
)
async def test_a_body_that_is_not_taken(headers, parts, status):
    with pytest.raises(HttpError) as refused:
        await read_body(headers, receiving(*parts))
    assert refused.value.status == status


async def test_a_body_that_ends_too_early():
    with pytest.raises(ClientGone):
        await read_body({}, receiving(part(b"a"), {"type": "http.disconnect"}))


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_types_of_json(kind):
    assert await read_body({"content-type": kind}, receiving(part(b"{}", False))) == b"{}"
