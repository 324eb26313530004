"""Random and mutated messages over gRPC: the server answers, or says what is wrong.

It never crashes, never answers INTERNAL or UNKNOWN, and nothing is left behind.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
from hypothesis import strategies as st

from server.app import ZenServer, running
from server.serve_options import ServeOptions
from zen.v1 import generate_pb2 as pb
from zen.v1 import variants_pb2
from zen_jax.checkpoint.store import Store

pytestmark = pytest.mark.usefixtures("compiled")

# Examples of a test, and messages of each, which run side by side.
EXAMPLES, AT_ONCE = 160, 8
# Longer than anything that may be asked for takes here.
DEADLINE_S = 20.0

EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,  # unloaded by a call beside it
    grpc.StatusCode.FAILED_PRECONDITION,
}
GENERATE = "/zen.v1.GenerateService/Generate"
OTHERS = {
    f"/zen.v1.VariantService/{name}": getattr(variants_pb2, f"{name}Request")
    for name in ("ListVariants", "GetVariant", "LoadVariant", "UnloadVariant", "PinVariant")
}


def numbers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    near = st.sampled_from([v for v in (-1, 0, 1, 2, 5, 63, 64, 255, 256, low, high) if v >= low])
    return st.one_of(near, st.integers(0, 40), st.integers(low, high))


FLOATS = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.0, float("nan"), float("inf"), -float("inf"), 1e-40]),
    st.floats(width=32),
)
TEXTS = st.one_of(
    st.sampled_from(["Hi", "", "a", "\0", "é", "€" * 30, "<|endoftext|>", "../x", "x" * 2000]),
    st.text(max_size=30).filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)),
)
MODELS = st.one_of(
    st.sampled_from(["base", "tiny-a", "tiny-b", "tiny-c", "tiny-d", "Base", "tiny-a/../tiny-b"]),
    TEXTS,
)
TOKENS = st.lists(numbers(32, signed=False), max_size=6)


@st.composite
def sampling(draw: st.DrawFn) -> pb.Sampling:
    """Each field with a chance of its own; most answers are short."""
    given: dict[str, Any] = {"max_tokens": draw(st.integers(1, 6))}
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "max_tokens": numbers(32, signed=True),
        "top_k": numbers(32, signed=True),
        "min_tokens": numbers(32, signed=True),
        "n": st.one_of(st.integers(-1, 3), numbers(32, signed=True)),
        "logprobs": numbers(32, signed=True),
        "prompt_logprobs": numbers(32, signed=True),
        "seed": numbers(64, signed=False),
        "temperature": FLOATS,
        "top_p": FLOATS,
        "min_p": FLOATS,
        "repetition_penalty": FLOATS,
        "presence_penalty": FLOATS,
        "frequency_penalty": FLOATS,
        "ignore_eos": st.booleans(),
        "stop_token_ids": TOKENS,
        "stop": st.lists(TEXTS, max_size=3),
        "logit_bias": st.dictionaries(numbers(32, signed=False), FLOATS, max_size=3),
    }
    for name in draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4, unique=True)):
        given[name] = draw(kinds[name])
    return pb.Sampling(**given)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    message = pb.GenerateRequest(model=draw(MODELS), sampling=draw(sampling()))
    kind = draw(st.sampled_from(["prompt", "prompt", "token_ids", "messages", "none"]))
    if kind == "prompt":
        message.prompt = draw(TEXTS)
    elif kind == "token_ids":
        message.token_ids.ids.extend(draw(TOKENS))
    elif kind == "messages":
        for role, content in draw(st.lists(st.tuples(TEXTS, TEXTS), max_size=3)):
            message.messages.messages.add(role=role, content=content)
    message.priority = draw(st.one_of(st.just(0), numbers(32, signed=True)))
    return message


@st.composite
def mutated(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> bytes:
    """A message's bytes, some of them changed, left out or put in."""
    data = bytearray(draw(messages).SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "cut", "put", "swap"])):
            case "flip" if at < len(data):
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 4))]
            case "put":
                data[at:at] = draw(st.binary(min_size=1, max_size=6))
            case "swap":
                data = data[at:] + data[:at]
    return bytes(data)


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """Methods, each with what is sent to it."""
    chosen = []
    for _ in range(AT_ONCE):
        if draw(st.integers(0, 4)):
            chosen.append((GENERATE, draw(mutated(requests()))))
            continue
        method = draw(st.sampled_from(sorted(OTHERS)))
        kind = OTHERS[method]
        fields = {"name": draw(MODELS)} if "name" in kind.DESCRIPTOR.fields_by_name else {}
        chosen.append((method, draw(mutated(st.just(kind(**fields))))))
    return chosen


@pytest.fixture(scope="module")
def server(tiny_store: Path, compiled: Path) -> Iterator[ZenServer]:
    options = ServeOptions(port=0, rows=4, slots=2, max_length=64, inbox=16, operators=True)
    with running(Store(tiny_store), options) as server:
        yield server


async def send(address: str, chosen: Sequence[tuple[str, bytes]]) -> list[grpc.StatusCode]:
    async with grpc.aio.insecure_channel(address) as channel:

        async def one(method: str, data: bytes) -> grpc.StatusCode:
            call = channel.unary_stream(method)(data, timeout=DEADLINE_S)
            try:
                async for _ in call:
                    pass
            except grpc.RpcError:
                pass
            return await call.code()

        return await asyncio.gather(*(one(*call) for call in chosen))


def test_whatever_comes_in_is_answered(server: ZenServer, scale: int, caplog: Any):
    seen: set[grpc.StatusCode] = set()

    @hypothesis.settings(
        max_examples=EXAMPLES * scale, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(calls())
    def run(chosen: list[tuple[str, bytes]]) -> None:
        codes = asyncio.run(send(server.address, chosen))
        assert set(codes) <= EXPECTED, [
            (code.name, *call) for code, call in zip(codes, chosen, strict=True)
        ]
        seen.update(codes)

    run()
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= seen
    assert grpc.StatusCode.NOT_FOUND in seen
    assert server.worker is not None and server.worker.alive
    snapshot = server.worker.snapshot()
    left = [snapshot.rows_in_use, snapshot.waiting, snapshot.pages_held]
    left += [count for v in snapshot.variants for count in (v.leases, v.waiting)]
    assert not any(left) and server._generate.in_flight == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
