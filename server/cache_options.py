"""How `zen serve` is told which variants stay in memory: one option for each setting."""

from typing import Annotated

import typer

HalfLife = Annotated[
    float, typer.Option(help="Seconds in which a request for a variant counts half.")
]
Pinned = Annotated[
    int, typer.Option(min=0, help="How many of the variants most asked for stay; below --slots.")
]
IdleAfter = Annotated[
    float, typer.Option(help="Seconds after which an unused variant is the first to go.")
]
HostBytes = Annotated[
    int | None,
    typer.Option(min=0, help="Host memory for variants and loads; else a quarter of it."),
]
