"""Which right each gRPC method asks for, and who has it. What is not named is refused to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from server import status
from server.auth import ANYBODY, OPERATOR, Identity, NotAuthenticated, Right, Tokens
from server.health import GENERATE, OPERATIONS, VARIANTS
from server.status import StatusError

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

    def __init__(
        self,
        tokens: Tokens | None,
        *,
        operators: bool,
        refused: Callable[[str, str, str], None] = lambda where, code, token: None,
    ) -> None:
        """Takes who is known.

        Args:
            tokens: None lets anybody in.
            operators: whether anybody may operate then.
            refused: told of each call that is not let in: the method or route, the status code's
                name, and the id of the token, "" if none is known.
        """
        self._refused = refused
        self._tokens = tokens
        self._anybody = OPERATOR if operators else ANYBODY

    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """Who calls a gRPC method of this full name, as `server.status.Authorize`.

        Raises:
            StatusError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        given = [value for key, value in metadata if key == "authorization"]
        return self.enter(METHODS.get(method, _NOBODYS), given, method)

    def enter(
        self, right: Right | str | None, given: Sequence[str | bytes], where: str
    ) -> Identity:
        """Who asks for a right.

        Args:
            right: None is for what anybody may do.
            given: the request's Authorization headers; two are none.
            where: the method or route that is asked for.

        Raises:
            StatusError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        try:
            identity = self._identity(right, given)
        except StatusError:
            self._refused(where, "UNAUTHENTICATED", "")
            raise
        if right is not None and not (isinstance(right, Right) and identity.may(right)):
            self._refused(where, "PERMISSION_DENIED", identity.token)
            known = self._tokens is not None
            remedy = "ask for a token that has it" if known else "the server needs --operators"
            raise status.permission_denied(f"this asks for the right {right}; {remedy}")
        return identity

    def _identity(self, right: Right | str | None, given: Sequence[str | bytes]) -> Identity:
        if self._tokens is None:
            return self._anybody
        if right is PUBLIC and not given:
            return Identity()
        header = given[0] if len(given) == 1 and isinstance(given[0], str) else None
        return identify(self._tokens, header)


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
