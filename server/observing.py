"""Who is told of every call that is over: metrics, traces, the log, and what operators see."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.call_log import Refusals, log_call
from server.metrics import Metrics
from server.recent import Recent
from server.records import Observer
from server.snapshot import WorkerSnapshot
from server.traces import Traces


class Observing:
    """The observers of one server.

    Attributes:
        metrics: what Prometheus reads.
        recent: the calls of the last minutes.
    """

    def __init__(
        self,
        snapshot: Callable[[], WorkerSnapshot | None],
        traces: str | None = None,
        trace_share: float = 1.0,
    ) -> None:
        """Takes where the worker's state is asked for, and where traces go, if anywhere.

        Args:
            snapshot: the worker's state; None until there is a worker.
            traces: an OTLP collector's URL; see `server.traces.Traces.to`.
            trace_share: likewise.
        """
        self.metrics = Metrics(snapshot)
        self.recent = Recent(time.monotonic)
        self._refusals = Refusals(time.monotonic)
        self._traces = None if traces is None else Traces.to(traces, trace_share)

    @property
    def observers(self) -> list[Observer]:
        """In the order in which they are told: traces name what the log says then."""
        first = [] if self._traces is None else [self._traces.observe]
        return [*first, self.metrics.observe, self.recent.observe, log_call]

    def refused(self, where: str, code: str, token: str) -> None:
        """Counts and logs a call that was not let in; `server.rights.Gate` tells of it."""
        self.metrics.refused(where, code)
        self._refusals.log(where, code, token)

    def close(self) -> None:
        """Sends what is left of traces; takes some seconds at most."""
        if self._traces is not None:
            self._traces.close()
