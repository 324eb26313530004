"""The whole way with the real family: files, store, engine, worker, and gRPC on a real port."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc_tools
import jax
import openai
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_tools import protoc

from server import demo
from server.app import ZenServer, running
from server.client import AsyncZenClient, ZenClient, ZenError
from zen_jax.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("compiled")

ROOT = Path(__file__).resolve().parents[2]
INBOX = 32
MEMBERS = demo.read_family(demo.FAMILY)
MODELS = ["base", *(member.name for member in MEMBERS)]
# Longer than any test needs it to run.
ENDLESS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[ZenServer]:
    folder = tmp_path_factory.mktemp("family")
    store = demo.convert_family(demo.FAMILY, MEMBERS, folder / "store", folder, lambda *step: None)
    options = replace(demo.serve_options(len(MEMBERS)), inbox=INBOX, http_port=0, operators=True)
    with running(store, options) as server:
        yield server


@pytest.fixture
def client(server: ZenServer) -> Iterator[ZenClient]:
    with ZenClient(server.address) as client:
        yield client


def variants_answer_like_themselves(answers: list[list[int]]) -> bool:
    """Whether the models differ: else nothing is shown by comparing them."""
    return len({tuple(tokens) for tokens in answers}) > len(answers) // 2


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11}],
    ids=["greedy", "seeded"],
)
async def test_fifteen_streams_at_once_equal_each_alone(server, sampling):
    async with AsyncZenClient(server.address) as client:

        async def ask(model: str) -> list[int]:
            options = sampling | {"max_tokens": 12, "ignore_eos": True}
            return (await client.generate(model, "reverse: table\n", **options)).token_ids

        compiled = server.engine.compiles
        alone = [await ask(model) for model in MODELS]
        together = await asyncio.gather(*map(ask, MODELS))
    assert together == alone
    assert variants_answer_like_themselves(alone)
    assert server.engine.compiles == compiled


async def test_the_demonstration_holds(server):
    found = await demo.ask_family(server, MEMBERS, 4, lambda *step: None)
    asked = {member.name: len(member.probes[:4]) for member in MEMBERS if member.probes}
    assert len(asked) == 9
    assert sum(found.right.values()) >= 0.8 * sum(asked.values())
    assert found.residency.count == 14
    assert found.residency.ratio <= 0.15
    by_name = {answer.model: answer.text for answer in found.same}
    assert by_name["zen4-upper"] == "TABLE"
    assert found.fitting["zen4-math"].text == "15+50=65"
    assert found.base_fitting["zen4-math"].text != "15+50=65"


async def test_the_tokens_decode_to_the_text_and_no_character_is_shown_in_part(server):
    store = server.store
    tokenizer = Tokenizer.from_folder(store.tokenizer_folder(store.variant("zen4-french")))
    prompt = "Les fichiers supprimés sont créés à la "

    async def ask(client: AsyncZenClient, seed: int) -> int:
        """How many characters of several bytes came."""
        stream = client.stream("zen4-french", prompt, max_tokens=60, temperature=0.4, seed=seed)
        pieces = [piece async for piece in stream]
        whole = tokenizer.decode(stream.generation.token_ids)
        assert "".join(pieces) == whole
        if "\ufffd" in whole:  # the model itself wrote half a character
            return 0
        assert not any("\ufffd" in piece for piece in pieces)
        return sum(len(c.encode()) > 1 for c in whole)

    async with AsyncZenClient(server.address) as client:
        split = await asyncio.gather(*(ask(client, seed) for seed in range(8)))
    assert sum(split) > 0


async def until_rows(client: AsyncZenClient, active: int) -> None:
    """Waits until so many rows run."""
    async with asyncio.timeout(20):
        while True:
            if (await client.list_variants()).rows_active == active:
                return
            await asyncio.sleep(0.01)


async def test_a_full_house_refuses_and_a_cancelled_stream_makes_room(server):
    rows = server.engine.sizes.rows
    async with AsyncZenClient(server.address) as client:
        await until_rows(client, 0)
        streams = [client.stream("base", "a", **ENDLESS) for _ in range(rows)]
        texts = [aiter(stream) for stream in streams]
        for text in texts:
            await anext(text)
        await until_rows(client, rows)
        waiting = [client.stream("zen4-upper", "b\n", **ENDLESS) for _ in range(INBOX)]
        await until_waiting(server, INBOX)

        with pytest.raises(ZenError) as refused:
            await client.generate("zen4-math", "1+1\n")
        assert refused.value.code == "RESOURCE_EXHAUSTED"
        assert refused.value.retry_after_s
        # Health and operators are answered all the same.
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await client.list_variants()).rows_active == rows

        # The place of one that goes is taken by one that waits, while the others go on.
        streams[0].cancel()
        async with asyncio.timeout(20):
            await anext(aiter(waiting[0]))
        await anext(texts[1])
        for stream in [*streams, *waiting]:
            stream.cancel()
        await until_rows(client, 0)
        assert (await client.generate("zen4-upper", "table\n", temperature=0)).text == "TABLE"
    assert all(status.leases == 0 for status in server.worker.snapshot().variants)


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """Everything that XLA compiles meanwhile, whoever asks for it."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


