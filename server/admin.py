"""VariantService: what operators see of the variants, and ask of them.

Listing needs the store alone and works while the engine is still being made ready. Nothing here
passes through the bound of the inbox: an operator is never refused because the server is busy.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Protocol

import grpc

from server import status
from server.auth import caller
from server.call_log import log_operator
from server.intakes import Intakes, through
from server.requests import Draining, LoadRefused
from server.router import Hold, Router
from server.service import resolve
from server.snapshot import VariantStatus, WorkerSnapshot
from server.status import StatusError, Violation
from zen.v1 import variants_pb2 as pb
from zen.v1 import variants_pb2_grpc
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt
from zen_jax.checkpoint.store import Store

_STATES = {
    "absent": pb.VARIANT_STATE_ABSENT,
    "loading": pb.VARIANT_STATE_LOADING,
    "resident": pb.VARIANT_STATE_RESIDENT,
    "failed": pb.VARIANT_STATE_FAILED,
}


class AdminWorker(Protocol):
    """What this service asks of the worker; `server.worker.Worker` is one."""

    def load(self, variant: Variant) -> Future[None]: ...
    def unload(self, variant: Variant) -> Future[None]: ...
    def pin(self, variant: Variant, pinned: bool) -> Future[None]: ...
    def snapshot(self) -> WorkerSnapshot: ...


class VariantService(variants_pb2_grpc.VariantServiceServicer):
    """The servicer of zen.v1.VariantService. It belongs to the event loop that it is served from.

    Until `attach` is called every variant is absent, and what needs the worker is UNAVAILABLE.
    """

    def __init__(self, store: Store, router: Router, intakes: Intakes | None = None):
        """Takes the store to list, the router that names are looked up with, and what takes
        adapters into its pool, where the router knows of any."""
        self._store = store
        self._router = router
        self._intakes = intakes
        self._worker: AdminWorker | None = None

    def attach(self, worker: AdminWorker) -> None:
        """Asks `worker` from now on."""
        self._worker = worker

    async def ListVariants(
        self, request: pb.ListVariantsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListVariantsResponse:
        """Lists the newest version of every variant that the store or the worker has."""
        seen, identity = self._snapshot(), caller()
        variants = await asyncio.to_thread(_list, self._store, self._router, seen)
        variants = [variant for variant in variants if identity.may_use(variant.name)]
        if seen is None:
            return pb.ListVariantsResponse(variants=variants)
        return pb.ListVariantsResponse(
            variants=variants,
            slots=seen.slots,
            rows=seen.rows,
            rows_active=seen.rows_in_use,
            host_bytes=seen.host_used,
            host_budget=int(min(seen.host_budget, 2**63)),
            loads=seen.loads,
        )

    async def GetVariant(
        self, request: pb.GetVariantRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetVariantResponse:
        """Describes one variant."""
        variant = await self._find(request.name, known=True)
        return pb.GetVariantResponse(variant=self._describe(variant))

    async def LoadVariant(
        self, request: pb.LoadVariantRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadVariantResponse:
        """Loads a variant, and answers when it is resident."""
        with closing(Hold()) as hold:
            variant = await self._find(request.name, hold=hold)
            await self._ask("load", variant, lambda worker: worker.load(variant))
        return pb.LoadVariantResponse(variant=self._describe(variant))

    async def UnloadVariant(
        self, request: pb.UnloadVariantRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadVariantResponse:
        """Unloads a variant in all versions, and answers when nothing uses it any more."""
        variant = await self._find(request.name, known=True)
        await self._ask("unload", variant, lambda worker: worker.unload(variant))
        return pb.UnloadVariantResponse(variant=self._describe(variant))

    async def PinVariant(
        self, request: pb.PinVariantRequest, context: grpc.aio.ServicerContext
    ) -> pb.PinVariantResponse:
        """Pins a variant, or lets all its versions go."""
        what = "pin" if request.pinned else "unpin"
        with closing(Hold()) as hold:
            own = hold if request.pinned else None
            variant = await self._find(request.name, known=not request.pinned, hold=own)
            await self._ask(what, variant, lambda worker: worker.pin(variant, request.pinned))
        return pb.PinVariantResponse(variant=self._describe(variant))

    async def _find(self, name: str, *, known: bool = False, hold: Hold | None = None) -> Variant:
        """The store's newest version; if `known`, else the newest that the worker knows. To be
        held, an adapter is taken into its pool first."""

        async def found(waited_s: float) -> Variant | None:
            return await asyncio.to_thread(resolve, self._router, name, "name", caller(), hold)

        try:
            variant = await through(self._intakes, found)
        except StatusError:  # deleted or damaged; what is in memory can be seen and let go
            allowed = known and caller().may_use(name)
            versions = _versions(self._snapshot(), name) if allowed else []
            if not versions:
                raise
            variant = _newest(versions)
        if variant is None:
            text = f"is {name!r}, which is always in memory and no variant"
            raise status.invalid_argument([Violation("name", text)])
        return variant

    async def _ask(
        self, name: str, variant: Variant, what: Callable[[AdminWorker], Future[None]]
    ) -> None:
        """Waits for what the worker is asked; one that is cancelled changes nothing for others."""
        if self._worker is None:
            raise status.unavailable("the server is starting")
        log_operator(f"{name} {variant.name}")
        try:
            answer: Awaitable[None] = asyncio.wrap_future(what(self._worker))
            await answer
        except LoadRefused as error:
            raise status.of_failure(
                error.kind, error.message, error.retry_after_s, variant.name
            ) from None
        except Draining as error:
            raise status.unavailable(str(error)) from None

    def _describe(self, variant: Variant) -> pb.Variant:
        return describe(variant, _versions(self._snapshot(), variant.name))

    def _snapshot(self) -> WorkerSnapshot | None:
        return None if self._worker is None else self._worker.snapshot()


def describe(variant: Variant, versions: Sequence[VariantStatus]) -> pb.Variant:
    """A variant on the wire.

    Args:
        variant: whose place is told; absent if the worker does not know it.
        versions: all that the worker knows by that name, whose requests and bytes are added up.
    """
    own = next((s for s in versions if s.variant.digest == variant.digest), None)
    return pb.Variant(
        name=variant.name,
        version=variant.version,
        digest=variant.digest,
        state=_STATES["absent" if own is None else own.state],
        slot=None if own is None else own.slot,
        failure=None if own is None else own.failure,
        **_held(versions),
    )


def _held(versions: Sequence[VariantStatus]) -> dict[str, Any]:
    return {
        "pinned": any(s.pinned for s in versions),
        "leases": sum(s.leases for s in versions),
        "waiting": sum(s.waiting for s in versions),
        "bytes": sum(s.bytes for s in versions),
        "kept": any(s.kept for s in versions),
        "requests_per_s": sum(s.rate for s in versions),
        "host_bytes": sum(s.host_bytes for s in versions),
    }


def _list(store: Store, router: Router, seen: WorkerSnapshot | None) -> list[pb.Variant]:
    """Every variant; a damaged one is listed as failed and hides no other."""
    variants = []
    in_memory = () if seen is None else (s.variant.name for s in seen.variants)
    for name in sorted({*store.names(), *in_memory}):
        versions = _versions(seen, name)
        try:
            variant = router.resolve(name)
        except VariantCorrupt as error:
            failure = {"state": pb.VARIANT_STATE_FAILED, "failure": str(error)}
            variants.append(pb.Variant(name=name, **failure, **_held(versions)))
            continue
        except ValueError:  # deleted; it may be in memory all the same
            variant = _newest(versions) if versions else None
        if variant is not None:
            variants.append(describe(variant, versions))
    return variants


def _versions(seen: WorkerSnapshot | None, name: str) -> list[VariantStatus]:
    """What the worker knows of a name."""
    return [] if seen is None else [s for s in seen.variants if s.variant.name == name]


def _newest(versions: Sequence[VariantStatus]) -> Variant:
    return max((s.variant for s in versions), key=lambda variant: variant.version)
