"""The fields of a request that both kinds of completion have, checked and made into protobuf.

What a field may be is checked once, behind the protobuf message, in `server.incoming`. Here it is
seen that JSON fits into that message, that every field is known, and that nothing is asked for that
would be ignored.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from server.http.errors import invalid, shown
from zen.v1 import generate_pb2 as pb
from zen_jax.sampling import MAX_BIASES, MAX_STOP_IDS, MAX_STOPS

# Longer than any context that a server like this one has; so many ids are looked at one by one.
MAX_IDS = 1_000_000
# Answers of one request, times what each of their tokens has.
MAX_WANTED = 1024
_INT32 = 2**31 - 1
_UINT32 = 2**32 - 1
_UINT64 = 2**64 - 1

# Ask for nothing of an answer; any value is taken.
HARMLESS = frozenset(
    ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
# OpenAI's and vLLM's fields that are not supported, and the values that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class Fields:
    """An object of a request's JSON, whose fields are taken one by one; null is the same as none.

    Every method raises HttpError, which names the field, for a value that is not what it returns.
    """

    def __init__(self, given: Mapping[str, Any], path: str = "") -> None:
        """Takes the object; `path` is what its fields' names begin with in errors."""
        self._given = {name: value for name, value in given.items() if value is not None}
        self._path = path

    def path(self, name: str) -> str:
        """What errors call a field."""
        return f"{self._path}{name}"

    def take(self, name: str) -> Any:
        """Whatever is there; None for nothing."""
        return self._given.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else _typed(self.path(name), value, str, "a string")

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        return None if value is None else _typed(self.path(name), value, bool, "true or false")

    def number(self, name: str) -> float | None:
        value = self.take(name)
        return None if value is None else _number(self.path(name), value)

    def whole(self, name: str, low: int = -_INT32 - 1, high: int = _INT32) -> int | None:
        value = self.take(name)
        return None if value is None else whole(self.path(name), value, low, high)

    def array(self, name: str, most: int) -> list[Any] | None:
        value = self.take(name)
        return None if value is None else array(self.path(name), value, most)

    def object(self, name: str) -> Mapping[str, Any] | None:
        value = self.take(name)
        return None if value is None else _typed(self.path(name), value, dict, "an object")

    def finish(self) -> None:
        """Refuses what nobody took, unless it asks for nothing."""
        for name, value in self._given.items():
            path = self.path(name)[:128]
            if name in HARMLESS and not self._path:
                continue
            if name not in _NOTHING or self._path:
                raise invalid(path, "is not known; leave it out", "unknown_parameter")
            if not any(type(value) is type(v) and value == v for v in _NOTHING[name]):
                text = "is not supported by this server; leave it out"
                raise invalid(path, text, "unsupported_parameter")


@dataclass(frozen=True)
class Call:
    """What an HTTP request asks for.

    Attributes:
        requests: one for each prompt, unchecked but of the right types.
        stream: whether pieces are sent as they come.
        include_usage: whether the counts are sent at the stream's end.
        timeout_s: how long the answer may take, in seconds, or None.
        max_tokens: what is taken where the requests give none, if the context has the room.
        echo: whether the prompt stands before its answer.
        param_of: from prompt and protobuf field to what the client calls it.
    """

    requests: Sequence[pb.GenerateRequest]
    stream: bool
    include_usage: bool
    timeout_s: float | None
    max_tokens: int
    echo: bool
    param_of: Callable[[int, str], str]

    @property
    def model(self) -> str:
        """What is asked, as the client calls it."""
        return self.requests[0].model

    @property
    def samples(self) -> int:
        """Answers to each prompt."""
        return self.requests[0].sampling.n or 1


def model_of(fields: Fields) -> str:
    """The name of what is asked; whether it is one is the router's to say."""
    name = fields.text("model")
    if not name:
        raise invalid("model", "is missing; GET /v1/models lists what there is")
    return name


