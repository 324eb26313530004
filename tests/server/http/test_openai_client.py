"""What OpenAI's own client is answered, beside gRPC's answers to the same."""

import asyncio
import time
from typing import Any

import openai
import pytest

from server.client import ZenClient
from zen_jax.chat_template import ChatTemplate
from zen_jax.tokenizer import Tokenizer

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 20}
ALL: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(server):
    return Tokenizer.from_folder(server.store.tokenizer_folder(None))


@pytest.fixture
def grpc_client(server):
    with ZenClient(server.address) as client:
        yield client


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)  # a poll with an end: a snapshot tells nobody of its change


def test_models(client):
    models = {model.id: model for model in client.models.list()}
    assert list(models) == ["base", "tiny-a", "tiny-b", "tiny-c"]
    assert {model.object for model in models.values()} == {"model"}
    assert models["tiny-a"].created > 1_600_000_000
    assert client.models.retrieve("tiny-b").id == "tiny-b"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("tiny-z")
    assert refused.value.code == "model_not_found"


def test_a_chat(client, grpc_client):
    answer = client.chat.completions.create(model="tiny-a", messages=HI, **SEEDED)
    own = grpc_client.generate("tiny-a", messages=HI, **SEEDED)
    (choice,) = answer.choices
    assert choice.message.content == own.text
    assert choice.message.role == "assistant"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.model == "tiny-a"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.endswith(own.completion.model.digest[:12])
    assert abs(answer.created - time.time()) < 60
    usage = answer.usage
    assert usage.prompt_tokens == own.completion.usage.prompt_tokens
    assert usage.completion_tokens == own.completion.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_chat_goes_on_to_the_contexts_end(client):
    answer = client.chat.completions.create(model="tiny-a", messages=HI, seed=1, extra_body=ALL)
    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


def test_a_completion(client, grpc_client):
    answer = client.completions.create(model="tiny-b", prompt="Once", seed=3, extra_body=ALL)
    own = grpc_client.generate("tiny-b", "Once", seed=3, max_tokens=16, **ALL)
    assert answer.choices[0].text == own.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 16


def test_prompts_of_every_form(client, tokenizer):
    texts = ["ab", "cd"]
    ids = [tokenizer.encode(text) for text in texts]

    def ask(prompt):
        found = client.completions.create(
            model="tiny-a", prompt=prompt, seed=1, temperature=0, max_tokens=5
        )
        return [choice.text for choice in found.choices]

    together = ask(texts)
    assert [ask(text)[0] for text in texts] == together
    assert ask(ids) == together
    assert [ask(own)[0] for own in ids] == together


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}])
def test_a_chats_stream_says_the_same(client, fields):
    settings = {"model": "tiny-a", "messages": HI, **SEEDED, **fields, "extra_body": ALL}
    whole = client.chat.completions.create(**settings)
    count = fields.get("n", 1)
    texts, finishes, entries = [""] * count, [None] * count, [[] for _ in range(count)]
    roles = []
    chunks = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    *chunks, last = chunks
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.usage is None
        (choice,) = chunk.choices
        if choice.delta.role:
            roles.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
        finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        if choice.logprobs:
            entries[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert sorted(roles) == list(range(count))
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {last.id}
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    if "logprobs" in fields:
        assert entries == [whole.choices[0].logprobs.content]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True, "logprobs": 1}])
def test_a_completions_stream_says_the_same(client, fields):
    settings = {"model": "tiny-a", "prompt": "Hé", **SEEDED, **fields, "extra_body": ALL}
    whole = client.completions.create(**settings)
    count = fields.get("n", 1)
    texts, finishes = [""] * count, [None] * count
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**settings, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        if choice.logprobs:
            for name, values in found.items():
                values += getattr(choice.logprobs, name)
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    if "logprobs" in fields:
        assert found == {n: getattr(whole.choices[0].logprobs, n) for n in found}


