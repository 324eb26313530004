"""OperationService: how the server does, for whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from server import status
from server.call_log import log_operator
from server.profiles import MOST_S, Profiles, ProfileUnderWay
from server.recent import Quantiles, Recent, Summary
from server.snapshot import VariantStatus, WorkerSnapshot
from server.status import Violation
from zen.v1 import operations_pb2 as pb
from zen.v1 import operations_pb2_grpc
from zen_jax.checkpoint.manifest import BASE

_PROFILE_S = 5.0


class OperationService(operations_pb2_grpc.OperationServiceServicer):
    """The servicer of zen.v1.OperationService. It belongs to the event loop it is served from."""

    def __init__(
        self,
        snapshot: Callable[[], WorkerSnapshot | None],
        recent: Recent,
        profiles: Profiles | None,
    ) -> None:
        """Takes what it tells of.

        Args:
            snapshot: the worker's state; None until there is a worker.
            recent: the calls of late.
            profiles: where recordings are put; None makes none.
        """
        self._snapshot, self._recent, self._profiles = snapshot, recent, profiles

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusResponse:
        """Tells the server's state."""
        seen = self._snapshot()
        if seen is None:
            raise status.unavailable("the server is starting")
        return told(seen, self._recent.summary(), self._recent.uptime_s)

    async def CaptureProfile(
        self, request: pb.CaptureProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.CaptureProfileResponse:
        """Records for a while."""
        seconds = _PROFILE_S
        if request.HasField("duration"):
            seconds = request.duration.seconds + request.duration.nanos / 1e9
        if not 0 < seconds <= MOST_S:
            text = f"is {seconds:g} s; expected more than 0 and at most {MOST_S:g}"
            raise status.invalid_argument([Violation("duration", text)])
        if self._profiles is None:
            text = "the server has no folder for profiles; it has to be started with --profiles"
            raise status.failed_precondition("NO_PROFILES", "profiles", text)
        log_operator(f"profile {seconds:g} s")
        try:
            name, size = await self._profiles.capture(seconds)
        except ProfileUnderWay as error:
            raise status.resource_exhausted(str(error), MOST_S) from None
        return pb.CaptureProfileResponse(name=name, bytes=size)


def told(seen: WorkerSnapshot, recent: Summary, uptime_s: float) -> pb.GetStatusResponse:
    """The server's state on the wire."""
    base = pb.ModelStatus(name=BASE, state="resident", **_times(recent.ttft_by_model.get(BASE)))
    variants = sorted(seen.variants, key=lambda v: (v.variant.name, -v.variant.version))
    return pb.GetStatusResponse(
        rows=seen.rows,
        rows_in_use=seen.rows_in_use,
        waiting=seen.waiting,
        pages=seen.pages,
        pages_held=seen.pages_held,
        pages_kept=seen.pages_kept,
        slots=seen.slots,
        step=_duration(seen.step_s) if seen.step_s < inf else None,
        loads=seen.loads,
        evictions=seen.evictions,
        rows_lost=seen.rows_lost,
        compiles=seen.compiles,
        host_bytes=seen.host_used,
        host_budget=int(min(seen.host_budget, 2**63)),
        uptime=_duration(uptime_s),
        recent=_recent(recent),
        models=[base, *_models(variants, recent)],
    )


def _recent(recent: Summary) -> pb.Recent:
    return pb.Recent(
        window=_duration(recent.window_s),
        finished=recent.finished,
        failed=recent.failed,
        prompt_tokens_per_s=recent.prompt_tokens_per_s,
        answer_tokens_per_s=recent.answer_tokens_per_s,
        **_times(recent.ttft),
        **_times(recent.tpot, "tpot"),
    )


def _models(variants: list[VariantStatus], recent: Summary) -> Iterator[pb.ModelStatus]:
    for seen in variants:
        yield pb.ModelStatus(
            name=seen.variant.name,
            version=seen.variant.version,
            state=seen.state,
            slot=seen.slot,
            pinned=seen.pinned,
            kept=seen.kept,
            leases=seen.leases,
            waiting=seen.waiting,
            requests_per_s=seen.rate,
            bytes=seen.bytes,
            **_times(recent.ttft_by_model.get(seen.variant.name)),
        )


def _times(of: Quantiles | None, name: str = "ttft") -> dict[str, Any]:
    if of is None:
        return {}
    return {f"{name}_p50": _duration(of.p50), f"{name}_p99": _duration(of.p99)}


def _duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(1e9 * seconds))
    return made