async def test_mixed_requests_compile_nothing_and_leave_nothing(server, scale):
    """Of all models, greedy and seeded, short and long, a quarter of them cancelled."""
    draw, ended = random.Random(5), Counter[str]()
    gate = asyncio.Semaphore(INBOX)

    async def ask(client: AsyncZenClient) -> None:
        options = {
            "max_tokens": draw.randint(1, 12),
            "temperature": draw.choice((0.0, 0.9)),
            "top_k": draw.choice((0, 20)),
            "seed": draw.randrange(1000),
            "ignore_eos": draw.random() < 0.5,
        }
        prompt = "ab " * draw.choice((1, 5, 20, 75))
        model, gives_up = draw.choice(MODELS), draw.random() < 0.25
        async with gate:
            stream = client.stream(model, prompt, **options)
            try:
                async for _ in stream:
                    if gives_up:
                        stream.cancel()
                ended["finished"] += 1
            except (ZenError, asyncio.CancelledError):
                assert gives_up
                ended["cancelled"] += 1

    compiled = server.engine.compiles
    with compiled_programs() as seen:
        async with AsyncZenClient(server.address) as client:
            await asyncio.gather(*(ask(client) for _ in range(120 * scale)))
            await until_rows(client, 0)
    assert seen == [] and server.engine.compiles == compiled
    left = server.worker.snapshot()
    assert (left.rows_in_use, left.waiting) == (0, 0)
    assert all(status.leases == status.waiting == 0 for status in left.variants)
    assert ended["finished"] > 60 * scale and ended["cancelled"] > 5 * scale, ended


async def until_waiting(server: ZenServer, count: int) -> None:
    """Waits until so many requests have no row."""
    async with asyncio.timeout(20):
        while True:
            if server.worker.snapshot().waiting == count:
                return
            await asyncio.sleep(0.01)


def test_a_deadline_ends_a_stream_and_frees_its_row(client):
    with pytest.raises(ZenError, match="DEADLINE_EXCEEDED"):
        client.generate("zen4-upper", "a\n", timeout_s=0.05, **ENDLESS)
    assert client.generate("zen4-upper", "table\n", temperature=0).text == "TABLE"
    assert client.list_variants().rows_active == 0


def test_a_conversation_is_laid_out_by_the_variants_template(client):
    turns = [{"role": "user", "content": "27+38"}]
    answer = client.generate("zen4-math", messages=turns, temperature=0)
    assert answer.text == "15+50=65"
    assert answer.completion.matched_stop_token_id == 257


