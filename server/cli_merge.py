"""`zen merge`: what can be asked of it."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from zen_jax.merge.folding import Method

merge = typer.Typer(help="Merge fine-tunes of one base into one model.", no_args_is_help=True)


class Form(StrEnum):
    """What the result is written as."""

    safetensors = "safetensors"
    store = "store"


class Vocabulary(StrEnum):
    """What to do where a checkpoint has more tokens than the base."""

    refuse = "refuse"
    base = "base"
    extra = "extra"


class Shapes(StrEnum):
    """What to do where another shape or tensor differs."""

    refuse = "refuse"
    base = "base"


class Dtype(StrEnum):
    """What the result is rounded to, once."""

    F32 = "F32"
    BF16 = "BF16"
    F16 = "F16"


class HeadRank(StrEnum):
    """How MonoSoup's head is found."""

    effective = "effective"
    energy = "energy"


class SplitRule(StrEnum):
    """Where OPCM's leading block ends."""

    code = "code"
    doc = "doc"


class Outside(StrEnum):
    """What OPCM does with what a checkpoint has outside the merge's rows and columns."""

    keep = "keep"
    drop = "drop"


_WHAT = "a Hugging Face folder, a GGUF file, a store (its base), or STORE:NAME[:VERSION]."
Base = Annotated[str, typer.Option("--base", metavar="BASE", help=f"What all come from: {_WHAT}")]
Models = Annotated[
    list[str], typer.Option("--model", metavar="MODEL", help=f"Again for more: {_WHAT}")
]
Model = Annotated[
    list[str], typer.Option("--model", metavar="MODEL", help=f"The one checkpoint: {_WHAT}")
]
Out = Annotated[Path, typer.Option("--out", metavar="OUT", help="A new folder for the result.")]
Format = Annotated[Form, typer.Option("--format", help="A folder, or a store with it as base.")]
Publish = Annotated[
    tuple[Path, str] | None,
    typer.Option(metavar="STORE NAME", help="Make it a variant in this store, too."),
]
MoreTokens = Annotated[
    Vocabulary,
    typer.Option(help="Tokens that the base lacks: an error, left out, or kept as they are."),
]
OtherShapes = Annotated[
    Shapes, typer.Option(help="Other tensors that differ: an error, or the base's are taken.")
]
Rounded = Annotated[Dtype | None, typer.Option(help="Of the result; else as the base has it.")]
Devices = Annotated[
    int | None, typer.Option(min=1, help="To cut matrices over; else all accelerators.")
]
TimeSvd = Annotated[
    bool, typer.Option("--time-svd", help="Time a full SVD of each shape, to compare.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@merge.command(
    "mean", epilog="Example: zen merge mean --base ./b --model ./x --model ./y --out ./m"
)
def mean(
    context: typer.Context,
    base: Base,
    model: Models,
    out: Out,
    format_: Format = Form.safetensors,
    publish: Publish = None,
    vocabulary: MoreTokens = Vocabulary.refuse,
    shapes: OtherShapes = Shapes.refuse,
    dtype: Rounded = None,
    devices: Devices = None,
    time_svd: TimeSvd = False,
    as_json: AsJson = False,
) -> None:
    """The plain mean of checkpoints' deltas."""
    from zen_jax.merge.folding import Mean

    _run(Mean(), context.params)


@merge.command(
    "monosoup", epilog="Example: zen merge monosoup --base ./b --model ./x --out ./clean"
)
def monosoup(
    context: typer.Context,
    base: Base,
    model: Model,
    out: Out,
    rank: Annotated[
        HeadRank, typer.Option(help="By the entropy of singular values, or by their energy.")
    ] = HeadRank.effective,
    energy: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of energy that the head reaches.")
    ] = 0.8,
    format_: Format = Form.safetensors,
    publish: Publish = None,
    vocabulary: MoreTokens = Vocabulary.refuse,
    shapes: OtherShapes = Shapes.refuse,
    dtype: Rounded = None,
    devices: Devices = None,
    time_svd: TimeSvd = False,
    as_json: AsJson = False,
) -> None:
    """Clean one checkpoint: few directions are kept nearly whole, the others in part
    (arXiv:2602.09689)."""
    from zen_jax.merge.monosoup import MonoSoup

    _run(MonoSoup(rank.value, energy), context.params)  # pyright: ignore[reportArgumentType]


@merge.command(
    "truncated-soup",
    epilog="Example: zen merge truncated-soup --rank 64 --base ./b --model ./x --model ./y --out m",
)
def truncated_soup(
    context: typer.Context,
    base: Base,
    model: Models,
    out: Out,
    rank: Annotated[int, typer.Option(min=1, help="That each delta is cut to.")],
    format_: Format = Form.safetensors,
    publish: Publish = None,
    vocabulary: MoreTokens = Vocabulary.refuse,
    shapes: OtherShapes = Shapes.refuse,
    dtype: Rounded = None,
    devices: Devices = None,
    time_svd: TimeSvd = False,
    as_json: AsJson = False,
) -> None:
    """The mean of deltas, each cut to a rank."""
    from zen_jax.merge.monosoup import TruncatedSoup

    _run(TruncatedSoup(rank), context.params)


@merge.command(
    "opcm", epilog="Example: zen merge opcm --base ./b --model ./x --model ./y --out ./m"
)
def opcm(
    context: typer.Context,
    base: Base,
    model: Models,
    out: Out,
    alpha: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of singular values in the block.")
    ] = 0.5,
    split: Annotated[
        SplitRule, typer.Option(help="The block as in the authors' code, or as in their text.")
    ] = SplitRule.code,
    outside: Annotated[
        Outside, typer.Option(help="What is outside the merge's rows and columns.")
    ] = Outside.keep,
    format_: Format = Form.safetensors,
    publish: Publish = None,
    vocabulary: MoreTokens = Vocabulary.refuse,
    shapes: OtherShapes = Shapes.refuse,
    dtype: Rounded = None,
    devices: Devices = None,
    time_svd: TimeSvd = False,
    as_json: AsJson = False,
) -> None:
    """Merge in turn, each without what it has in common with the merge so far
    (arXiv:2501.09522)."""
    from zen_jax.merge.opcm import Opcm

    method = Opcm(alpha, split.value, outside.value)  # pyright: ignore[reportArgumentType]
    _run(method, context.params)


def _run(method: "Method", given: dict[str, Any]) -> None:
    from server.commands import merge as command
    from zen_jax.merge.checkpoints import Target
    from zen_jax.merge.pairing import Policies

    options = command.Options(
        base=given["base"],
        models=given["model"],
        target=Target(given["out"], given["format_"].value, given["publish"]),
        policies=Policies(given["vocabulary"].value, given["shapes"].value),
        dtype=None if given["dtype"] is None else given["dtype"].value,
        devices=given["devices"],
        time_svd=given["time_svd"],
    )
    command.run(method, options, as_json=given["as_json"])
