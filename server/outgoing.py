"""What goes over the wire: the events of a call's samples, put together into messages."""

import asyncio
from collections.abc import Callable, Sequence

from server.auth import caller
from server.requests import Failure, Finish, Request, TokenEvent
from zen.v1 import generate_pb2 as pb
from zen_jax.checkpoint.manifest import BASE, Variant
from zen_jax.sampling import TokenLogprobs

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


class Outgoing:
    """The events of one call's samples, which are requests of their own.

    It belongs to an event loop; `put` alone may be called from other threads.

    Attributes:
        left: samples that have not ended.
    """

    def __init__(
        self, requests: Sequence[Request], finished: Callable[[Finish], None] = lambda finish: None
    ) -> None:
        """Takes the requests; sample i is at place i.

        Args:
            finished: told how each sample ended that ended well.
        """
        self._requests, self._finished = requests, finished
        self._loop = asyncio.get_running_loop()
        # Holds no more than one event for each token.
        self._events: asyncio.Queue[tuple[int, TokenEvent | Failure]] = asyncio.Queue()
        self.left = set(range(len(requests)))

    def put(self, index: int, event: TokenEvent | Failure) -> None:
        """Takes an event of a sample."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def next(self) -> tuple[list[pb.GenerateResponse], Failure | None]:
        """Waits for an event, and takes those that came with it.

        Returns:
            A message for each sample that has something new, and the failure after them, if any.
        """
        messages: dict[int, pb.GenerateResponse] = {}
        index, event = await self._events.get()
        while True:
            if isinstance(event, Failure):
                self.left.discard(index)
                return list(messages.values()), event
            message = messages.setdefault(index, pb.GenerateResponse(index=index))
            _add(message, event)
            if event.finish is not None:
                message.completion.CopyFrom(completion(self._requests[index], event.finish))
                self._finished(event.finish)
                self.left.discard(index)
            if self._events.empty():
                return list(messages.values()), None
            index, event = self._events.get_nowait()


def _add(message: pb.GenerateResponse, event: TokenEvent) -> None:
    message.text += event.text
    message.token_ids.extend(event.token_ids)
    message.logprobs.extend(map(_logprobs, event.logprobs))
    message.prompt_logprobs.extend(map(_logprobs, event.prompt_logprobs))


def _logprobs(of: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=of.token_id,
        logprob=of.logprob,
        top_ids=of.top_ids,
        top_logprobs=of.top_logprobs,
    )


def completion(request: Request, finish: Finish) -> pb.Completion:
    """The last message's account of a request that ended well."""
    timings = finish.timings
    return pb.Completion(
        finish_reason=_FINISH_REASONS[finish.reason],
        matched_stop_token_id=finish.matched_stop,
        matched_stop=finish.matched_text,
        usage=pb.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
        ),
        seed=request.seed,
        timings=pb.Timings(
            queued_seconds=timings.queued_s,
            load_seconds=timings.load_s,
            prefill_seconds=timings.prefill_s,
            first_token_seconds=timings.first_token_s,
        ),
        model=model_info(request.variant),
    )


def model_info(variant: Variant | None) -> pb.ModelInfo:
    """What answered: a variant, or the base for None; of who else is in it, those that the caller
    may know of."""
    if variant is None:
        return pb.ModelInfo(name=BASE)
    return pb.ModelInfo(
        name=variant.name,
        version=variant.version,
        digest=variant.digest,
        merged_of=filter(caller().may_use, variant.merged),
    )
