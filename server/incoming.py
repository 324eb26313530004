"""What comes over the wire: checked, and made into the requests that the worker takes.

Nothing here looks anything up; what a name means, `server.service` asks the router.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from server import status
from server.status import StatusError, Violation
from zen.v1 import generate_pb2 as pb
from zen_jax.checkpoint.manifest import BASE, Variant
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128
MOST_PRIORITY = 10

# Longer ones would not fit into the headers that a status travels in.
_MAX_DESCRIPTION = 1000

# Fields of Sampling that are one value, and those that hold several.
_SCALARS = tuple(f.name for f in pb.Sampling.DESCRIPTOR.fields if f.has_presence)
_SEVERAL = ("stop_token_ids", "stop")


@dataclass(frozen=True)
class Limits:
    """What the engine can take.

    Attributes:
        max_length: positions of a row; prompt and answer share them.
        vocab_size: token ids of every model lie below it.
        own_vocab: how many tokens a variant has, the base for None; else all have vocab_size.
        samples: of one request; more could never wait together.
    """

    max_length: int
    vocab_size: int
    own_vocab: Callable[[Variant | None], int] | None = None
    samples: float = inf

    def of(self, variant: Variant | None) -> "Limits":
        """The limits of one variant, or of the base."""
        if self.own_vocab is None:
            return self
        return replace(self, vocab_size=self.own_vocab(variant), own_vocab=None)


def check(message: pb.GenerateRequest, limits: Limits) -> Iterator[Violation]:
    """Yields what can be said against a request without looking at the store.

    A status travels in headers, which are small: no description grows with the request.
    """
    if not message.model:
        yield Violation("model", f"is empty; give a variant's name or {BASE!r}")
    yield from _check_input(message, limits)
    if abs(message.priority) > MOST_PRIORITY:
        yield Violation(
            "priority",
            f"is {message.priority}; expected {-MOST_PRIORITY} to {MOST_PRIORITY}",
        )
    if message.sampling.n > limits.samples:
        yield Violation(
            "sampling.n", f"is {message.sampling.n}; this server takes {limits.samples} at a time"
        )
    for error in sampling_params(message.sampling).problems(limits.vocab_size):
        yield Violation(f"sampling.{error.field}", str(error).removeprefix(f"{error.field} "))


def sampling_params(sampling: pb.Sampling) -> SamplingParams:
    """The settings as they were given, unchecked; defaults for what was left out."""
    given: dict[str, Any] = {n: getattr(sampling, n) for n in _SCALARS if sampling.HasField(n)}
    given |= {name: tuple(getattr(sampling, name)) for name in _SEVERAL}
    return SamplingParams(**given, logit_bias=dict(sampling.logit_bias))


def _check_input(message: pb.GenerateRequest, limits: Limits) -> Iterator[Violation]:
    match message.WhichOneof("input"):
        case None:
            yield Violation("input", "is missing; give one of prompt, token_ids and messages")
        case "prompt":
            if not message.prompt:
                yield Violation("prompt", "is empty; give at least one character")
        case "messages":
            if not message.messages.messages:
                yield Violation("messages.messages", "is empty; give at least one message")
            for i, turn in enumerate(message.messages.messages):
                if not turn.role:
                    yield Violation(f"messages.messages[{i}].role", "is empty; give a role")
                    return
        case "token_ids":
            if not message.token_ids.ids:
                yield Violation("token_ids.ids", "is empty; give at least one token")
            if len(message.token_ids.ids) >= limits.max_length:
                yield Violation("token_ids", _too_long(len(message.token_ids.ids), limits))
                return
            for i, token_id in enumerate(message.token_ids.ids):
                if token_id >= limits.vocab_size:
                    yield _outside(f"token_ids.ids[{i}]", token_id, limits)
                    return


def check_size(message: pb.GenerateRequest, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuses text that is too long whatever its tokens are: to tokenize it would cost time.

    Raises:
        StatusError: INVALID_ARGUMENT, naming the field.
    """
    field = message.WhichOneof("input") or "input"
    texts = [message.prompt, *(turn.content for turn in message.messages.messages)]
    size = sum(len(text.encode()) for text in texts)
    most = (limits.max_length - 1) * tokenizer.longest_bytes
    if size > most:
        raise invalid(
            field,
            f"is {size} bytes long; this server's context of {limits.max_length} tokens has room "
            f"for no more than {most}",
        )


def token_ids_of(message: pb.GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a message's input.

    Raises:
        StatusError: INVALID_ARGUMENT, when there are none or the template refuses the messages.
    """
    field = message.WhichOneof("input")
    if field == "token_ids":
        return tuple(message.token_ids.ids)
    if field == "prompt":
        token_ids = tokenizer.encode(message.prompt)
    else:
        turns = [{"role": m.role, "content": m.content} for m in message.messages.messages]
        try:
            token_ids = tokenizer.chat(turns)
        except ValueError as error:  # it repeats the text of no message
            text = f"cannot be laid out: {error}"
            raise invalid("messages", text[:_MAX_DESCRIPTION]) from None
    if not token_ids:
        raise invalid(field or "input", "has no token; give at least one")
    return tuple(token_ids)


def fitted(
    message: pb.GenerateRequest, prompt_tokens: int, limits: Limits, max_tokens: int
) -> SamplingParams:
    """The settings of a message that was checked, with max_tokens that the context has room for.

    Args:
        message: what is asked.
        prompt_tokens: how many tokens its input has.
        limits: of the variant.
        max_tokens: to take where the message gives none, unless it wants more at least.

    Raises:
        StatusError: INVALID_ARGUMENT, when it has room for none or for fewer than asked for.
    """
    room = limits.max_length - prompt_tokens
    if room < 1:
        raise invalid(
            message.WhichOneof("input") or "input",
            _too_long(prompt_tokens, limits),
        )
    wanted = message.sampling
    behind = (
        f"a context of {limits.max_length} leaves {room} behind a prompt of {prompt_tokens} tokens"
    )
    if wanted.HasField("max_tokens") and wanted.max_tokens > room:
        raise invalid("sampling.max_tokens", f"is {wanted.max_tokens}; {behind}")
    params = sampling_params(wanted)
    if wanted.HasField("max_tokens"):
        return params
    if params.min_tokens > room:
        raise invalid("sampling.min_tokens", f"is {params.min_tokens}; {behind}")
    return replace(params, max_tokens=max(params.min_tokens, min(max_tokens, room)))


def invalid(field: str, text: str) -> StatusError:
    """INVALID_ARGUMENT with one field."""
    return status.invalid_argument([Violation(field, text)])


def _too_long(tokens: int, limits: Limits) -> str:
    return (
        f"is {tokens} tokens long; this server's context of {limits.max_length} leaves room for "
        f"{limits.max_length - 1}"
    )


def _outside(field: str, token_id: int, limits: Limits) -> Violation:
    return Violation(
        field, f"is {token_id}; the vocabulary's ids run from 0 to {limits.vocab_size - 1}"
    )
