"""How a client is let in: a token, and whose certificate it trusts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"

# gRPC's ways to name a server other than by host and port.
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
# What may stand in a header.
_HEADER = re.compile(r"[\x21-\x7e]+", re.ASCII)


@dataclass(frozen=True)
class Access:
    """What a client shows and trusts; by default nothing, over a connection in the clear.

    Attributes:
        token: sent with every call; without TLS whoever is on the way can read it.
        roots: certificates, in PEM, one of which has signed the server's; makes the connection TLS.
        certificate: the client's own, in PEM, where the server asks for one.
        key: its private key.

    Raises:
        ValueError: a token that no header can hold, or a certificate without its key or roots.
    """

    token: str | None = field(default=None, repr=False)
    roots: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not _HEADER.fullmatch(self.token):
            raise ValueError("the token holds characters that no header can hold")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("give a certificate together with its key")
        if self.certificate is not None and self.roots is None:
            raise ValueError("a certificate is shown over TLS alone; give the server's roots too")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What the connection is made with; None in the clear.

        Raises:
            ValueError: a file cannot be read.
        """
        if self.roots is None:
            return None
        try:
            own = (None, None)
            if self.key is not None and self.certificate is not None:
                own = self.key.read_bytes(), self.certificate.read_bytes()
            return grpc.ssl_channel_credentials(self.roots.read_bytes(), *own)
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None

    def channel(self, address: str) -> grpc.Channel:
        """A connection to `address`, host:port, made when the first call is.

        Raises:
            ValueError: no server can have this address, or a file cannot be read.
        """
        credentials, address = self.credentials(), _checked(address)
        if credentials is None:
            return grpc.insecure_channel(address)
        return grpc.secure_channel(address, credentials)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """The same for asyncio."""
        credentials, address = self.credentials(), _checked(address)
        if credentials is None:
            return grpc.aio.insecure_channel(address)
        return grpc.aio.secure_channel(address, credentials)


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    bare = ":" not in host or (host.startswith("[") and host.endswith("]"))
    numbered = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    if not address.startswith(_SCHEMES) and not (host and bare and numbered):
        raise ValueError(
            f"the address is {shortened(address)}; expected host:port, such as {DEFAULT_ADDRESS}, "
            "with a port from 1 to 65535"
        )
    return address
