"""Every status that the server answers with: when, with which details, and what to do about it.

`server.status` looks each one up here, so that none is sent that is not described; docs/statuses.md
is written from here by `python -m server.status_table`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from google.rpc import code_pb2

PAGE = Path(__file__).parent.parent / "docs" / "statuses.md"
_MARK = "<!-- table -->"


@dataclass(frozen=True)
class Meaning:
    """What a status says.

    Attributes:
        http: the status of the same failure over HTTP.
        details: the google.rpc message that comes with it, if one does.
        when: what happened, one line for each kind.
        remedy: what the caller does.
    """

    http: int
    details: str
    when: tuple[str, ...]
    remedy: str


_TABLE: dict[int, Meaning] = {
    code_pb2.INVALID_ARGUMENT: Meaning(
        400,
        "BadRequest",
        (
            "a field is missing, out of range, NaN or infinite, or not UTF-8",
            "a token id is outside the model's vocabulary",
            "prompt and answer do not fit the effective context",
        ),
        "mend the fields that `field_violations` names",
    ),
    code_pb2.NOT_FOUND: Meaning(
        404,
        "ResourceInfo",
        ("no variant goes by this name; the base never answers in its place",),
        "ask `ListVariants`",
    ),
    code_pb2.ALREADY_EXISTS: Meaning(
        409,
        "ResourceInfo",
        ("a request of the id given is under way",),
        "give each request an id of its own, or none",
    ),
    code_pb2.FAILED_PRECONDITION: Meaning(
        409,
        "PreconditionFailure",
        (
            "`LOAD_FAILED`: the variant, its tokenizer or its chat template cannot be loaded",
            "`DOES_NOT_FIT`: it exceeds what the bank was built for when the server started",
            "`NOT_TAKEN_IN`: the pool has no place for the adapter, and no member that it can be "
            "merged into",
        ),
        "an operator repairs the variant, or starts a server that has room for it",
    ),
    code_pb2.UNAUTHENTICATED: Meaning(
        401,
        "",
        ("no token was given, or one that is unknown or has expired; which of them is not said",),
        "send `authorization: Bearer TOKEN`",
    ),
    code_pb2.PERMISSION_DENIED: Meaning(
        403,
        "",
        ("the token has not the right that the method asks for",),
        "ask for a token that has it",
    ),
    code_pb2.RESOURCE_EXHAUSTED: Meaning(
        429,
        "RetryInfo",
        (
            "as many requests or tokens wait for a row as may, in all or for this model",
            "the tenant has had the requests or tokens that it may",
            "no slot came free for the variant in the time allowed",
            "too many variants are pinned",
            "the pool lacks the bytes of members that answer their last requests",
        ),
        "come back after `retry_delay`",
    ),
    code_pb2.UNAVAILABLE: Meaning(
        503,
        "RetryInfo",
        (
            "the server starts or stops",
            "the engine has died or does not answer",
            "a load took too long, or another process changes the pool",
        ),
        "come back after `retry_delay`, here or elsewhere",
    ),
    code_pb2.DEADLINE_EXCEEDED: Meaning(
        504,
        "",
        ("the caller's deadline passed, in the queue or while its answer was made",),
        "allow more time",
    ),
    code_pb2.CANCELLED: Meaning(
        499,
        "",
        ("the caller cancelled or went away", "it left what was sent unread for too long"),
        "none",
    ),
    code_pb2.ABORTED: Meaning(
        409,
        "",
        (
            "an operator unloaded the variant while the request waited for it",
            "an operator pinned it while it was to be unloaded",
        ),
        "ask again",
    ),
    code_pb2.DATA_LOSS: Meaning(
        500,
        "",
        ("the variant's files are damaged",),
        "an operator runs `zen verify` and converts it again",
    ),
    code_pb2.INTERNAL: Meaning(
        500,
        "",
        ("a fault of the server; the text is an id, and nothing from inside",),
        "an operator looks for the id in the server's log",
    ),
}
TABLE: Mapping[int, Meaning] = MappingProxyType(_TABLE)


def markdown() -> str:
    """The table as it stands on the page."""
    lines = ["| gRPC | HTTP | details | when | what to do |", "|---|---|---|---|---|"]
    for code, meaning in TABLE.items():
        details = f"`{meaning.details}`" if meaning.details else ""
        when = "; ".join(meaning.when)
        name = code_pb2.Code.Name(code)
        lines.append(f"| `{name}` | {meaning.http} | {details} | {when} | {meaning.remedy} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """A page's text with its table, between two marks, written anew.

    Raises:
        ValueError: the page has no place for one.
    """
    parts = page.split(_MARK)
    if len(parts) != 3:
        raise ValueError(f"the page has {len(parts) - 1} marks {_MARK!r}; expected 2")
    return f"{parts[0]}{_MARK}\n{markdown()}\n{_MARK}{parts[2]}"


if __name__ == "__main__":
    page = PAGE.read_text()
    new = with_table(page)
    if sys.argv[1:] == ["check"]:
        sys.exit(0 if new == page else f"{PAGE.name} is old; run python -m server.status_table")
    PAGE.write_text(new)
