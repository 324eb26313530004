"""Python clients of the server, one that blocks and one for asyncio.

    with ZenClient("127.0.0.1:50051") as zen:
        print(zen.generate("zen4-math", "12+34=").text)
        for text in zen.stream("zen4-writer", "It was", max_tokens=64):
            print(text, end="", flush=True)

A request that failed says why in a `ZenError`. One that was refused because the server has no room
or is about to start or stop, or that found no server, is asked again a few times first, as long as
nothing of its answer has come; see `server.client_retries`.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from reprlib import repr as shortened
from typing import Any, Self, TypedDict, Unpack

import grpc
from google.rpc import error_details_pb2, status_pb2

from server.client_access import DEFAULT_ADDRESS, Access
from server.client_retries import Refusal, Retries, Tries
from zen.v1 import generate_pb2 as pb
from zen.v1 import generate_pb2_grpc, variants_pb2, variants_pb2_grpc

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_REQUEST_ID_KEY = "x-request-id"
# A time limit above it is none: 3 years, in seconds. gRPC cannot count much further.
_LONGEST_S = 1e8
_RETRIES, _OPEN = Retries(), Access()


class ZenError(Refusal):
    """A request that the server refused or could not finish.

    Attributes:
        code: the gRPC status code's name, such as `NOT_FOUND`.
        message: what the server says.
        fields: per field of the request that was not acceptable, what is wrong with it.
        retry_after_s: when the server proposes another try, in seconds, or None.
        request_id: by which the server's logs and traces name the request, or "".
    """

    def __init__(self, error: grpc.RpcError):
        call: Any = error
        self.code: str = call.code().name
        self.message: str = call.details() or ""
        self.fields: dict[str, str] = {}
        self.retry_after_s: float | None = None
        self.request_id = ""
        super().__init__(f"{self.code}: {self.message}")
        for key, value in call.trailing_metadata() or ():
            if key == _STATUS_DETAILS_KEY:
                self._read(status_pb2.Status.FromString(value))
            elif key == _REQUEST_ID_KEY:
                self.request_id = str(value)

    def _read(self, status: status_pb2.Status) -> None:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Unpack(bad_request):
                self.fields = {v.field: v.description for v in bad_request.field_violations}
            elif detail.Unpack(retry_info):
                self.retry_after_s = retry_info.retry_delay.ToNanoseconds() / 1e9


@dataclass
class Generation:
    """An answer, or one of several samples of it.

    Attributes:
        text: all of it.
        token_ids: its tokens, a stop token included.
        completion: how it ended: finish reason, usage, seed, timings and what answered.
        logprobs: one for each token, if asked for.
        prompt_logprobs: one for each token of the prompt, if asked for, in the first sample.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion: pb.Completion = field(default_factory=pb.Completion)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)

    def _add(self, message: pb.GenerateResponse) -> str:
        self.text += message.text
        self.token_ids.extend(message.token_ids)
        self.logprobs.extend(message.logprobs)
        self.prompt_logprobs.extend(message.prompt_logprobs)
        if message.HasField("completion"):
            self.completion = message.completion
        return message.text


