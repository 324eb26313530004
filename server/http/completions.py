"""POST /v1/completions: from its JSON to requests, and from pieces of answers to its JSON."""

from collections.abc import Sequence
from typing import Any

from server.http.errors import invalid, shown
from server.http.pieces import Entry, Piece
from server.http.schema import (
    Call,
    Fields,
    check_answers,
    model_of,
    renamed,
    sampling_of,
    stream_of,
    timeout_of,
    token_ids,
)
from zen.v1 import generate_pb2 as pb

ID: str = "cmpl-"
WHOLE: str = "text_completion"
CHUNK: str = WHOLE

# OpenAI's.
_MAX_TOKENS = 16
MAX_PROMPTS = 256


def call_of(given: dict[str, Any], timeout: str | None) -> Call:
    """What a completion asks for.

    Args:
        given: the body.
        timeout: the header X-Request-Timeout, if it was sent.

    Raises:
        HttpError: 400, a field is wrong, missing or not supported.
    """
    fields = Fields(given)
    model = model_of(fields)
    prompts, several = _prompts(fields.take("prompt"))
    sampling, _ = sampling_of(fields, ("max_tokens",))
    logprobs, echo = fields.whole("logprobs"), bool(fields.flag("echo"))
    if logprobs is not None:
        sampling.logprobs = logprobs
        if echo and sampling.n > 1:
            raise invalid("n", "is more than 1 with echo and logprobs, which is not supported")
        if echo:
            sampling.prompt_logprobs = logprobs
    check_answers(len(prompts), sampling)
    stream, include_usage = stream_of(fields)
    timeout_s = timeout_of(fields, timeout)
    priority = fields.whole("priority") or 0
    fields.finish()

    def param_of(prompt: int, field: str) -> str:
        path = f"prompt[{prompt}]" if several else "prompt"
        names = {"input": path, "prompt": path, "token_ids": path, "token_ids.ids": path}
        return renamed(field, names | {"sampling.prompt_logprobs": "logprobs"})

    requests: list[pb.GenerateRequest] = []
    for prompt in prompts:
        request = pb.GenerateRequest(model=model, sampling=sampling, priority=priority)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
        requests.append(request)
    return Call(
        requests=requests,
        stream=stream,
        include_usage=include_usage,
        timeout_s=timeout_s,
        max_tokens=_MAX_TOKENS,
        echo=echo,
        param_of=param_of,
    )


def _prompts(given: Any) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether they came as an array of them."""
    if given is None:
        raise invalid("prompt", "is missing; give a text, or token ids")
    if isinstance(given, str):
        return [given], False
    if not isinstance(given, list):
        raise invalid("prompt", f"is {shown(given)}; expected a string or an array")
    if given and type(given[0]) is int:
        return [token_ids("prompt", given)], False
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise invalid("prompt", f"has {len(given)} entries; expected 1 to {MAX_PROMPTS} prompts")
    found: list[str | list[int]] = []
    for i, prompt in enumerate(given):
        path = f"prompt[{i}]"
        if isinstance(prompt, str):
            found.append(prompt)
        elif isinstance(prompt, list):
            found.append(token_ids(path, prompt))
        else:
            raise invalid(path, f"is {shown(prompt)}; expected a string or an array of token ids")
    return found, True


def chunks(piece: Piece, logprobs: bool) -> list[dict[str, Any]]:
    """The choice to send for a piece, if there is anything in it."""
    if not (piece.text or piece.entries or piece.finish):
        return []
    return [choice(piece, logprobs)]


def choice(piece: Piece, logprobs: bool) -> dict[str, Any]:
    """The choice of a piece, or of an answer that is there as a whole."""
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": _logprobs(piece.entries) if logprobs else None,
        "finish_reason": piece.finish,
    }


def _logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "tokens": [e.token.text for e in entries],
        "token_logprobs": [e.token.logprob for e in entries],
        "top_logprobs": [_top(e) for e in entries],
        "text_offset": [e.offset for e in entries],
    }


def _top(entry: Entry) -> dict[str, float | None] | None:
    """The likeliest tokens, and always the one that came."""
    if entry.token.logprob is None:
        return None
    top = {other.text: other.logprob for other in entry.top}
    return top | {entry.token.text: entry.token.logprob}
