"""Python clients of the server, one that blocks and one for asyncio.

    with ZenClient("127.0.0.1:50051") as zen:
        print(zen.generate("zen4-math", "12+34=").text)
        for text in zen.stream("zen4-writer", "It was", max_tokens=64):
            print(text, end="", flush=True)

They retry nothing: a request that failed says why in a `ZenError`.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, Unpack

import grpc
from google.rpc import error_details_pb2, status_pb2

from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc, variants_pb2, variants_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"

_STATUS_DETAILS_KEY = "grpc-status-details-bin"


class ZenError(Exception):
    """A request that the server refused or could not finish.

    Attributes:
        code: the gRPC status code's name, such as `NOT_FOUND`.
        message: what the server says.
        fields: per field of the request that was not acceptable, what is wrong with it.
        retry_after_s: when the server proposes another try, in seconds, or None.
    """

    def __init__(self, error: grpc.RpcError):
        call: Any = error
        self.code: str = call.code().name
        self.message: str = call.details() or ""
        self.fields: dict[str, str] = {}
        self.retry_after_s: float | None = None
        super().__init__(f"{self.code}: {self.message}")
        for key, value in call.trailing_metadata() or ():
            if key == _STATUS_DETAILS_KEY:
                self._read(status_pb2.Status.FromString(value))

    def _read(self, status: status_pb2.Status) -> None:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Unpack(bad_request):
                self.fields = {v.field: v.description for v in bad_request.field_violations}
            elif detail.Unpack(retry_info):
                self.retry_after_s = retry_info.retry_delay.ToNanoseconds() / 1e9


@dataclass
class Generation:
    """An answer.

    Attributes:
        text: all of it.
        token_ids: its tokens, a stop token included.
        completion: how it ended: finish reason, usage, seed, timings and what answered.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion: pb.Completion = field(default_factory=pb.Completion)

    def _add(self, message: pb.GenerateResponse) -> str:
        self.text += message.text
        self.token_ids.extend(message.token_ids)
        if message.HasField("completion"):
            self.completion = message.completion
        return message.text


class RequestOptions(TypedDict, total=False):
    """What a request can hold beside its model and prompt; all of it can be left out.

    `messages` (turns with `role` and `content`) or `token_ids` take the prompt's place. `timeout_s`
    bounds the whole answer, in seconds. The rest says how to choose tokens and when to stop; what
    is left out takes the server's default, which zen/v1/generate.proto states.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: Sequence[int]
    timeout_s: float
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool


class _Call:
    """A request that runs. Leaving its `with` block, or `cancel`, ends it."""

    def __init__(self, call: Any):
        self._call = call
        self.generation = Generation()

    def cancel(self) -> None:
        """Tells the server to stop; nothing happens when the answer is complete."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Stream(_Call):
    """An answer as it comes: iterating yields text; `generation` holds what has come so far."""

    def __iter__(self) -> Iterator[str]:
        try:
            for message in self._call:
                yield self.generation._add(message)
        except grpc.RpcError as error:
            raise ZenError(error) from None


class AsyncStream(_Call):
    """The same for `async for`."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for message in self._call:
                yield self.generation._add(message)
        except grpc.RpcError as error:
            raise ZenError(error) from None


class ZenClient:
    """A client that blocks; safe to use from several threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS):
        """Prepares for `address`, host:port; it connects when the first request is made."""
        self._channel = grpc.insecure_channel(address)
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel).Generate
        self._variants = variants_pb2_grpc.VariantServiceStub(self._channel)

    def stream(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Starts an answer of `model`, a variant's name or `base`.

        Raises:
            ZenError: while iterating, when the server refuses or fails.
            ValueError: more or less than one kind of input, or values that the wire cannot carry.
        """
        request, timeout_s = make_request(model, prompt, options)
        return Stream(self._generate(request, timeout=timeout_s))

    def generate(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Returns a whole answer; arguments and errors as for `stream`."""
        stream = self.stream(model, prompt, **options)
        for _ in stream:
            pass
        return stream.generation

    def list_variants(self) -> variants_pb2.ListVariantsResponse:
        """Returns the server's variants, and how many can be resident and run at once."""
        try:
            return self._variants.ListVariants(variants_pb2.ListVariantsRequest())
        except grpc.RpcError as error:
            raise ZenError(error) from None

    def close(self) -> None:
        """Drops the connection; requests that run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncZenClient:
    """The same client for asyncio; it belongs to the event loop that it is made in."""

    def __init__(self, address: str = DEFAULT_ADDRESS):
        """Prepares for `address`, host:port; it connects when the first request is made."""
        self._channel = grpc.aio.insecure_channel(address)
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel).Generate
        self._variants = variants_pb2_grpc.VariantServiceStub(self._channel)

    def stream(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Starts an answer; arguments and errors as for `ZenClient.stream`."""
        request, timeout_s = make_request(model, prompt, options)
        return AsyncStream(self._generate(request, timeout=timeout_s))

    async def generate(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Returns a whole answer; arguments and errors as for `ZenClient.stream`."""
        stream = self.stream(model, prompt, **options)
        async for _ in stream:
            pass
        return stream.generation

    async def list_variants(self) -> variants_pb2.ListVariantsResponse:
        """Returns the server's variants, and how many can be resident and run at once."""
        try:
            return await self._variants.ListVariants(variants_pb2.ListVariantsRequest())
        except grpc.RpcError as error:
            raise ZenError(error) from None

    async def close(self) -> None:
        """Drops the connection; requests that run are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def make_request(
    model: str, prompt: str | None, options: RequestOptions
) -> tuple[pb.GenerateRequest, float | None]:
    """Builds the message, and gives its time limit in seconds.

    Raises:
        ValueError: unless exactly one kind of input is given, or for an unknown option.
    """
    sampling: dict[str, Any] = dict(options)
    timeout_s = sampling.pop("timeout_s", None)
    messages, token_ids = sampling.pop("messages", None), sampling.pop("token_ids", None)
    if [prompt, messages, token_ids].count(None) != 2:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    request = pb.GenerateRequest(model=model, prompt=prompt, sampling=pb.Sampling(**sampling))
    if messages is not None:
        turns = [pb.Message(role=m["role"], content=m["content"]) for m in messages]
        request.messages.CopyFrom(pb.Messages(messages=turns))
    if token_ids is not None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
    return request, timeout_s
