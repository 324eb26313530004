"""POST /v1/chat/completions: from its JSON to requests, and from pieces of answers to its JSON."""

from collections.abc import Sequence
from typing import Any

from server.http.errors import invalid, shown
from server.http.pieces import Entry, Piece, Spelled
from server.http.schema import (
    Call,
    Fields,
    array,
    model_of,
    renamed,
    sampling_of,
    stream_of,
    timeout_of,
)
from zen.v1 import generate_pb2 as pb
from zen_jax.tokenizer import MAX_MESSAGES

ID: str = "chatcmpl-"
WHOLE: str = "chat.completion"
CHUNK: str = "chat.completion.chunk"

# As many tokens as the context has room for.
_MAX_TOKENS = 2**31 - 1


def call_of(given: dict[str, Any], timeout: str | None) -> Call:
    """What a chat completion asks for.

    Args:
        given: the body.
        timeout: the header X-Request-Timeout, if it was sent.

    Raises:
        HttpError: 400, a field is wrong, missing or not supported.
    """
    fields = Fields(given)
    model = model_of(fields)
    messages = fields.array("messages", MAX_MESSAGES)
    if messages is None:
        raise invalid("messages", "is missing; give at least one message")
    turns = [_turn(f"messages[{i}]", turn) for i, turn in enumerate(messages)]
    sampling, most = sampling_of(fields, ("max_completion_tokens", "max_tokens"))
    wants, top = fields.flag("logprobs"), fields.whole("top_logprobs")
    if top is not None and not wants:
        raise invalid("top_logprobs", "is given without logprobs; set logprobs to true")
    if wants:
        sampling.logprobs = top or 0
    request = pb.GenerateRequest(
        model=model,
        messages=pb.Messages(messages=turns),
        sampling=sampling,
        priority=fields.whole("priority") or 0,
    )
    stream, include_usage = stream_of(fields)
    timeout_s = timeout_of(fields, timeout)
    fields.finish()
    names = {
        "input": "messages",
        "messages.messages": "messages",
        "sampling.max_tokens": most,
        "sampling.logprobs": "top_logprobs",
    }
    return Call(
        requests=[request],
        stream=stream,
        include_usage=include_usage,
        timeout_s=timeout_s,
        max_tokens=_MAX_TOKENS,
        echo=False,
        param_of=lambda prompt, field: renamed(field, names),
    )


def _turn(path: str, given: Any) -> pb.Message:
    if not isinstance(given, dict):
        raise invalid(path, f"is {shown(given)}; expected an object")
    content = given.get("content")
    # What an answer's message has beside its text is null, or an empty array.
    fields = Fields({k: v for k, v in given.items() if k != "content" and v != []}, f"{path}.")
    role = fields.text("role")
    if role is None:
        raise invalid(f"{path}.role", "is missing; give a role, such as user")
    if content is None:
        raise invalid(f"{path}.content", "is missing; give a text")
    text = _content(f"{path}.content", content)
    fields.finish()
    return pb.Message(role=role, content=text)


def _content(path: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(path, f"is {shown(given)}; expected a string or an array of text parts")
    texts: list[str] = []
    for i, part in enumerate(array(path, given, MAX_MESSAGES)):
        if not isinstance(part, dict):
            raise invalid(f"{path}[{i}]", f"is {shown(part)}; expected a part of type text")
        fields = Fields(part, f"{path}[{i}].")
        if fields.text("type") != "text":
            text = "is not supported by this server, which reads text only"
            raise invalid(f"{path}[{i}].type", text, "unsupported_parameter")
        text = fields.text("text")
        if text is None:
            raise invalid(f"{path}[{i}].text", "is missing; give a text")
        fields.finish()
        texts.append(text)
    return "".join(texts)


def chunks(piece: Piece, logprobs: bool) -> list[dict[str, Any]]:
    """The choices to send one by one for a piece: role, text and end."""
    deltas: list[tuple[dict[str, str], Sequence[Entry], str | None]] = []
    if piece.first:
        deltas.append(({"role": "assistant", "content": ""}, (), None))
    if piece.text or piece.entries:
        deltas.append(({"content": piece.text}, piece.entries, None))
    if piece.finish is not None:
        deltas.append(({}, (), piece.finish))
    return [
        {
            "index": piece.index,
            "delta": delta,
            "logprobs": _logprobs(entries) if logprobs and entries else None,
            "finish_reason": finish,
        }
        for delta, entries, finish in deltas
    ]


def choice(piece: Piece, logprobs: bool) -> dict[str, Any]:
    """The choice of an answer that is there as a whole."""
    return {
        "index": piece.index,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": _logprobs(piece.entries) if logprobs else None,
        "finish_reason": piece.finish,
    }


def _logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    content = [
        _spelled(e.token) | {"top_logprobs": [_spelled(other) for other in e.top]} for e in entries
    ]
    return {"content": content, "refusal": None}


def _spelled(token: Spelled) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.bytes}
