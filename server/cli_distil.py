"""`zen distill`: what can be asked of it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from server.cli_types import AsJson, StorePath
from server.kv_options import byte_count


class Fit(StrEnum):
    """What is fitted to the inputs of each layer."""

    signs = "signs"
    scales = "scales"
    none = "none"


class Train(StrEnum):
    """What scales are trained by."""

    logits = "logits"
    layers = "layers"
    none = "none"


def distill(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="The fine-tune it was converted from.")
    ],
    store: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The variant.")],
    text: Annotated[
        list[Path], typer.Option(help="UTF-8 text of what the variant is for; may be repeated.")
    ],
    fit: Annotated[
        Fit, typer.Option(help="Signs and scales to each layer's inputs, scales alone, or none.")
    ] = Fit.signs,
    train: Annotated[
        Train,
        typer.Option(
            help="Scales by logits (both models in memory), or by layers (one of each at a time)."
        ),
    ] = Train.logits,
    samples: Annotated[int, typer.Option(min=8, help="Windows of text at most.")] = 800,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 128,
    rate: Annotated[float, typer.Option(help="Adam's, for a scale of 0.01.")] = 1e-4,
    constant: Annotated[bool, typer.Option("--constant", help="No cosine.")] = False,
    steps: Annotated[
        int, typer.Option(min=0, help="Of training; 0 goes once through the samples.")
    ] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Windows of a forward pass.")] = 4,
    size: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            parser=byte_count,
            metavar="SIZE",
            help="Bytes on disk that the version may have, as 12MiB or 1.5GB: matrices get more "
            "levels of signs, up to 4, where text says that they gain most for their bytes.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG of how it went.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a variant's signs and scales to text, and publish what is nearer to its fine-tune as the
    next version of its name. Goes on where it was interrupted."""
    from server.commands import distil as commands
    from zen_jax.distillation import Distilling

    how = Distilling(
        fit=fit.value,  # pyright: ignore[reportArgumentType]
        train=train.value,  # pyright: ignore[reportArgumentType]
        samples=samples,
        length=length,
        rate=rate,
        cosine=not constant,
        steps=steps,
        rows=rows,
        bytes=size,
    )
    commands.run(src, store, name, text, how, plot=plot, as_json=as_json)
