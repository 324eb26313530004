"""How a command gets through to a server that does not let everybody in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from server.client_access import Access

TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file that holds the token, and no more.")
]
TlsRoots = Annotated[
    Path | None,
    typer.Option(metavar="PEM", help="Roots of the server's certificate; makes it TLS."),
]
TlsCert = Annotated[
    Path | None, typer.Option(metavar="PEM", help="A certificate of one's own to show.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="PEM", help="Its private key.")]


def access(
    token_file: Path | None, roots: Path | None, certificate: Path | None, key: Path | None
) -> Access:
    """What the options say.

    Raises:
        ValueError: the file cannot be read, or they do not go together.
    """
    from server.client_access import Access

    token = None
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"the token in {token_file} cannot be read") from None
        if not token:
            raise ValueError(f"{token_file} holds no token; expected one line from `zen token new`")
    return Access(token, roots, certificate, key)
