"""How `zen serve` is told what keys and values get: one option for each setting."""

import re
from enum import StrEnum
from typing import Annotated

import typer

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGTPE]i?)?B?", re.IGNORECASE)
_MOST = 2.0**63
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def byte_count(text: str) -> int:
    """A size as people write it: 512MiB, 2 GB, 1000000.

    Raises:
      ValueError: it is not one.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; expected one as 512MiB, 2GB or 1000000")
    unit = (found[2] or "").upper()
    size = float(found[1]) * (1024 if unit.endswith("I") else 1000) ** _POWERS[unit[:1]]
    if size >= _MOST:
        raise ValueError(f"{text[:40]!r} is more than any machine has; expected less than 8 EiB")
    return int(size)


class Kind(StrEnum):
    """What keys and values are kept as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    fp8 = "float8_e4m3fn"


MaxLength = Annotated[
    int | None,
    typer.Option(
        min=2, help="Tokens of prompt and answer together; else the model's, at most 1024."
    ),
]
Bytes = Annotated[
    int | None,
    typer.Option(
        parser=byte_count,
        metavar="SIZE",
        help="Memory for keys and values, as 512MiB or 2GiB; else what all rows need at their "
        "longest. With more rows than it holds at their longest, more short requests run at once; "
        "when it runs out, the last in line loses its row and goes on later.",
    ),
]
Dtype = Annotated[
    Kind | None,
    typer.Option(
        help="What keys and values are kept as; else float32 on a CPU, bfloat16 elsewhere. 8 bits "
        "hold almost four times the tokens of float32; docs/kv-cache.md says what they cost."
    ),
]
PageSize = Annotated[
    int, typer.Option(min=16, help="Tokens of a page, a multiple of 16. Whole pages are shared.")
]
PrefixCache = Annotated[
    bool, typer.Option(help="Prompts for one model that begin alike share what was read of them.")
]