def stream_of(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether to count at the end."""
    stream = bool(fields.flag("stream"))
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise invalid("stream_options", "is given without stream; set stream to true")
    inner = Fields(options, "stream_options.")
    include_usage = bool(inner.flag("include_usage"))
    inner.flag("include_obfuscation")  # padding against eavesdroppers, which none is sent
    inner.finish()
    return stream, include_usage


def timeout_of(fields: Fields, header: str | None) -> float | None:
    """How long the answer may take, by body and header, whichever is less; in seconds."""
    given = [fields.number("timeout")]
    if header is not None:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header.strip()):
            raise invalid("X-Request-Timeout", "is no number of seconds, such as 2.5")
        given.append(float(header))
    times = [t for t in given if t is not None]
    for seconds in times:
        if seconds <= 0:
            raise invalid("timeout", f"is {shown(seconds)}; expected seconds, more than 0")
    return min(times, default=None)


def sampling_of(fields: Fields, max_names: Sequence[str]) -> tuple[pb.Sampling, str]:
    """How tokens are chosen, and which of `max_names` the client says for the most of them."""
    sampling = pb.Sampling()
    for name in ("temperature", "top_p", "min_p"):
        _set(sampling, name, fields.number(name))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        _set(sampling, name, fields.number(name))
    for name in ("top_k", "min_tokens", "n"):
        _set(sampling, name, fields.whole(name))
    _set(sampling, "seed", fields.whole("seed", 0, _UINT64))
    _set(sampling, "ignore_eos", fields.flag("ignore_eos"))
    most = {name: fields.whole(name) for name in max_names}
    given = {name: value for name, value in most.items() if value is not None}
    if len(set(given.values())) > 1:
        first, other = given
        raise invalid(first, f"is {given[first]}, but {other} is {given[other]}; give one of them")
    _set(sampling, "max_tokens", next(iter(given.values()), None))
    ids = fields.take("stop_token_ids")
    if ids is not None:
        sampling.stop_token_ids.extend(token_ids("stop_token_ids", ids, MAX_STOP_IDS))
    sampling.stop.extend(_stops(fields.take("stop")))
    for token, bias in _biases(fields.object("logit_bias")):
        sampling.logit_bias[token] = bias
    return sampling, next(iter(given), max_names[0])


def token_ids(path: str, given: Any, most: int = MAX_IDS) -> list[int]:
    """Token ids of an array."""
    found = array(path, given, most)
    for i, value in enumerate(found):
        if type(value) is not int or not 0 <= value <= _UINT32:
            whole(f"{path}[{i}]", value, 0, _UINT32)
    return found


def array(path: str, value: Any, most: int) -> list[Any]:
    """A list, not too long to be looked at."""
    found = _typed(path, value, list, "an array")
    _check_size(path, len(found), most)
    return found


def whole(path: str, value: Any, low: int, high: int) -> int:
    """A whole number within bounds."""
    if type(value) is not int or not low <= value <= high:
        raise invalid(path, f"is {shown(value)}; expected a whole number, {low} to {high}")
    return value


def check_answers(prompts: int, sampling: pb.Sampling) -> None:
    """Refuses more than can be put together in memory."""
    wanted = prompts * max(1, sampling.n) * (2 + max(0, sampling.logprobs))
    if wanted > MAX_WANTED:
        text = (
            f"asks for {prompts} prompts x n x (2 + logprobs) = {wanted}; expected "
            f"{MAX_WANTED} at most: send fewer in one request"
        )
        raise invalid("n" if prompts == 1 else "prompt", text)


def renamed(field: str, names: Mapping[str, str]) -> str:
    """A protobuf field's path with its beginning replaced as `names` say, the longest first."""
    for old in sorted(names, key=len, reverse=True):
        if field == old or field.startswith((f"{old}[", f"{old}.")):
            return names[old] + field.removeprefix(old)
    return field.removeprefix("sampling.")


def _set(sampling: pb.Sampling, name: str, value: float | bool | None) -> None:
    if value is not None:
        setattr(sampling, name, value)


def _stops(given: Any) -> list[str]:
    if given is None or isinstance(given, str):
        return [] if given is None else [given]
    if not isinstance(given, list):
        raise invalid("stop", f"is {shown(given)}; expected a string or an array of strings")
    _check_size("stop", len(given), MAX_STOPS)
    return [_typed(f"stop[{i}]", text, str, "a string") for i, text in enumerate(given)]


def _biases(given: Mapping[str, Any] | None) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    _check_size("logit_bias", len(given or {}), MAX_BIASES)
    for key, bias in (given or {}).items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key) or int(key) > _UINT32:
            raise invalid("logit_bias", 'has a key that is no token id; expected such as "50"')
        found.append((int(key), _number(f"logit_bias[{key}]", bias)))
    return found


def _check_size(path: str, size: int, most: int) -> None:
    if size > most:
        raise invalid(path, f"has {size} entries; expected {most} at most")


def _number(path: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e300 or not isfinite(value):
        raise invalid(path, f"is {shown(value)}; expected a number")
    return float(value)


def _typed[T](path: str, value: Any, kind: type[T], expected: str) -> T:
    if not isinstance(value, kind):
        raise invalid(path, f"is {shown(value)}; expected {expected}")
    return value
