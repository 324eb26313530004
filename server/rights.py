"""Which right each gRPC method asks for, and who has it. What is not named is refused to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from server import status
from server.auth import ANYBODY, OPERATOR, Identity, NotAuthenticated, Right, Tokens
from server.health import GENERATE, OPERATIONS, VARIANTS

# Anybody may ask whether the server lives.
PUBLIC = None
# Of a method that nobody thought of.
_NOBODYS = "none"

METHODS: Mapping[str, Right | None] = MappingProxyType(
    {
        f"/{GENERATE}/Generate": Right.generate,
        f"/{VARIANTS}/ListVariants": Right.list,
        f"/{VARIANTS}/GetVariant": Right.list,
        f"/{VARIANTS}/LoadVariant": Right.operate,
        f"/{VARIANTS}/UnloadVariant": Right.operate,
        f"/{VARIANTS}/PinVariant": Right.operate,
        f"/{OPERATIONS}/GetStatus": Right.observe,
        f"/{OPERATIONS}/CaptureProfile": Right.operate,
        f"/{health.SERVICE_NAME}/Check": PUBLIC,
        f"/{health.SERVICE_NAME}/Watch": PUBLIC,
        f"/{health.SERVICE_NAME}/List": Right.list,
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Right.list,
    }
)

_BEARER = "bearer "


class Gate:
    """Who may come in, by gRPC or HTTP."""

    def __init__(self, tokens: Tokens | None, *, operators: bool) -> None:
        """Takes who is known.

        Args:
            tokens: None lets anybody in.
            operators: whether anybody may operate then.
        """
        self._tokens = tokens
        self._anybody = OPERATOR if operators else ANYBODY

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """Who calls a gRPC method of this full name, as `server.status.Authorize`.

        Raises:
            StatusError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        given = [value for key, value in metadata if key == "authorization"]
        return self.enter(METHODS.get(method, _NOBODYS), given)

    def enter(self, right: Right | str | None, given: Sequence[str | bytes]) -> Identity:
        """Who asks for a right.

        Args:
            right: None is for what anybody may do.
            given: the request's Authorization headers; two are none.

        Raises:
            StatusError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        if self._tokens is None:
            identity = self._anybody
        elif right is PUBLIC and not given:
            identity = Identity()
        else:
            header = given[0] if len(given) == 1 and isinstance(given[0], str) else None
            identity = identify(self._tokens, header)
        if right is not None and not (isinstance(right, Right) and identity.may(right)):
            known = self._tokens is not None
            remedy = "ask for a token that has it" if known else "the server needs --operators"
            raise status.permission_denied(f"this asks for the right {right}; {remedy}")
        return identity


def identify(tokens: Tokens, header: str | None) -> Identity:
    """The caller by its Authorization header.

    Raises:
        StatusError: UNAUTHENTICATED.
    """
    if header is None or not header.lower().startswith(_BEARER):
        raise status.unauthenticated("give a token, as the header `authorization: Bearer TOKEN`")
    try:
        return tokens.identify(header[len(_BEARER) :].strip())
    except NotAuthenticated as error:
        raise status.unauthenticated(str(error)) from None
