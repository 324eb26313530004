"""`zen bench cache` and `zen bench coldstart`: what can be asked of them."""

from pathlib import Path
from typing import Annotated

import typer

from server import cache_options as keep

CACHE_EXAMPLE = "Example: zen bench cache --json cache.json --docs docs"
COLD_EXAMPLE = "Example: zen bench coldstart --json coldstart.json"


def bench_cache(
    requests: Annotated[int, typer.Option(min=1, help="Requests of each case.")] = 20_000,
    half_life: keep.HalfLife = 300.0,
    pinned: keep.Pinned = 6,
    idle_after: keep.IdleAfter = 600.0,
    docs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write cache.md and cache.png here.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """Hit rates of the policy over variants in memory, against LRU, LFU, others and the best."""
    from server.commands import bench_cache as command
    from zen_jax.eviction import Policy

    policy = Policy(half_life, half_life, pinned, idle_after_s=idle_after)
    command.run(requests, policy, out, docs)


def bench_coldstart(
    store: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="Whose first variant; else what `make models` made."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="Shapes of the variant to time: 1b, smollm2-135m, or store for its own."),
    ] = "1b",
    repeats: Annotated[int, typer.Option(min=1, help="Loads; the median counts.")] = 9,
    waiting: Annotated[int, typer.Option(min=1, help="Requests for it at once.")] = 8,
    window: Annotated[float, typer.Option(help="Seconds of decoding between changes.")] = 1.5,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """A cold variant's way into memory beside a raw read of its files, and what others notice."""
    from server.benchmark_coldstart import ColdPlan
    from server.commands import bench_coldstart as command
    from zen_jax.peers.bench import STORE

    plan = ColdPlan(repeats, waiting, window, model=None if model == "store" else model)
    command.run(store or STORE, plan, out)
