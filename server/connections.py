"""How many connections each port takes, which is no more than there are file descriptors for."""

import logging
import resource

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 1000
# In which a connection has to have said who it is: TLS, or the first words of HTTP/2.
HANDSHAKE_S = 10.0
# For files of variants, sockets between threads, and what libraries open.
_OWN_DESCRIPTORS = 512


def raise_limit() -> None:
    """Takes as many file descriptors as this process may have, and says when they are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = most_connections()
    if most < MOST_CONNECTIONS:
        _log.warning(
            "%d files may be open: each port takes %d connections instead of %d (ulimit -n)",
            hard,
            most,
            MOST_CONNECTIONS,
        )


def most_connections() -> int:
    """Of each of two ports, so that none can use up the descriptors of the process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(16, (soft - _OWN_DESCRIPTORS) // 2))
