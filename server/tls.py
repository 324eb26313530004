"""What the server is known by: certificate and key, read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from server.file_marks import Mark, mark

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class TlsFileError(ValueError):
    """A certificate or key cannot be used."""


@dataclass(frozen=True)
class TlsFiles:
    """Files in PEM.

    Attributes:
        certificate: the server's, with those that lead to its root.
        key: its private key.
        client_roots: whoever connects has to show a certificate that one of these signed (mutual
            TLS); None asks for none.
    """

    certificate: Path
    key: Path
    client_roots: Path | None = None

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate and roots.

        Raises:
            TlsFileError: one cannot be read, or key and certificate do not belong together.
        """
        return self._read()[1]

    def context(self) -> ssl.SSLContext:
        """What Python's own TLS takes.

        Raises:
            TlsFileError: as `read`.
        """
        return self._read()[0]

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes, bytes | None]]:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            roots = None
            if self.client_roots is not None:
                roots = self.client_roots.read_bytes()
                context.load_verify_locations(cadata=roots.decode())
                context.verify_mode = ssl.CERT_REQUIRED
            return context, (self.key.read_bytes(), self.certificate.read_bytes(), roots)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None)
            raise TlsFileError(
                f"certificate and key cannot be used: {why or 'not PEM'}; expected PEM files that "
                "belong together, the key without a password"
            ) from None


def _no_password(*_: Any) -> str:
    return ""


class Watched:
    """Files, and whether they have changed."""

    def __init__(self, files: TlsFiles) -> None:
        """Looks at them a first time."""
        self.files = files
        self._marks = self._look()

    def changed(self) -> bool:
        """Whether one has since it was asked the last time."""
        before, self._marks = self._marks, self._look()
        return before != self._marks

    def _look(self) -> list[Mark | None]:
        files = self.files
        paths = (files.certificate, files.key, files.client_roots)
        return [None if path is None else mark(path) for path in paths]


class Credentials:
    """A gRPC server's credentials, which follow the files."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            TlsFileError: they cannot be used.
        """
        self._watched = Watched(files)
        self._lock = threading.Lock()
        self._first = self._configuration()

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port of a gRPC server; each new connection sees the newest files."""
        mutual = self._watched.files.client_roots is not None
        return grpc.dynamic_ssl_server_credentials(
            self._first, self._changed, require_client_authentication=mutual
        )

    def _configuration(self) -> Any:
        key, certificate, roots = self._watched.files.read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], roots)

    def _changed(self) -> Any:
        """The new configuration, None while nothing has changed or what has cannot be used."""
        with self._lock:
            if not self._watched.changed():
                return None
            try:
                return self._configuration()
            except TlsFileError as error:
                _log.error("the certificate stays as it was: %s", error)
                return None


class Following(ssl.SSLContext):
    """A server's context that has every new connection use the newest files.

    A root that has been loaded cannot be taken out of a context again, nor a session be forgotten
    that a client could go on with. So each change makes another context.
    """

    _current: ssl.SSLContext

    @classmethod
    def of(cls, files: TlsFiles) -> Self:
        """Reads the files.

        Raises:
            TlsFileError: they cannot be used.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._current = files.context()
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """What asyncio speaks TLS with over one connection."""
        return self._current.wrap_bio(*args, **options)

    async def follow(self, files: TlsFiles) -> None:
        """Looks whether the files change; never ends by itself."""
        watched = Watched(files)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)  # files tell nobody that they have changed
            if watched.changed():
                try:
                    self._current = files.context()
                except TlsFileError as error:
                    _log.error("the certificate stays as it was: %s", error)