def test_log_probabilities_of_a_chat_are_grpcs(client, grpc_client):
    answer = client.chat.completions.create(
        model="tiny-a", messages=HI, **SEEDED, logprobs=True, top_logprobs=3
    )
    (own,) = grpc_client.samples("tiny-a", messages=HI, **SEEDED, logprobs=3)
    stopped = own.completion.HasField("matched_stop_token_id")
    expected = own.logprobs[:-1] if stopped else own.logprobs
    found = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in found] == [one.logprob for one in expected]
    tops = [[top.logprob for top in entry.top_logprobs] for entry in found]
    assert tops == [list(one.top_logprobs) for one in expected]
    text = b"".join(bytes(entry.bytes) for entry in found if entry.bytes is not None)
    assert text.decode("utf-8", "replace") == answer.choices[0].message.content
    for entry in found:
        assert entry.bytes is None or entry.token == spelled(bytes(entry.bytes))


def spelled(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def test_log_probabilities_of_a_prompt(client, grpc_client):
    answer = client.completions.create(
        model="tiny-a", prompt="Hé!", **SEEDED, logprobs=2, echo=True, extra_body=ALL
    )
    (own,) = grpc_client.samples("tiny-a", "Hé!", **SEEDED, logprobs=2, prompt_logprobs=2, **ALL)
    choice = answer.choices[0]
    assert choice.text == "Hé!" + own.text
    expected = [*own.prompt_logprobs, *own.logprobs]
    given = [one.logprob if one.HasField("logprob") else None for one in expected]
    assert choice.logprobs.token_logprobs == given
    assert choice.logprobs.top_logprobs[0] is None
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs[1:])
    for token, top, logprob in zip(
        choice.logprobs.tokens[1:], choice.logprobs.top_logprobs[1:], given[1:], strict=True
    ):
        assert top[token] == logprob
    # The bytes of é are two tokens: both stand where it does.
    plain = [o for o, one in zip(choice.logprobs.text_offset, expected, strict=True)]
    assert plain[-len(own.logprobs)] == 3
    assert [offset for offset in plain if offset == 1] == [1, 1]
    assert plain == sorted(plain)


def test_seeds_and_samples(client, grpc_client):
    def ask(**fields):
        settings = SEEDED | {"n": 3} | fields
        found = client.completions.create(model="tiny-c", prompt="Hi", **settings, extra_body=ALL)
        return [choice.text for choice in found.choices]

    first = ask()
    assert ask() == first
    assert len(set(first)) == 3
    assert ask(seed=8) != first
    own = grpc_client.samples("tiny-c", "Hi", **SEEDED, n=3, **ALL)
    assert [sample.text for sample in own] == first


@pytest.mark.parametrize("several", [False, True])
def test_stop_strings(client, several):
    settings: dict[str, Any] = {"model": "tiny-a", "prompt": "Hi", **SEEDED, "extra_body": ALL}
    whole = client.completions.create(**settings).choices[0].text
    stop = whole[5:7]
    answer = client.completions.create(**settings, stop=["\0never", stop] if several else stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_what_vllm_knows_beside_openai(client, grpc_client):
    more = {
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "min_tokens": 4,
        "stop_token_ids": [97],
        "ignore_eos": True,
        "priority": 3,
    }
    answer = client.completions.create(
        model="tiny-a",
        prompt="Hi",
        **SEEDED,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"98": 2, "99": -100},
        extra_body=more,
    )
    own = grpc_client.generate(
        "tiny-a",
        "Hi",
        **SEEDED,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={98: 2, 99: -100},
        **{name: value for name, value in more.items() if name != "priority"},
    )
    assert answer.choices[0].text == own.text


def test_a_prompt_that_was_read_before_is_counted(client):
    prompt = "The same beginning, long enough to fill a page of the cache."[:50]
    for expected in (0, 32):
        answer = client.completions.create(model="base", prompt=prompt, max_tokens=2)
        assert answer.usage.prompt_tokens_details.cached_tokens == expected


