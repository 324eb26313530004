"""GET /v1/models: what can be asked."""

from typing import Any, Protocol

from server.auth import caller
from server.http.errors import no_model
from server.router import Router, UnknownModel
from server.service import damaged, resolve_for
from zen_jax.checkpoint.manifest import BASE, MANIFEST, Variant, VariantCorrupt


class Names(Protocol):
    """What is asked of the store."""

    def names(self) -> list[str]:
        """The variants that there are."""
        ...


class Models:
    """The base and its variants, as OpenAI lists models. Reads files: call it beside the loop."""

    def __init__(self, store: Names, router: Router) -> None:
        """Takes the store to list, and the router that names are looked up with."""
        self._store = store
        self._router = router

    def all(self) -> list[dict[str, Any]]:
        """The base first, then the newest version of each variant that is not damaged."""
        identity = caller()
        found = [_described(None)] if identity.may_use(BASE) else []
        for name in filter(identity.may_use, self._store.names()):
            try:
                found.append(_described(self._router.resolve(name)))
            except (UnknownModel, VariantCorrupt):  # deleted meanwhile, or to be repaired
                continue
        return found

    def one(self, name: str) -> dict[str, Any]:
        """The model of a name.

        Raises:
            HttpError: 404, there is none.
            StatusError: DATA_LOSS, it is damaged.
        """
        try:
            return _described(resolve_for(caller(), self._router, name))
        except UnknownModel as error:
            raise no_model(str(error)) from None
        except VariantCorrupt:
            raise damaged(name) from None


def _described(variant: Variant | None) -> dict[str, Any]:
    about: dict[str, Any] = {"id": BASE, "object": "model", "created": 0, "owned_by": "zen"}
    if variant is None:
        return about | {"parent": None}
    try:
        created = int((variant.path / MANIFEST).stat().st_mtime)
    except OSError:
        created = 0
    return about | {"id": variant.name, "created": created, "parent": BASE}
