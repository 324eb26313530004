"""Bodies of all kinds, over HTTP: none is a fault of the server, and none leaves anything."""

import json
import string
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# All bodies of this module together: two tests of so many examples.
EXAMPLES, SOAK_EXAMPLES = 500, 12_500

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Those of a client are among them; a server's fault is not.
EXPECTED = {200, 400, 404, 408, 413, 415, 429}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from((0, 1, -1, 2**31, 2**32, 2**63, 2**64, 10**400)),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(("base", "tiny-a", "", "a/b", "\ud800", "\0", "<|eos|>")),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(string.ascii_lowercase, max_size=8), inner, max_size=4),
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "system", "king", "")), "content": st.text(max_size=9)}
    ),
    max_size=3,
)
ids = st.lists(st.integers(0, 270), max_size=5)
LIKELY: dict[str, Any] = {
    "model": st.sampled_from(("base", "tiny-a", "tiny-b", "tiny-c", "nobody")),
    "messages": messages,
    "prompt": st.one_of(st.text(max_size=9), ids, st.lists(st.text(max_size=5), max_size=4)),
    "max_tokens": st.integers(-1, 5),
    "max_completion_tokens": st.integers(-1, 5),
    "temperature": st.floats(-1, 101),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 300),
    "min_p": st.floats(-0.5, 1.5),
    "seed": st.integers(-1, 2**64),
    "n": st.integers(-1, 4),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3)),
    "stop_token_ids": ids,
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-110, 110), max_size=3),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 21)),
    "top_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(0, 101),
    "min_tokens": st.integers(-1, 5),
    "ignore_eos": st.booleans(),
    "priority": st.integers(-11, 11),
    "timeout": st.floats(-1, 100),
    "user": st.text(max_size=4),
    "tools": st.just([]),
    "nonsense": values,
}
NAMES = sorted(LIKELY)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A request that would do, with some fields of others and some that are broken."""
    path = draw(st.sampled_from((CHAT, TEXT)))
    own = "messages" if path == CHAT else "prompt"
    fields: dict[str, Any] = {"max_tokens": 2}
    fields |= {"model": draw(LIKELY["model"]), own: draw(LIKELY[own])}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=5, unique=True)):
        fields[name] = draw(LIKELY[name] if draw(st.integers(0, 3)) else values)
    body = json.dumps(fields, ensure_ascii=draw(st.booleans()))
    return path, body.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A body of which bytes were dropped, doubled or changed; or any bytes at all."""
    if not draw(st.integers(0, 3)):
        return draw(st.sampled_from((CHAT, TEXT))), draw(st.binary(max_size=60))
    path, body = draw(requests())
    at, to = sorted((draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))))
    piece = draw(st.one_of(st.just(body[at:to] * 2), st.binary(max_size=6), st.just(b"")))
    return path, body[:at] + piece + body[to:]


@pytest.mark.timeout(1800)  # some seconds, but for a busy machine or a soak
@pytest.mark.parametrize("kind", [requests(), damaged()], ids=["fields", "bytes"])
def test_no_body_is_the_servers_fault_and_none_leaves_anything(post, left, pytestconfig, kind):
    seen: dict[int, int] = {}

    @settings(
        max_examples=SOAK_EXAMPLES if pytestconfig.getoption("--soak") else EXAMPLES,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind)
    def ask(request: tuple[str, bytes]) -> None:
        status, body = post(*request)
        late = status == 504 and b"timeout" in request[1]  # it asked for so little time
        assert status in EXPECTED or late, (status, body)
        seen[status] = seen.get(status, 0) + 1
        if status != 200:
            error = json.loads(body)["error"]
            assert error["message"] and error["type"]
        elif body.startswith(b"data: "):
            assert body.endswith(b"data: [DONE]\n\n"), body
        else:
            json.loads(body, parse_constant=pytest.fail)

    ask()
    assert seen[400] > 50, seen
    end = time.monotonic() + 10
    while any(left()):
        assert time.monotonic() < end, left()
        time.sleep(0.01)  # a poll with an end: a snapshot tells nobody of its change
