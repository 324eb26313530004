"""What Prometheus reads: every request as it ended, and the worker as it is now.

Beside our own names stand those that Kubernetes' gateway inference extension asks a model server
for (its protocol takes vLLM's), so that it routes by queue, cache and variants without an adapter.
Labels hold names of models alone, at most `MOST_MODELS` of them; later ones count as "other".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from server.records import CallRecord
from server.snapshot import VariantStatus, WorkerSnapshot

MOST_MODELS = 200
CONTENT_TYPE = CONTENT_TYPE_LATEST
_OTHER = "other"

# Seconds. Of first tokens and waits, and of single tokens.
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The metrics of one server; `observe` is an observer of its calls, on its event loop."""

    def __init__(self, snapshot: Callable[[], WorkerSnapshot | None]) -> None:
        """Takes where the worker's state is asked for; None until there is one."""
        self._registry = CollectorRegistry()
        self._models: set[str] = set()
        self._requests = self._counter("requests", "Requests by how they ended", "model", "code")
        self._refused = self._counter("refused_calls", "Calls not let in", "method", "code")
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts", "model")
        self._cached = self._counter(
            "cached_prompt_tokens", "Of these, those that another request had read", "model"
        )
        self._answers = self._counter("answer_tokens", "Tokens of answers", "model")
        self._hits = self._counter(
            "variant_hits", "Answers whose variant was in memory when they came", "model"
        )
        self._misses = self._counter("variant_misses", "Answers that waited for theirs", "model")
        self._ttft = self._times("time_to_first_token", "From arrival to the first token", _LONG)
        self._queued = self._times("queue", "Waiting for a row", _LONG)
        self._loading = self._times("variant_load_wait", "Waiting for the variant", _LONG)
        self._tpot = self._times("time_per_output_token", "A token after the first", _SHORT)
        self._itl = self._times("inter_token", "Between two messages of tokens", _SHORT)
        self._registry.register(_State(snapshot))

    def text(self) -> bytes:
        """All of it in Prometheus' own format, whose type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def refused(self, where: str, code: str) -> None:
        """Counts a call of a method or route that was not let in."""
        self._refused.labels(where, code).inc()

    def observe(self, record: CallRecord) -> None:
        """Counts a call that is over."""
        model = self._label(record.model)
        self._requests.labels(model, record.code).inc()
        self._prompts.labels(model).inc(record.prompt_tokens)
        self._answers.labels(model).inc(record.answer_tokens)
        for finish in record.finishes:
            self._cached.labels(model).inc(finish.cached_tokens)
            timings = finish.timings
            self._ttft.labels(model).observe(timings.first_token_s)
            self._queued.labels(model).observe(timings.queued_s)
            self._loading.labels(model).observe(timings.load_s)
            (self._misses if timings.load_s > 0 else self._hits).labels(model).inc()
        self._tokens(record, model)

    def _tokens(self, record: CallRecord, model: str) -> None:
        """The times between a single answer's tokens."""
        if record.samples != 1 or len(record.pieces) < 2:
            return
        first, last = record.pieces[0], record.pieces[-1]
        later = record.answer_tokens - first[1]
        if later > 0:
            self._tpot.labels(model).observe((last[0] - first[0]) / later)
        for (before, _), (after, _) in zip(record.pieces, record.pieces[1:], strict=False):
            self._itl.labels(model).observe(after - before)

    def _label(self, model: str) -> str:
        """The model's name, of the first ones that were seen; "" where none was found."""
        if model in self._models or not model:
            return model
        if len(self._models) >= MOST_MODELS:
            return _OTHER
        self._models.add(model)
        return model

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"zen_{name}", text, labels, registry=self._registry)

    def _times(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"zen_{name}_seconds"
        return Histogram(name, text, ("model",), registry=self._registry, buckets=buckets)


class _State(Collector):
    """The worker's state, asked for when it is read."""

    def __init__(self, snapshot: Callable[[], WorkerSnapshot | None]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Any]:
        """Nothing: the names are known once there is a worker."""
        return []

    def collect(self) -> Iterator[Any]:
        seen = self._snapshot()
        yield GaugeMetricFamily("zen_ready", "Whether the engine serves", _flag(seen))
        if seen is None:
            return
        yield from _rows_and_pages(seen)
        yield from _variants(seen)
        yield from _gateway(seen)


def _flag(seen: WorkerSnapshot | None) -> float:
    return float(seen is not None and seen.alive)


def _rows_and_pages(seen: WorkerSnapshot) -> Iterator[Any]:
    gauge = GaugeMetricFamily
    yield gauge("zen_rows", "Requests that can run at once", seen.rows)
    yield gauge("zen_rows_in_use", "Requests that run", seen.rows_in_use)
    yield gauge("zen_requests_waiting", "Requests that wait for a row", seen.waiting)
    yield CounterMetricFamily("zen_rows_lost", "Rows taken by another", seen.rows_lost)
    yield CounterMetricFamily("zen_compiles", "Programs compiled, at the start too", seen.compiles)
    yield gauge("zen_host_share", "Of a round, what is not waiting for the device", seen.host_share)
    if seen.step_s < float("inf"):
        yield gauge("zen_step_seconds", "A decode step, of late", seen.step_s)
    pages = gauge("zen_pages", "Pages of keys and values", labels=["state"])
    pages.add_metric(["held"], seen.pages_held)
    pages.add_metric(["kept"], seen.pages_kept)
    pages.add_metric(["free"], seen.pages - seen.pages_held - seen.pages_kept)
    yield pages


def _variants(seen: WorkerSnapshot) -> Iterator[Any]:
    gauge = GaugeMetricFamily
    resident = sum(status.slot is not None for status in seen.variants)
    yield gauge("zen_slots", "Variants that can be in device memory", seen.slots)
    yield gauge("zen_slots_used", "Variants that are", resident)
    yield CounterMetricFamily("zen_variant_loads", "Loads that were begun", seen.loads)
    yield CounterMetricFamily("zen_variant_evictions", "Slots given up", seen.evictions)
    yield gauge("zen_host_bytes", "Host memory of variants and loads", seen.host_used)
    in_use = gauge("zen_variant_requests", "Requests that use a variant", labels=["model"])
    by_name: dict[str, int] = {}  # several versions of a name may be there at a time
    for status in seen.variants:
        name = status.variant.name
        by_name[name] = by_name.get(name, 0) + status.leases + status.waiting
    for name in list(by_name)[:MOST_MODELS]:
        in_use.add_metric([name], by_name[name])
    yield in_use


def _gateway(seen: WorkerSnapshot) -> Iterator[Any]:
    """As the gateway inference extension's model server protocol names them."""
    gauge = GaugeMetricFamily
    yield gauge("vllm:num_requests_running", "Requests that run", seen.rows_in_use)
    yield gauge("vllm:num_requests_waiting", "Requests that wait", seen.waiting)
    used = seen.pages_held / seen.pages if seen.pages else 0.0
    yield gauge("vllm:kv_cache_usage_perc", "Share of pages in use", used)
    adapters = gauge(
        "vllm:lora_requests_info",
        "Variants in use and waited for; the value is when",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    running = _names(seen, lambda status: status.slot is not None and status.leases > 0)
    waiting = _names(seen, lambda status: status.waiting > 0)
    adapters.add_metric([str(seen.slots), running, waiting], time.time())
    yield adapters


def _names(seen: WorkerSnapshot, wanted: Callable[[VariantStatus], bool]) -> str:
    names = {status.variant.name for status in seen.variants if wanted(status)}
    return ",".join(sorted(names)[:MOST_MODELS])