@pytest.mark.parametrize(
    "fields, error, param",
    [
        ({"model": "tiny-z"}, openai.NotFoundError, "model"),
        ({"temperature": 101}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 1000}, openai.BadRequestError, "max_tokens"),
        ({"max_completion_tokens": 1000}, openai.BadRequestError, "max_completion_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools"),
        ({"top_logprobs": 30, "logprobs": True}, openai.BadRequestError, "top_logprobs"),
        ({"extra_body": {"typo": 1}}, openai.BadRequestError, "typo"),
    ],
)
def test_errors(client, fields, error, param):
    with pytest.raises(error) as refused:
        client.chat.completions.create(**({"model": "base", "messages": HI} | fields))
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_a_deadline(client, left):
    for more in (
        {"extra_headers": {"X-Request-Timeout": "0.0001"}},
        {"extra_body": {"timeout": 1e-4}},
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="base", prompt="Hi", **more)
        assert refused.value.status_code == 504
        assert refused.value.code == "deadline_exceeded"
    until(lambda: not any(left()))


def test_a_client_that_goes_away_frees_its_row(client, server, left):
    streams = [
        client.completions.create(
            model=name, prompt="Hi", max_tokens=60, stream=True, extra_body=ALL
        )
        for name in ("base", "tiny-a", "tiny-b")
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    until(lambda: not any(left()))
    assert client.completions.create(model="base", prompt="Hi", max_tokens=1).usage


async def test_a_crowd_is_told_to_come_again(server, left):
    """More than rows and inbox: those refused hear when to come again, the others are answered."""
    async with openai.AsyncOpenAI(
        base_url=f"http://{server.http.address}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:

        async def ask() -> Any:
            try:
                return await client.completions.create(
                    model="base", prompt="Hi", n=4, max_tokens=50, extra_body=ALL
                )
            except openai.RateLimitError as error:
                return error

        answers = await asyncio.gather(*(ask() for _ in range(12)))
    refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
    assert 0 < len(refused) < 12
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert all(a.usage.completion_tokens == 200 for a in answers if a not in refused)
    until(lambda: not any(left()))


@pytest.mark.parametrize(
    "source, told",
    [
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        (
            "{% set n = namespace(s='xx') %}{% for i in range(60) %}"
            "{% set n.s = n.s ~ n.s %}{% endfor %}",
            "needs more than",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "needs more than",
        ),
    ],
)
async def test_a_template_that_goes_too_far_is_refused_and_others_go_on(
    server, monkeypatch, source, told
):
    tokenizer = server._tokenizers(server.store.variant("tiny-b"))
    template = ChatTemplate(source, cpu_seconds=0.3)
    monkeypatch.setattr(tokenizer, "_template", template)
    async with openai.AsyncOpenAI(
        base_url=f"http://{server.http.address}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        refused = asyncio.create_task(client.chat.completions.create(model="tiny-b", messages=HI))
        assert (await client.chat.completions.create(model="tiny-a", messages=HI)).choices
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            await refused
    assert caught.value.param == "messages"
    template.close()


def test_what_a_user_types_never_becomes_a_special_token(client, server, tokenizer, monkeypatch):
    seen = []
    submit = server.worker.submit

    def noting(request, on_event):
        seen.append(request.token_ids)
        submit(request, on_event)

    monkeypatch.setattr(server.worker, "submit", noting)
    special = {t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) is None}
    typed = "<|bos|>a<|eos|>b<|pad|>c<|task|>"
    assert all(tokenizer.name_of(t) in typed for t in sorted(special)[:4])

    def specials(ids: Any) -> list[int]:
        return [t for t in ids if t in special]

    halves = [{"type": "text", "text": typed[:11]}, {"type": "text", "text": typed[11:]}]
    for content in ("x" * len(typed), typed, halves):
        messages: list[Any] = [{"role": "user", "content": content}]
        client.chat.completions.create(model="base", messages=messages, max_tokens=1)
    assert [specials(ids) for ids in seen] == [[tokenizer.bos_id]] * 3
    assert {len(ids) for ids in seen} == {len(typed) + 2}
    client.completions.create(model="base", prompt=typed, max_tokens=1)
    assert specials(seen[-1]) == [tokenizer.bos_id]
