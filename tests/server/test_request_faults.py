"""Faults that people report of servers like this one, looked for where a client would meet them:
over gRPC, with four models of the demonstration's family on two slots and four rows.

The same faults are looked for in the hand-computable model's world: an abort that leaves something
(test_schedules), stop strings and characters in parts (test_stream, test_worker), deadlines in
the queue (test_scheduler), log-probabilities of prompts in parts (test_worker).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import zen_jax
from server import demo
from server.app import ZenServer, running
from server.client import AsyncZenClient, ZenError
from server.serve_options import ServeOptions
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc

pytestmark = pytest.mark.usefixtures("compiled")

NAMES = ("zen4-math", "zen4-french", "zen4-upper", "zen4-reverse")
ROWS, SLOTS, LENGTH = 4, 2, 256
LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True}
# So many long ones keep all rows busy for seconds.
CROWD = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[ZenServer]:
    folder = tmp_path_factory.mktemp("family")
    members = [member for member in demo.read_family(demo.FAMILY) if member.name in NAMES]
    store = demo.convert_family(demo.FAMILY, members, folder / "store", folder, lambda *step: None)
    options = ServeOptions(port=0, rows=ROWS, slots=SLOTS, max_length=LENGTH)
    with running(store, options) as server:
        yield server


@pytest.fixture
async def client(server: ZenServer) -> AsyncIterator[AsyncZenClient]:
    async with AsyncZenClient(server.address) as client:
        yield client
    await until_nothing_is_left(server)


async def until_nothing_is_left(server: ZenServer) -> None:
    """No row, nobody waiting, no lease."""

    def left() -> list[int]:
        seen = server.worker.snapshot()
        held = [count for v in seen.variants for count in (v.leases, v.waiting)]
        return [seen.rows_in_use, seen.waiting, *held]

    await until(lambda: not any(left()))


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what comes by itself."""
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)  # a poll with an end: a snapshot tells nobody of its change


async def started(stream: Any) -> Any:
    """The stream, once its first text is there."""
    await anext(aiter(stream))
    return stream


