"""`zen serve`: what can be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server import cache_options as keep
from server import kv_options as kv
from server.cli_types import Products, StorePath


class LogFormat(StrEnum):
    """How a line of log looks."""

    text = "text"
    json = "json"


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
TokenFile = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="Let in who has a token; see `zen token`."),
]
Operators = Annotated[
    bool, typer.Option("--operators", help="Without tokens: let anybody load, unload and pin.")
]
Reflection = Annotated[bool, typer.Option(help="Tell who asks what the services are.")]
TlsCert = Annotated[
    Path | None, typer.Option(metavar="PEM", help="Certificate to be known by; makes it TLS.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="PEM", help="Its private key.")]
TlsClientRoots = Annotated[
    Path | None,
    typer.Option(metavar="PEM", help="Let in who shows a certificate signed by one of these."),
]
Rounding = Annotated[
    Products,
    typer.Option(help="Activations at weights; bfloat16 reads prompts faster on a CPU."),
]
Traces = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Send traces to an OpenTelemetry collector (OTLP over gRPC)."),
]
TraceShare = Annotated[
    float, typer.Option(min=0, max=1, help="Of calls without a trace, those that begin one.")
]
ProfileFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where `zen profile` may put recordings; else nowhere."),
]
Log = Annotated[
    LogFormat, typer.Option("--log-format", help="How log lines look; json is one object a line.")
]

Pool = Annotated[
    Path | None,
    typer.Option(metavar="POOL", help="Serve the base with this pool; see `zen pool`."),
]
Budget = Annotated[
    int | None,
    typer.Option(
        parser=kv.byte_count, metavar="SIZE", help="Memory for the base and the pool's members."
    ),
]
Adapters = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="PEFT folders with tasks.json; one asked for goes into the pool."
    ),
]

if TYPE_CHECKING:
    from server.tls import TlsFiles

EXAMPLE = "Example: zen serve ./store --port 50051 --rows 32"


def serve(
    context: typer.Context,
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
    tokens: TokenFile = None,
    operators: Operators = False,
    reflection: Reflection = True,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_roots: TlsClientRoots = None,
    products: Rounding = Products.float32,
    kv_bytes: kv.Bytes = None,
    kv_dtype: kv.Dtype = None,
    page_size: kv.PageSize = 32,
    prefix_cache: kv.PrefixCache = True,
    traces: Traces = None,
    trace_share: TraceShare = 1.0,
    profiles: ProfileFolder = None,
    log_format: Log = LogFormat.text,
    pool: Pool = None,
    budget_bytes: Budget = None,
    adapters: Adapters = None,
) -> None:
    """Serve a store over gRPC until SIGTERM or Ctrl-C; what runs then may finish."""
    from server.commands import serve as command
    from server.serve_options import ServeOptions

    with by_option(ServeOptions):
        options = ServeOptions(**_settings(context.params))
        finished = command.run(store, options, log_format.value, pool, budget_bytes, adapters)
    if not finished:
        raise typer.Exit(1)


# What is no setting of the server.
_OTHERS = ("store", "log_format", "pool", "budget_bytes", "adapters")
# Settings whose unit stands in their name.
_SECONDS = ("half_life", "idle_after", "drain", "hang")


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of ServeOptions, from what was given by option."""
    settings = {name: value for name, value in given.items() if name not in _OTHERS}
    paths = (settings.pop(name) for name in ("tls_cert", "tls_key", "tls_client_roots"))
    settings["tls"] = _tls(*paths)
    settings |= {f"{name}_s": settings.pop(name) for name in _SECONDS}
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in settings.items()
    }


def _tls(certificate: Path | None, key: Path | None, roots: Path | None) -> TlsFiles | None:
    from server.tls import TlsFiles

    if certificate is not None and key is not None:
        return TlsFiles(certificate, key, roots)
    if certificate is None and key is None and roots is None:
        return None
    raise ValueError("give --tls-cert together with --tls-key; --tls-client-roots needs both")


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
