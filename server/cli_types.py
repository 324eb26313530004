"""Arguments that several commands of `zen` take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print figures as JSON.")]
Address = Annotated[str, typer.Option(help="The server's host:port.")]


class Products(StrEnum):
    """What activations are rounded to just before they meet a weight."""

    float32 = "float32"
    bfloat16 = "bfloat16"
