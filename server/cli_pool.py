"""`zen pool`: what can be chosen."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli_types import AsJson
from server.kv_options import byte_count

pool = typer.Typer(
    help="Keep LoRA adapters within a budget, merged where they are alike.", no_args_is_help=True
)


class PoolPolicy(StrEnum):
    """What is done with an adapter that comes."""

    gated = "gated"
    kmerge = "kmerge"
    kmerge_plus = "kmerge++"


class PoolOperation(StrEnum):
    """How adapters are merged."""

    opcm = "opcm"
    mean_delta = "mean_delta"
    mean_factors = "mean_factors"


class PoolSplit(StrEnum):
    """Whose rule says how large the block is that OPCM leaves alone."""

    code = "code"
    doc = "doc"


PoolPath = Annotated[Path, typer.Argument(metavar="POOL", help="The pool's folder.")]
Base = Annotated[
    Path, typer.Option("--store", metavar="STORE", help="Whose base the adapters belong to.")
]
Places = Annotated[int | None, typer.Option(min=1, help="Members at most; 8 in a new pool.")]
Budget = Annotated[
    int | None,
    typer.Option(
        parser=byte_count,
        metavar="SIZE",
        help="Bytes of the pool at most, with what is being written; a new pool needs it.",
    ),
]
Rule = Annotated[PoolPolicy | None, typer.Option(help="Which adapters are merged; else gated.")]
How = Annotated[PoolOperation | None, typer.Option(help="How they are merged; else opcm.")]
Split = Annotated[
    PoolSplit | None,
    typer.Option(help="opcm: the kept block's size as its authors' code has it, or their text."),
]
Rank = Annotated[int | None, typer.Option(min=1, help="Of a merge at most; else the adapter's.")]
Gate = Annotated[
    float | None, typer.Option(help="gated: the share of its score that every task keeps; 0.9.")
]
Threshold = Annotated[
    float | None, typer.Option(help="kmerge++: the least similarity of a merge; 0.024.")
]


@pool.command(
    "add", epilog="Example: zen pool add ./pool ./adapter --store ./store --budget-bytes 64MiB"
)
def add(
    context: typer.Context,
    path: PoolPath,
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A PEFT folder with tasks.json beside it.")
    ],
    store: Base,
    name: Annotated[str | None, typer.Option(help="How it is asked for; else its folder.")] = None,
    adapters: Places = None,
    budget_bytes: Budget = None,
    policy: Rule = None,
    operation: How = None,
    split: Split = None,
    rank: Rank = None,
    gate: Gate = None,
    threshold: Threshold = None,
    as_json: AsJson = False,
) -> None:
    """Take an adapter in: kept, merged, or refused with status 2 and the pool as it was.

    The first makes the pool, with the limits and rules that are given.
    """
    from server.commands import pool as command

    choices = command.Choices(**_chosen(context.params))
    command.add(path, adapter, store, name, choices, as_json=as_json)


@pool.command("ls", epilog="Example: zen pool ls ./pool")
def ls(path: PoolPath, as_json: AsJson = False) -> None:
    """List the members, who they answer for, and their bytes."""
    from server.commands import pool as command

    command.ls(path, as_json=as_json)


@pool.command("show", epilog="Example: zen pool show ./pool my-adapter")
def show(
    path: PoolPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An adapter.")],
    as_json: AsJson = False,
) -> None:
    """Say which member answers for an adapter, and who else is in it."""
    from server.commands import pool as command

    command.show(path, name, as_json=as_json)


@pool.command("simulate", epilog="Example: zen pool simulate ./adapters --store ./store")
def simulate(
    context: typer.Context,
    adapters_folder: Annotated[
        Path, typer.Argument(metavar="ADAPTERS", help="A folder of adapters with tasks.json.")
    ],
    store: Base,
    order: Annotated[int, typer.Option(min=0, help="Seed of their order; 0: by name.")] = 0,
    adapters: Places = None,
    budget_bytes: Budget = None,
    policy: Rule = None,
    operation: How = None,
    split: Split = None,
    rank: Rank = None,
    gate: Gate = None,
    threshold: Threshold = None,
    as_json: AsJson = False,
) -> None:
    """Have all adapters come to a pool in memory, and say what is left of each.

    Without a budget there is room for the members, for one more and for all tasks.
    """
    from server.commands import pool as command

    choices = command.Choices(**_chosen(context.params))
    command.simulate(adapters_folder, store, order, choices, as_json=as_json)


_CHOICES = (
    "adapters",
    "budget_bytes",
    "policy",
    "operation",
    "split",
    "rank",
    "gate",
    "threshold",
)


def _chosen(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of Choices, from what was given by option."""
    chosen = {name: given[name] for name in _CHOICES}
    return {n: v.value if isinstance(v, StrEnum) else v for n, v in chosen.items()}
