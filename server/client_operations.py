"""A client for whoever runs a server: how it does, and recordings of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import grpc
from google.protobuf.duration_pb2 import Duration

from server.client import ZenError
from server.client_access import DEFAULT_ADDRESS, Access
from zen.v1 import operations_pb2 as pb
from zen.v1 import operations_pb2_grpc

_OPEN = Access()
# For an answer that needs no engine, in seconds; and beyond a recording, for writing it.
_TIMEOUT_S, _WRITING_S = 10.0, 60.0


class OperationsClient:
    """Asks one server; blocks, and asks once."""

    def __init__(self, address: str = DEFAULT_ADDRESS, access: Access = _OPEN) -> None:
        """Prepares for `address`, host:port.

        Raises:
            ValueError: no server can have this address, or `access` cannot be used.
        """
        self._channel, self._metadata = access.channel(address), access.metadata
        self._stub = operations_pb2_grpc.OperationServiceStub(self._channel)

    def status(self) -> pb.GetStatusResponse:
        """The server as it is now.

        Raises:
            ZenError: it refuses, or is not there.
        """
        with _errors():
            request = pb.GetStatusRequest()
            return self._stub.GetStatus(request, timeout=_TIMEOUT_S, metadata=self._metadata)

    def capture_profile(self, seconds: float) -> pb.CaptureProfileResponse:
        """Has the server record itself for so many seconds, and returns when that is written.

        Raises:
            ZenError: it refuses, or is not there.
            ValueError: `seconds` is no time that can be sent.
        """
        duration = Duration()
        try:
            duration.FromNanoseconds(round(1e9 * seconds))
        except (ValueError, OverflowError):
            raise ValueError(f"seconds is {seconds}; expected more than 0") from None
        request = pb.CaptureProfileRequest(duration=duration)
        with _errors():
            return self._stub.CaptureProfile(
                request, timeout=seconds + _WRITING_S, metadata=self._metadata
            )

    def close(self) -> None:
        """Drops the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise ZenError(error) from None
