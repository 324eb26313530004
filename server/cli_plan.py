"""`zen plan`: what can be chosen."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: zen plan --model llama-3.1-70b --variants 14 --chips 8xH100 --json plan.json"


class BaseDtype(StrEnum):
    """What the base's weights are kept as."""

    bfloat16 = "bfloat16"
    int8 = "int8"
    fp8 = "fp8"


class KvDtype(StrEnum):
    """What keys and values are kept as."""

    bfloat16 = "bfloat16"
    int8 = "int8"
    float8 = "float8_e4m3fn"


def plan(
    context_: typer.Context,
    model: Annotated[
        str, typer.Option(help="A folder with config.json, such a file, or a well-known name.")
    ] = "llama-3.1-70b",
    variants: Annotated[int, typer.Option(min=0, help="Resident at once.")] = 14,
    chips: Annotated[
        str, typer.Option(metavar="NxCARD", help="1 to 16 of H100, H200, A100 or L40S.")
    ] = "8xH100",
    rows: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 64,
    context: Annotated[int, typer.Option(min=2, help="The most tokens of a request.")] = 8192,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before a first token.")] = 512,
    base_dtype: Annotated[BaseDtype, typer.Option(help="Of the base's weights.")] = (
        BaseDtype.bfloat16
    ),
    kv_dtype: Annotated[KvDtype, typer.Option(help="Of keys and values.")] = KvDtype.bfloat16,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile for such cards, of which none is needed.")
    ] = False,
    layers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Depths to compile, again for more; else 2, 4, 16 and a line."),
    ] = None,
    pool: Annotated[
        int | None, typer.Option(help="Instead: so many merged adapters on a small device.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Of the pool's adapters.")] = 16,
    memory: Annotated[float, typer.Option(help="Of the pool's device, in GB of 1e9.")] = 16.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Figures, and without --pool a picture beside."
        ),
    ] = None,
) -> None:
    """Will it fit, and how fast could it be; status 1 when it does not fit."""
    from server.commands import plan as command
    from zen_jax.plan.chips import parse_chips
    from zen_jax.plan.compiled import LAYERS
    from zen_jax.plan.models import read_model
    from zen_jax.plan.report import Request

    if pool is not None:
        _plan_pool(context_, pool, memory, out)
        return
    chip, count = parse_chips(chips)
    request = Request(
        config=read_model(model),
        name=model,
        chip=chip,
        count=count,
        variants=variants,
        rows=rows,
        context=context,
        prompt=prompt,
        base_dtype=base_dtype.value,
        kv_dtype=kv_dtype.value,
    )
    depths = sorted({*(layers or LAYERS)}) if compiled else []
    if not command.run(request, out, depths):
        raise typer.Exit(1)


def _plan_pool(context: typer.Context, pool: int, memory: float, out: Path | None) -> None:
    """A small device; options of a node are refused."""
    from server.commands import plan as command

    for name in ("variants", "chips", "rows", "prompt", "compiled", "layers"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "compile" if name == "compiled" else name
            raise ValueError(f"--{option} says nothing beside --pool; leave one of them out")
    if not 0 < memory < 1e6:
        raise ValueError(f"--memory is {memory}; expected GB of a device, above 0 and below 1e6")
    given = context.params
    dtypes = given["base_dtype"].value, given["kv_dtype"].value
    sizes = (pool, given["rank"], round(memory * 1e9), given["context"], *dtypes)
    if not command.run_pool(given["model"], sizes, out):
        raise typer.Exit(1)
