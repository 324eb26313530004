"""`zen serve`: what can be chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated

import typer

from server import cache_options as keep
from server import kv_options as kv
from server.cli_types import Products, StorePath

Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
HttpPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Answer OpenAI's clients here too; 0 takes a free one."),
]
Rows = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="Variants in memory at once; else all, at most 14."),
]
Inbox = Annotated[int, typer.Option(min=1, help="Requests that may wait before more are refused.")]
InboxTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of prompts that may wait; else no bound.")
]
InboxPerModel = Annotated[
    int | None, typer.Option(min=1, help="Requests for one model that may wait.")
]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Devices to shard over; else all accelerators.")
]
Drain = Annotated[
    float, typer.Option(min=0, help="Seconds that running requests get when it stops.")
]
Hang = Annotated[
    float, typer.Option(min=1, help="Seconds without an answer until the engine is given up.")
]
Rounding = Annotated[
    Products,
    typer.Option(help="Activations at weights; bfloat16 reads prompts faster on a CPU."),
]

EXAMPLE = "Example: zen serve ./store --port 50051 --rows 32"


def serve(
    store: StorePath,
    host: Host = "127.0.0.1",
    port: Port = 50051,
    http_port: HttpPort = None,
    rows: Rows = 16,
    slots: Slots = None,
    max_length: kv.MaxLength = None,
    inbox: Inbox = 64,
    inbox_tokens: InboxTokens = None,
    inbox_per_model: InboxPerModel = None,
    half_life: keep.HalfLife = 300.0,
    pinned: keep.Pinned = 6,
    idle_after: keep.IdleAfter = 600.0,
    host_bytes: keep.HostBytes = None,
    devices: Devices = None,
    drain: Drain = 30.0,
    hang: Hang = 120.0,
    products: Rounding = Products.float32,
    kv_bytes: kv.Bytes = None,
    kv_dtype: kv.Dtype = None,
    page_size: kv.PageSize = 32,
    prefix_cache: kv.PrefixCache = True,
) -> None:
    """Serve a store over gRPC until SIGTERM or Ctrl-C; what runs then may finish."""
    from server.commands import serve as command
    from server.serve_options import ServeOptions

    with by_option(ServeOptions):
        options = ServeOptions(
            host=host,
            port=port,
            http_port=http_port,
            rows=rows,
            slots=slots,
            max_length=max_length,
            inbox=inbox,
            inbox_tokens=inbox_tokens,
            inbox_per_model=inbox_per_model,
            half_life_s=half_life,
            pinned=pinned,
            idle_after_s=idle_after,
            host_bytes=host_bytes,
            devices=devices,
            drain_s=drain,
            hang_s=hang,
            products=products.value,
            kv_bytes=kv_bytes,
            kv_dtype=None if kv_dtype is None else kv_dtype.value,
            page_size=page_size,
            prefix_cache=prefix_cache,
        )
        finished = command.run(store, options)
    if not finished:
        raise typer.Exit(1)


@contextmanager
def by_option(settings: type) -> Iterator[None]:
    """Calls a setting by its option's name in what is said against it."""
    names = {field.name for field in fields(settings)}
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name not in names:
            raise
        option = name.removesuffix("_s").replace("_", "-")
        raise ValueError(f"--{option} {rest}") from None
