"""From the name that a client gives to the variant that answers, or why there is none."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from zen_jax.checkpoint.manifest import BASE, VariantNotFound

if TYPE_CHECKING:
    from zen_jax.checkpoint.manifest import Variant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_SHOWN = 128


class UnknownModel(ValueError):
    """No variant goes by the name that the client gave; it is never answered by the base."""

    def __init__(self, name: str, why: str = "") -> None:
        shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "..."
        why = why or f"VariantService.ListVariants gives the names there are, beside {BASE!r}"
        super().__init__(f"no model is called {shown!r}; {why}")
        self.name = name


class InvalidModelName(UnknownModel):
    """The name is one that no variant can have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            "names are 1 to 128 letters, digits, dots, underscores and hyphens, "
            "and begin with a letter or digit",
        )


class Variants(Protocol):
    """What the router asks of the store."""

    def variant(self, name: str) -> Variant:
        """The newest version; raises VariantNotFound."""
        ...


class Leases(Protocol):
    """What the router asks of a pool."""

    def leased(self, name: str) -> tuple[Variant, Callable[[], None]]:
        """The member that answers for a name, and what ends the lease on it.

        Raises VariantNotFound, or NotTakenIn of one that has to be taken in first.
        """
        ...


class Hold:
    """What a call keeps until it ends. A lease that comes later than that is let go at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._releases: list[Callable[[], None]] = []
        self._over = False

    def take(self, release: Callable[[], None]) -> None:
        """Holds one more lease; from any thread."""
        with self._lock:
            if not self._over:
                self._releases.append(release)
                return
        release()

    def close(self) -> None:
        """Lets all go, once each."""
        with self._lock:
            self._over = True
            releases, self._releases = self._releases, []
        for release in releases:
            release()


class Router:
    """Looks names up in a store, each time anew: a version published meanwhile is found."""

    def __init__(self, store: Variants, leases: Leases | None = None) -> None:
        """Take the store to look in, and who gives leases, if what is answered by needs one."""
        self._store = store
        self._leases = leases

    def resolve(self, model: str, hold: Hold | None = None) -> Variant | None:
        """The variant of that name in its newest version, or None for the base.

        With `hold`, it is there to be answered by until that is closed. Raises UnknownModel, or
        InvalidModelName, which is one, before the store sees the name; with `hold` NotTakenIn too.
        """
        if model == BASE:
            return None
        if not can_be_name(model):
            raise InvalidModelName(model)
        try:
            if hold is None or self._leases is None:
                return self._store.variant(model)
            variant, release = self._leases.leased(model)
        except VariantNotFound:
            raise UnknownModel(model) from None
        hold.take(release)
        return variant


def can_be_name(model: str) -> bool:
    """Whether a variant can be called so, or the base is."""
    return _NAME.fullmatch(model) is not None