async def test_an_abort_leaves_nothing_wherever_the_request_was(server, client):
    """Running, waiting for a row, waiting for a slot that others hold, and before all that."""
    crowd = [client.stream("base", "ab\n", **LONG) for _ in range(CROWD)]
    with_slot = [client.stream(name, "ab\n", **LONG) for name in ("zen4-math", "zen4-upper")]
    without_slot = [client.stream("zen4-french", "ab\n", **LONG) for _ in range(3)]
    streams = [*crowd, *with_slot, *without_slot]
    asking = [asyncio.ensure_future(started(stream)) for stream in streams]
    await until(lambda: server.worker.snapshot().waiting >= CROWD // 2)
    await until(lambda: server.worker.snapshot().rows_in_use == ROWS)
    at_once = client.stream("base", "ab\n", **LONG)
    at_once.cancel()
    for stream in reversed(streams):
        stream.cancel()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert sum(isinstance(end, asyncio.CancelledError | ZenError) for end in ends) > CROWD // 2
    await until_nothing_is_left(server)
    answer = await client.generate("zen4-upper", "table\n", temperature=0)
    assert answer.text == "TABLE"


@pytest.mark.parametrize("reads", [True, False], ids=["streaming", "not reading"])
async def test_a_client_that_goes_away_frees_its_rows(server, client, reads):
    """Its connection is gone, no cancel was sent for the calls; it read, or it never did."""
    channel = grpc.aio.insecure_channel(server.address)
    stub: Any = generate_pb2_grpc.GenerateServiceStub(channel)
    request = pb.GenerateRequest(model="zen4-math", prompt="1+1\n")
    request.sampling.max_tokens, request.sampling.ignore_eos = 120, True
    calls = [stub.Generate(request) for _ in range(ROWS)]
    await until(lambda: server.worker.snapshot().rows_in_use == ROWS)
    if reads:
        await calls[0].read()
    await channel.close()
    await until_nothing_is_left(server)


@pytest.mark.parametrize(
    "stop, text",
    [
        (["15+5"], ""),  # as many tokens as bytes: seen whole only with the fourth
        (["50=65", "0=6"], "15+5"),  # the one that is whole first ends it, not what began first
        (["50=9"], "15+50=65"),  # begins, and comes to nothing: what was held back is shown
        (["65!"], "15+50=65"),  # still held back when the answer ends
    ],
)
async def test_no_part_of_a_stop_string_is_shown(client, stop, text):
    stream = client.stream("zen4-math", "27+38\n", temperature=0, stop=stop)
    pieces = [piece async for piece in stream]
    assert "".join(pieces) == stream.generation.text == text
    matched = stream.generation.completion.matched_stop
    assert matched in stop if text != "15+50=65" else matched == ""


async def test_a_character_in_parts_is_shown_whole_or_at_the_end(client):
    """Bytes are tokens here: é is 0xC3 0xA9, each made certain in turn."""
    whole = client.stream("zen4-french", token_ids=[0xC3], logit_bias={0xA9: 100}, max_tokens=1)
    assert [piece async for piece in whole if piece] == ["\ufffd"]  # alone it is no character
    stream = client.stream(
        "base", "x", logit_bias={0xE2: 90, 0x82: 60, 0xAC: 30}, frequency_penalty=2, max_tokens=1
    )
    pieces = [piece async for piece in stream]
    assert "".join(pieces) == "\ufffd" and stream.generation.token_ids == [0xE2]


@pytest.mark.parametrize(
    "fields, options",
    [
        (["sampling.max_tokens"], {"prompt": "a", "max_tokens": 0}),
        (["sampling.max_tokens"], {"prompt": "a", "max_tokens": LENGTH}),
        (["prompt"], {"prompt": ""}),
        (["prompt"], {"prompt": "a" * LENGTH}),
        (["token_ids"], {"token_ids": [5] * LENGTH}),
        (["token_ids.ids[1]"], {"token_ids": [5, 100_000]}),
        (["token_ids.ids"], {"token_ids": []}),
    ],
)
async def test_what_cannot_be_asked_for_is_named(client, fields, options):
    with pytest.raises(ZenError) as refused:
        await client.generate("zen4-math", **options)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert list(refused.value.fields) == fields


async def test_without_max_tokens_an_answer_ends_with_the_context_at_the_latest(client):
    answer = await client.generate("base", "a" * (LENGTH - 20), ignore_eos=True)
    usage = answer.completion.usage
    assert usage.prompt_tokens + usage.completion_tokens == LENGTH
    assert answer.completion.finish_reason == pb.FINISH_REASON_LENGTH


def all_sorts() -> list[dict[str, Any]]:
    """Requests of every kind that share calls: lengths at which shapes change, any model."""
    draw = np.random.default_rng(7)
    asked = []
    for i, length in enumerate((1, 2, 31, 32, 33, 64, 65, 100)):
        asked.append(
            {
                "model": ("base", *NAMES)[i % 5],
                "token_ids": draw.integers(97, 122, length).tolist(),
                "max_tokens": 12,
                "ignore_eos": True,
                "seed": i,
                "temperature": (0.0, 0.8, 1.3)[i % 3],
                "top_k": (0, 5)[i % 2],
                "logprobs": 3,
                "prompt_logprobs": 0,
            }
        )
    return asked


async def test_seeds_and_neighbours_change_nothing(client):
    """Neither tokens nor any log-probability, though neighbours are longer and come and go."""

    async def ask(options: dict[str, Any]) -> Any:
        options = dict(options)
        return await client.generate(options.pop("model"), **options)

    alone = [await ask(options) for options in all_sorts()]
    for turn in range(2):
        order = np.random.default_rng(turn).permutation(len(alone))
        together = await asyncio.gather(*(ask(all_sorts()[i]) for i in order))
        for i, answer in zip(order, together, strict=True):
            assert answer.token_ids == alone[i].token_ids, all_sorts()[i]
            for told, before in (
                (answer.logprobs, alone[i].logprobs),
                (answer.prompt_logprobs[1:], alone[i].prompt_logprobs[1:]),
            ):
                values = [entry.logprob for entry in told]
                assert values == pytest.approx([entry.logprob for entry in before], abs=1e-5)


async def test_logprobs_are_those_of_one_forward_pass(server, client):
    """Of the prompt and of the answer, each at its own place."""
    family = zen_jax.load(server.store.path)
    # Of a variant, a decode step's 8-bit tables are off by up to 2 % of what the variant adds.
    for name, off in (("base", 1e-4), ("zen4-reverse", 2e-2)):
        prompt = np.random.default_rng(3).integers(97, 122, 70).tolist()
        answer = await client.generate(
            name, token_ids=prompt, max_tokens=10, seed=2, logprobs=2, prompt_logprobs=2
        )
        whole = prompt + answer.token_ids
        logits = np.asarray(family[name].logits([whole])[0], np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        told = [*answer.prompt_logprobs, *answer.logprobs]
        assert not told[0].HasField("logprob")
        for place, (token, entry) in enumerate(zip(whole[1:], told[1:], strict=True)):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(expected[place, token], abs=off)
            top = np.sort(expected[place])[::-1][:2]
            np.testing.assert_allclose(entry.top_logprobs, top, atol=off)


async def test_a_deadline_in_the_queue_is_told_as_such_and_read_nowhere(server, client):
    crowd = [client.stream("base", "a", **LONG) for _ in range(CROWD)]
    asking = [asyncio.ensure_future(started(stream)) for stream in crowd]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ZenError) as late:
        await client.generate("zen4-math", "27+38\n", timeout_s=0.1)
    assert late.value.code == "DEADLINE_EXCEEDED"
    assert server.worker.snapshot().rows_in_use == ROWS  # nobody made room for it
    for stream in crowd:
        stream.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