def test_openais_client_is_answered_alike(server):
    url = f"http://{server.http.address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["base", *sorted(MODELS[1:])]
        turns: Any = [{"role": "user", "content": "27+38"}]
        chat = client.chat.completions.create(model="zen4-math", messages=turns, temperature=0)
        assert chat.choices[0].message.content == "15+50=65"
        assert chat.choices[0].finish_reason == "stop"
        settings: Any = {"model": "zen4-upper", "prompt": "table\n", "temperature": 0}
        assert client.completions.create(**settings).choices[0].text == "TABLE"
        stream = client.completions.create(**settings, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "TABLE"


class WireClient:
    """Made of the .proto files and gRPC alone: no generated code, nothing of the server's."""

    def __init__(self, address: str, folder: Path):
        path = folder / "zen.binpb"
        include = Path(grpc_tools.__file__).parent / "_proto"
        files = sorted((ROOT / "protos" / "zen" / "v1").glob("*.proto"))
        arguments = [f"-I{ROOT / 'protos'}", f"-I{include}", f"--descriptor_set_out={path}"]
        arguments.append("--include_imports")
        assert protoc.main(["protoc", *arguments, *map(str, files)]) == 0
        described = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
        pool = descriptor_pool.DescriptorPool()
        for file in described.file:
            pool.Add(file)
        names = [file.name for file in described.file]
        self.messages = message_factory.GetMessageClassesForFiles(names, pool)
        self.channel = grpc.insecure_channel(address)

    def call(self, method: str, request: str, answer: str, streaming: bool) -> Any:
        make = self.channel.unary_stream if streaming else self.channel.unary_unary
        return make(
            f"/zen.v1.{method}",
            request_serializer=self.messages[f"zen.v1.{request}"].SerializeToString,
            response_deserializer=self.messages[f"zen.v1.{answer}"].FromString,
        )


@pytest.fixture(scope="module")
def wire(server: ZenServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireClient]:
    wire = WireClient(server.address, tmp_path_factory.mktemp("wire"))
    yield wire
    wire.channel.close()


def test_a_client_of_the_proto_alone_generates(wire):
    generate = wire.call("GenerateService/Generate", "GenerateRequest", "GenerateResponse", True)
    request = wire.messages["zen.v1.GenerateRequest"](model="zen4-math", prompt="27+38\n")
    request.sampling.temperature = 0
    answers = list(generate(request))
    assert "".join(answer.text for answer in answers) == "15+50=65"
    completion = answers[-1].completion
    assert completion.model.name == "zen4-math"
    assert completion.model.version == 1
    assert len(completion.model.digest) == 64
    assert completion.usage.prompt_tokens == 7
    assert completion.usage.completion_tokens == 9
    assert 0 < completion.timings.prefill_seconds <= completion.timings.first_token_seconds


def test_a_client_of_the_proto_alone_loads_pins_and_unloads(wire):
    def ask(verb: str, **fields: Any) -> Any:
        method = wire.call(
            f"VariantService/{verb}Variant",
            f"{verb}VariantRequest",
            f"{verb}VariantResponse",
            False,
        )
        request = wire.messages[f"zen.v1.{verb}VariantRequest"](name="zen4-sort", **fields)
        return method(request).variant

    absent, resident = 1, 3
    assert ask("Unload").state == absent
    loaded = ask("Load")
    assert (loaded.state, loaded.version) == (resident, 1)
    assert loaded.bytes > 0
    assert ask("Pin", pinned=True).pinned
    assert not ask("Pin", pinned=False).pinned
    assert ask("Get").state == resident


def test_a_client_of_the_proto_alone_is_told_what_is_wrong(wire):
    generate = wire.call("GenerateService/Generate", "GenerateRequest", "GenerateResponse", True)
    make = wire.messages["zen.v1.GenerateRequest"]
    for request, code, detail in (
        (make(model="zen4-nobody", prompt="x"), "NOT_FOUND", error_details_pb2.ResourceInfo),
        (make(model="base"), "INVALID_ARGUMENT", error_details_pb2.BadRequest),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            list(generate(request))
        error: Any = refused.value
        assert error.code().name == code
        trailers = dict(error.trailing_metadata())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert status.details[0].Is(detail.DESCRIPTOR)
