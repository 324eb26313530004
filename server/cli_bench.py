"""`zen bench serve`: what can be chosen."""

from pathlib import Path
from typing import Annotated

import typer

from server.cli_types import Products, StorePath

SERVE_EXAMPLE = "Example: zen bench serve ./store --seconds 60 --json serve.json"


def bench_serve(
    store: StorePath,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; else 0.5, 1 and 2 times the capacity.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 60.0,
    warm: Annotated[
        float, typer.Option(min=0, help="Seconds of traffic before each run that do not count.")
    ] = 0.0,
    variants: Annotated[
        int | None, typer.Option(min=1, help="How many take part; else all of the store's.")
    ] = None,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of Zipf's law over them.")] = 1.0,
    base_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the requests, for the base.")
    ] = 0.5,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 512,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of answers, on average.")] = 32,
    slo_ttft_ms: Annotated[
        float, typer.Option(help="A good answer's first token comes within it.")
    ] = 2000.0,
    slo_tpot_ms: Annotated[
        float, typer.Option(help="And its other tokens take no longer each.")
    ] = 200.0,
    rows: Annotated[int, typer.Option(min=1, help="Requests that the server runs at once.")] = 16,
    inbox: Annotated[
        int | None, typer.Option(min=1, help="That may wait; else half as many as rows.")
    ] = None,
    products: Annotated[
        Products, typer.Option(help="What activations are rounded to at weights.")
    ] = Products.float32,
    address: Annotated[
        str | None, typer.Option(help="A server of this store that runs; else one is started.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """A server under half, all and twice the load that it can bear, over gRPC."""
    from server.benchmark_serve import ServePlan
    from server.commands import bench_serve as command

    plan = ServePlan(
        rate=rate,
        seconds=seconds,
        warm_s=warm,
        variants=variants,
        zipf=zipf,
        base_share=base_share,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        rows=rows,
        inbox=inbox,
        products=products.value,
    )
    command.run(store, plan, address, out)


ACCESS_EXAMPLE = "Example: zen bench access ./store --json access.json"


def bench_access(
    store: StorePath,
    requests: Annotated[int, typer.Option(min=2, help="Timed of each server.")] = 300,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 32,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
) -> None:
    """A server with TLS, tokens, traces and metrics beside the same server without."""
    from server.benchmark_access import AccessPlan
    from server.commands import bench_access as command

    command.run(store, AccessPlan(requests, prompt_tokens, answer_tokens), out)
