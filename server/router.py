"""From the name that a client gives to the variant that answers, or why there is none."""

from __future__ import annotations

import re
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


class Router:
    """Looks names up in a store, each time anew: a version published meanwhile is found."""

    def __init__(self, store: Variants) -> None:
        """Take the store to look in."""
        self._store = store

    def resolve(self, model: str) -> Variant | None:
        """The variant of that name in its newest version, or None for the base.

        Raises UnknownModel, or InvalidModelName, which is one, before the store sees the name.
        """
        if model == BASE:
            return None
        if not can_be_name(model):
            raise InvalidModelName(model)
        try:
            return self._store.variant(model)
        except VariantNotFound:
            raise UnknownModel(model) from None


def can_be_name(model: str) -> bool:
    """Whether a variant can be called so, or the base is."""
    return _NAME.fullmatch(model) is not None
