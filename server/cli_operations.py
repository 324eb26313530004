"""`zen status` and `zen profile`: what can be asked."""

from __future__ import annotations

from typing import Annotated

import typer

from server import reach_options as reach
from server.cli_types import Address, AsJson

Every = Annotated[
    float, typer.Option(min=0.1, max=3600, help="Seconds between two looks, on a terminal.")
]
Once = Annotated[bool, typer.Option("--once", help="Look once, on a terminal too.")]
Seconds = Annotated[float, typer.Option(min=0.1, max=60, help="How long to record.")]


def status(
    address: Address = "127.0.0.1:50051",
    every: Every = 1.0,
    once: Once = False,
    token_file: reach.TokenFile = None,
    tls_roots: reach.TlsRoots = None,
    tls_cert: reach.TlsCert = None,
    tls_key: reach.TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Watch a server: variants, slots, queue, first tokens, pages and loads, until Ctrl-C.

    Piped, or with --once or --json, it looks once.
    """
    from server.commands import operations as command

    access = reach.access(token_file, tls_roots, tls_cert, tls_key)
    command.status(address, access, every, once=once, as_json=as_json)


def profile(
    address: Address = "127.0.0.1:50051",
    seconds: Seconds = 5.0,
    token_file: reach.TokenFile = None,
    tls_roots: reach.TlsRoots = None,
    tls_cert: reach.TlsCert = None,
    tls_key: reach.TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Have a server record what its processors and devices do, for tensorboard's profiler.

    The server puts it into the folder that `zen serve --profiles` names.
    """
    from server.commands import operations as command

    access = reach.access(token_file, tls_roots, tls_cert, tls_key)
    command.profile(address, access, seconds, as_json=as_json)