class RequestOptions(TypedDict, total=False):
    """What a request can hold beside its model and prompt; all of it can be left out.

    `messages` (turns with `role` and `content`) or `token_ids` take the prompt's place. `timeout_s`
    bounds the whole answer, in seconds; one above 3 years bounds nothing. Of two requests that wait
    the one with more `priority` goes first. The rest says how to choose tokens and when to stop;
    what is left out takes the server's default, which zen/v1/generate.proto states.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: Sequence[int]
    timeout_s: float
    priority: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    stop: str | Sequence[str]
    n: int
    logprobs: int
    prompt_logprobs: int


class _Call:
    """A request that runs. Leaving its `with` block, or `cancel`, ends it.

    Attributes:
        samples: what has come so far of each sample.
    """

    def __init__(self, start: Callable[[float | None], Any], tries: Tries):
        self._start, self._tries = start, tries
        self._cancelled = False
        self._call = start(tries.left_s)
        self.samples = [Generation()]

    def _begin(self) -> Any:
        """The call of this attempt: the first has begun already."""
        if self._tries.begun > 1:
            self._call = self._start(self._tries.left_s)
            if self._cancelled:
                self._call.cancel()
        return self._call

    @property
    def generation(self) -> Generation:
        """What has come so far of the first sample, which is all unless more were asked for."""
        return self.samples[0]

    def _add(self, message: pb.GenerateResponse) -> tuple[int, str]:
        while len(self.samples) <= message.index:
            self.samples.append(Generation())
        return message.index, self.samples[message.index]._add(message)

    def cancel(self) -> None:
        """Tells the server to stop; nothing happens when the answer is complete."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Stream(_Call):
    """An answer as it comes: iterating yields text; `generation` holds what has come so far.

    Of several samples, `pieces` tells which one a text is of.
    """

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.pieces())

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Yields texts, each with the number of its sample, counted from 0."""
        for attempt in self._tries:
            with attempt:
                try:
                    first = next(self._begin(), None)
                except grpc.RpcError as error:
                    raise ZenError(error) from None
                break
        try:
            while first is not None:
                yield self._add(first)
                first = next(self._call, None)
        except grpc.RpcError as error:
            raise ZenError(error) from None


class AsyncStream(_Call):
    """The same for `async for`."""

    async def __aiter__(self) -> AsyncIterator[str]:
        async for _, text in self.pieces():
            yield text

    async def pieces(self) -> AsyncIterator[tuple[int, str]]:
        """Yields texts, each with the number of its sample, counted from 0."""
        async for attempt in self._tries:
            with attempt:
                try:
                    messages = aiter(self._begin())
                    first = await anext(messages, None)
                except grpc.RpcError as error:
                    raise ZenError(error) from None
                break
        try:
            while first is not None:
                yield self._add(first)
                first = await anext(messages, None)
        except grpc.RpcError as error:
            raise ZenError(error) from None


class ZenClient:
    """A client that blocks; safe to use from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        retries: Retries = _RETRIES,
        access: Access = _OPEN,
    ):
        """Prepares for `address`, host:port; it connects when the first request is made.

        Raises:
            ValueError: no server can have this address, or `access` cannot be used.
        """
        self._retries, self._metadata = retries, access.metadata
        self._channel = access.channel(address)
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
        tries = self._retries.tries(timeout_s)

        def start(left_s: float | None) -> Any:
            return self._generate(request, timeout=left_s, metadata=self._metadata)

        return Stream(start, tries)

    def generate(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Returns a whole answer, the first sample; arguments and errors as for `stream`."""
        return self.samples(model, prompt, **options)[0]

    def samples(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> list[Generation]:
        """Returns all `n` samples of an answer; arguments and errors as for `stream`."""
        stream = self.stream(model, prompt, **options)
        for _ in stream:
            pass
        return stream.samples

    def list_variants(self) -> variants_pb2.ListVariantsResponse:
        """Returns the server's variants, and how many can be resident and run at once."""
        try:
            request = variants_pb2.ListVariantsRequest()
            return self._variants.ListVariants(request, metadata=self._metadata)
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

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        retries: Retries = _RETRIES,
        access: Access = _OPEN,
    ):
        """Prepares for `address`, host:port; it connects when the first request is made.

        Raises:
            ValueError: no server can have this address, or `access` cannot be used.
        """
        self._retries, self._metadata = retries, access.metadata
        self._channel = access.aio_channel(address)
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel).Generate
        self._variants = variants_pb2_grpc.VariantServiceStub(self._channel)

    def stream(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Starts an answer; arguments and errors as for `ZenClient.stream`."""
        request, timeout_s = make_request(model, prompt, options)
        tries = self._retries.tries(timeout_s)

        def start(left_s: float | None) -> Any:
            return self._generate(request, timeout=left_s, metadata=self._metadata)

        return AsyncStream(start, tries)

    async def generate(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Returns a whole answer, the first sample; the rest as for `ZenClient.stream`."""
        return (await self.samples(model, prompt, **options))[0]

    async def samples(
        self, model: str, prompt: str | None = None, **options: Unpack[RequestOptions]
    ) -> list[Generation]:
        """Returns all `n` samples of an answer; the rest as for `ZenClient.stream`."""
        stream = self.stream(model, prompt, **options)
        async for _ in stream:
            pass
        return stream.samples

    async def list_variants(self) -> variants_pb2.ListVariantsResponse:
        """Returns the server's variants, and how many can be resident and run at once."""
        try:
            request = variants_pb2.ListVariantsRequest()
            return await self._variants.ListVariants(request, metadata=self._metadata)
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
        ValueError: unless exactly one kind of input is given, or for an option that is unknown or
            has a value that the wire cannot carry; it names the option.
    """
    sampling: dict[str, Any] = dict(options)
    timeout_s = _time_limit(sampling.pop("timeout_s", None))
    messages, token_ids = sampling.pop("messages", None), sampling.pop("token_ids", None)
    if [prompt, messages, token_ids].count(None) != 2:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    request = pb.GenerateRequest(model=_text("model", model), sampling=pb.Sampling())
    if "priority" in sampling:
        value = sampling.pop("priority")
        request.MergeFrom(_filled(pb.GenerateRequest, "priority", value, "priority"))
    if prompt is not None:
        request.prompt = _text("prompt", prompt)
    if messages is not None:
        request.messages.CopyFrom(pb.Messages(messages=_turns(messages)))
    if token_ids is not None:
        request.token_ids.CopyFrom(_filled(pb.TokenIds, "ids", token_ids, "token_ids"))
    for name, value in sampling.items():
        if name not in pb.Sampling.DESCRIPTOR.fields_by_name:
            known = ", ".join(RequestOptions.__annotations__)
            raise ValueError(f"{name!r} is no option of a request; the options are {known}")
        if name == "stop" and isinstance(value, str):
            value = [value]
        request.sampling.MergeFrom(_filled(pb.Sampling, name, value, name))
    return request, timeout_s


def _filled[T](kind: Callable[..., T], field: str, value: Any, name: str) -> T:
    """A message with one field set."""
    try:
        return kind(**{field: value})
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is {shortened(value)}, which is of the wrong kind or out of range"
        ) from None


def _turns(messages: Any) -> list[pb.Message]:
    turns = []
    try:
        for i, turn in enumerate(messages):
            role, content = turn["role"], turn["content"]
            turns.append(
                pb.Message(
                    role=_text(f"messages[{i}].role", role),
                    content=_text(f"messages[{i}].content", content),
                )
            )
    except (KeyError, TypeError):
        raise ValueError(
            f"messages[{len(turns)}] is not understood; expected a sequence of turns, each with a "
            "role and a content"
        ) from None
    return turns


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shortened(value)}; expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode at character {error.start}; a shell passes bytes that "
            "are not UTF-8 on like this"
        ) from None
    return value


def _time_limit(timeout_s: Any) -> float | None:
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or isnan(timeout_s) or timeout_s <= 0:
        raise ValueError(f"timeout_s is {shortened(timeout_s)}; expected seconds, more than 0")
    return None if timeout_s > _LONGEST_S else timeout_s
