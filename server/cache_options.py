"""How `zen serve` is told which variants stay in memory: one option for each setting."""

from typing import Annotated

import typer

from server.kv_options import byte_count

HalfLife = Annotated[
    float, typer.Option(help="Seconds in which a request for a variant counts half.")
]
Pinned = Annotated[
    int,
    typer.Option(
        min=0, help="How many of the variants most asked for stay, --slots less one at most."
    ),
]
IdleAfter = Annotated[
    float, typer.Option(help="Seconds after which an unused variant is the first to go.")
]
HostBytes = Annotated[
    int | None,
    typer.Option(
        parser=byte_count,
        metavar="SIZE",
        help="Host memory for variants and loads, as 512MiB; else a quarter of it. While it is "
        "loaded a variant takes its files and up to two slots.",
    ),
]
