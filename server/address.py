"""Where a server listens: whether it can, and why not."""

import errno
import socket


class PortInUse(ValueError):
    """The address cannot be listened on."""


def check_address(host: str, port: int) -> None:
    """Sees whether a server can listen there now.

    Raises:
        PortInUse: it cannot, and why.
    """
    why = why_not(host, port)
    if why is not None:
        raise PortInUse(f"cannot listen on {host}:{port}; {why}")


def why_not(host: str, port: int, option: str = "--port") -> str | None:
    """Why a server cannot listen there now; None if it can. `option` is what names the port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return f"the host {host!r} cannot be resolved"
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"is another server there? {option} 0 takes a free port"
        if error.errno == errno.EADDRNOTAVAIL:
            return "this machine has no such address; --host 0.0.0.0 takes all it has"
        return (error.strerror or type(error).__name__).lower()
    return None
