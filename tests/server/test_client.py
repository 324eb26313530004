"""The Python clients against a server that answers by a script."""

from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from math import inf, nan

import grpc
import pytest
from grpc_status import rpc_status

from server import status
from server.client import AsyncZenClient, RequestOptions, ZenClient, ZenError, make_request
from server.client_retries import Retries
from server.status import Violation
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc, variants_pb2, variants_pb2_grpc


class Scripted(generate_pb2_grpc.GenerateServiceServicer):
    """Answers "a", "b", "c"; the model's name chooses how it goes wrong."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []

    def Generate(self, request, context):
        self.requests.append(request)
        yield pb.GenerateResponse(text="a", token_ids=[1])
        if request.model == "refused":
            error = status.invalid_argument([Violation("prompt", "is odd"), Violation("x", "y")])
            abort(context, error)
        if request.model == "busy":
            abort(context, status.resource_exhausted("later", 2.5))
        if request.model == "plain":
            context.abort(grpc.StatusCode.ABORTED, "no details")
        if request.model == "slow":
            while context.is_active():
                yield pb.GenerateResponse(text="a")
        if request.model == "several":
            of_prompt = [pb.TokenLogprobs(token_id=9)]
            of_token = [pb.TokenLogprobs(token_id=4, logprob=-0.5)]
            done = pb.Completion(seed=5)
            yield pb.GenerateResponse(index=2, text="z", completion=done)
            yield pb.GenerateResponse(
                index=1, text="y", token_ids=[4], logprobs=of_token, completion=done
            )
            yield pb.GenerateResponse(prompt_logprobs=of_prompt, completion=done)
            return
        yield pb.GenerateResponse(text="b", token_ids=[2, 3])
        completion = pb.Completion(finish_reason=pb.FINISH_REASON_STOP, seed=5)
        yield pb.GenerateResponse(text="c", completion=completion)


def abort(context: grpc.ServicerContext, error: status.StatusError) -> None:
    context.abort_with_status(rpc_status.to_status(error.status))


class Listing(variants_pb2_grpc.VariantServiceServicer):
    def ListVariants(self, request, context):
        return variants_pb2.ListVariantsResponse(
            variants=[variants_pb2.Variant(name="coder")], slots=3
        )


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def address(scripted: Scripted) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(scripted, server)
    variants_pb2_grpc.add_VariantServiceServicer_to_server(Listing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def client(address: str) -> Iterator[ZenClient]:
    with ZenClient(address, Retries(attempts=1)) as client:
        yield client


@pytest.fixture
async def async_client(address: str) -> AsyncIterator[AsyncZenClient]:
    async with AsyncZenClient(address) as client:
        yield client


def test_a_whole_answer(client, scripted):
    answer = client.generate("coder", "Hi", max_tokens=3, temperature=0, stop_token_ids=[4])
    assert answer.text == "abc"
    assert answer.token_ids == [1, 2, 3]
    assert answer.completion.seed == 5
    (request,) = scripted.requests
    assert (request.model, request.prompt) == ("coder", "Hi")
    assert request.sampling.max_tokens == 3
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.sampling.stop_token_ids) == [4]


def test_an_answer_as_it_comes(client):
    stream = client.stream("coder", token_ids=[1])
    assert list(stream) == ["a", "b", "c"]
    assert stream.generation.text == "abc"
    assert stream.generation.completion.finish_reason == pb.FINISH_REASON_STOP


def test_several_samples_are_told_apart(client, scripted):
    stream = client.stream("several", "Hi", n=3, logprobs=0, prompt_logprobs=0)
    assert list(stream.pieces()) == [(0, "a"), (2, "z"), (1, "y"), (0, "")]
    assert [sample.text for sample in stream.samples] == ["a", "y", "z"]
    assert [sample.completion.seed for sample in stream.samples] == [5, 5, 5]
    assert [entry.token_id for entry in stream.samples[1].logprobs] == [4]
    assert [entry.token_id for entry in stream.generation.prompt_logprobs] == [9]
    assert [sample.text for sample in client.samples("several", "Hi", n=3)] == ["a", "y", "z"]
    assert client.generate("several", "Hi").text == "a"
    assert scripted.requests[0].sampling.n == 3


def test_all_options_are_sent_as_they_are_called(client, scripted):
    options = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {3: 1.5, 4: -2.0},
        "min_tokens": 2,
        "stop": ("a", "bc"),
        "n": 2,
        "logprobs": 0,
        "prompt_logprobs": 3,
    }
    client.generate("coder", "Hi", **options)
    sampling = scripted.requests[0].sampling
    assert sampling == pb.Sampling(**options)
    assert scripted.requests[0].priority == 0
    client.generate("coder", "Hi", stop="END", priority=-3)
    assert scripted.requests[1].priority == -3
    assert list(scripted.requests[1].sampling.stop) == ["END"]


def test_every_field_of_the_wire_is_an_option():
    known = set(RequestOptions.__annotations__)
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) == known - {
        "messages",
        "token_ids",
        "timeout_s",
        "priority",
    }


def test_leaving_a_stream_ends_it(client, scripted):
    with client.stream("slow", "Hi") as stream:
        assert next(iter(stream)) == "a"
    with pytest.raises(ZenError, match="CANCELLED"):
        list(stream)


def test_what_the_server_refuses_is_told(client):
    with pytest.raises(ZenError) as refused:
        client.generate("refused", "Hi")
    assert refused.value.code == "INVALID_ARGUMENT"
    assert refused.value.fields == {"prompt": "is odd", "x": "y"}
    with pytest.raises(ZenError) as busy:
        client.generate("busy", "Hi")
    assert (busy.value.code, busy.value.retry_after_s) == ("RESOURCE_EXHAUSTED", 2.5)
    with pytest.raises(ZenError, match="ABORTED: no details") as plain:
        client.generate("plain", "Hi")
    assert (plain.value.fields, plain.value.retry_after_s) == ({}, None)


def test_a_time_limit(client):
    with pytest.raises(ZenError, match="DEADLINE_EXCEEDED"):
        client.generate("slow", "Hi", timeout_s=0.2)


def test_nobody_there():
    with ZenClient("127.0.0.1:1") as client, pytest.raises(ZenError, match="UNAVAILABLE"):
        client.generate("coder", "Hi")
    with ZenClient("127.0.0.1:1") as client, pytest.raises(ZenError, match="UNAVAILABLE"):
        client.list_variants()


def test_the_list(client):
    assert [variant.name for variant in client.list_variants().variants] == ["coder"]


@pytest.mark.parametrize(
    "prompt, options",
    [
        (None, {}),
        ("Hi", {"token_ids": [1]}),
        ("Hi", {"messages": [], "token_ids": []}),
        ("Hi", {"max_token": 3}),
        ("Hi", {"seed": -1}),
        ("Hi", {"logit_bias": {-1: 1.0}}),
        ("Hi", {"logit_bias": {1: "x"}}),
        ("Hi", {"logit_bias": [1]}),
        ("Hi", {"stop": 5}),
        ("Hi", {"max_tokens": 99_999_999_999}),
        ("Hi", {"max_tokens": "x"}),
        ("Hi", {"temperature": None, "stop_token_ids": 5}),
        (None, {"token_ids": ["a"]}),
        (None, {"token_ids": 5}),
        (None, {"token_ids": [-1]}),
        (None, {"messages": 5}),
        (None, {"messages": "Hi"}),
        (None, {"messages": [{}]}),
        (None, {"messages": [None]}),
        (None, {"messages": [{"role": "user", "content": 5}]}),
        (5, {}),
        ("a\udcff", {}),
        ("Hi", {"timeout_s": nan}),
        ("Hi", {"timeout_s": -1}),
        ("Hi", {"timeout_s": "3"}),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_here(prompt, options):
    with pytest.raises(ValueError) as refused:
        make_request("coder", prompt, options)
    names = list(options) or ["prompt"]
    assert type(refused.value) is ValueError
    assert names[-1] in str(refused.value)


@pytest.mark.parametrize("timeout_s", [inf, 1e300, 1e9])
def test_a_time_limit_beyond_all_bounds_is_none(client, timeout_s):
    assert client.generate("coder", "Hi", timeout_s=timeout_s).text == "abc"


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:99999", "h:0", "::1", ":50051"])
def test_an_address_that_no_server_can_have_is_told(address):
    with pytest.raises(ValueError, match="expected host:port"):
        ZenClient(address)


@pytest.mark.parametrize("address", ["[::1]:1", "dns:///localhost:1", "localhost:1"])
def test_any_other_address_is_tried(address):
    with ZenClient(address) as client, pytest.raises(ZenError, match="UNAVAILABLE"):
        client.list_variants()


@pytest.mark.parametrize("options", [{"token_ids": []}, {"messages": []}])
def test_an_empty_input_is_sent_as_what_it_is(options):
    request, _ = make_request("coder", None, options)
    assert request.WhichOneof("input") == next(iter(options))


def test_messages_are_sent_in_order():
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    request, timeout_s = make_request("coder", None, {"messages": turns, "timeout_s": 3})
    assert [(m.role, m.content) for m in request.messages.messages] == [
        ("user", "one"),
        ("assistant", "two"),
    ]
    assert timeout_s == 3


async def test_the_same_for_asyncio(async_client):
    assert (await async_client.generate("coder", "Hi")).text == "abc"
    stream = async_client.stream("coder", "Hi")
    assert [text async for text in stream] == ["a", "b", "c"]
    assert stream.generation.token_ids == [1, 2, 3]
    assert (await async_client.list_variants()).slots == 3
    samples = await async_client.samples("several", "Hi", n=3)
    assert [sample.text for sample in samples] == ["a", "y", "z"]
    with pytest.raises(ZenError) as refused:
        await async_client.generate("refused", "Hi")
    assert refused.value.fields == {"prompt": "is odd", "x": "y"}
    with pytest.raises(ZenError, match="DEADLINE_EXCEEDED"):
        await async_client.generate("slow", "Hi", timeout_s=0.2)
