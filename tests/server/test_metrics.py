"""What Prometheus reads, in numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import MOST_MODELS, Metrics
from server.records import CallRecord
from server.requests import Finish, Timings
from server.snapshot import VariantStatus, WorkerSnapshot
from zen_jax.checkpoint.manifest import Variant


def status(name: str, slot: int | None, leases: int, waiting: int) -> VariantStatus:
    variant = Variant(name, 1, f"digest-{name}", Path("/secret/store"))
    state = "loading" if slot is None else "resident"
    return VariantStatus(variant, state, slot, False, leases, waiting, 8, None, None)


SEEN = WorkerSnapshot(
    variants=(
        status("a", 0, 2, 0),
        status("b", None, 0, 3),
        status("c", 1, 0, 0),
        replace(status("a", None, 0, 4), variant=Variant("a", 2, "newer", Path("/secret/store"))),
    ),
    slots=4,
    host_used=100,
    host_budget=1000,
    loads=5,
    rows=8,
    rows_in_use=3,
    waiting=6,
    alive=True,
    step_s=0.02,
    host_share=0.1,
    compiles=7,
    pages=10,
    pages_held=4,
    pages_kept=1,
    rows_lost=2,
    evictions=9,
)


def read(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels; each series is there once."""
    found = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def record(model: str = "a", code: str = "OK", load_s: float = 0.0) -> CallRecord:
    timings = Timings(0.25, load_s, 0.25, 0.5 + load_s)
    return CallRecord(
        "secret-id",
        tenant="secret-tenant",
        model=model,
        prompt_tokens=7,
        samples=1,
        pieces=[(0.5, 1), (0.6, 2), (0.8, 1)],
        finishes=[Finish("stop", None, 7, 4, timings, None, 3)] if code == "OK" else [],
        code=code,
    )


def test_requests_are_counted_by_model_and_end():
    metrics = Metrics(lambda: None)
    metrics.observe(record())
    metrics.observe(record(load_s=1.0))
    metrics.observe(record("base", "CANCELLED"))
    metrics.observe(CallRecord("x", code="NOT_FOUND"))
    seen = read(metrics)
    a = (("model", "a"),)
    assert seen["zen_requests_total", (("code", "OK"), ("model", "a"))] == 2
    assert seen["zen_requests_total", (("code", "CANCELLED"), ("model", "base"))] == 1
    assert seen["zen_requests_total", (("code", "NOT_FOUND"), ("model", ""))] == 1
    assert seen["zen_prompt_tokens_total", a] == 14
    assert seen["zen_cached_prompt_tokens_total", a] == 6
    assert seen["zen_answer_tokens_total", a] == 8
    assert seen["zen_variant_hits_total", a] == seen["zen_variant_misses_total", a] == 1
    assert seen["zen_time_to_first_token_seconds_sum", a] == pytest.approx(2.0)
    assert seen["zen_variant_load_wait_seconds_sum", a] == pytest.approx(1.0)
    assert seen["zen_time_per_output_token_seconds_sum", a] == pytest.approx(0.2)
    assert seen["zen_inter_token_seconds_count", a] == 4
    assert seen["zen_inter_token_seconds_sum", a] == pytest.approx(0.6)
    assert seen["zen_ready", ()] == 0
    assert "secret" not in metrics.text().decode()


def test_the_worker_as_it_is():
    seen = read(Metrics(lambda: SEEN))
    expected = {
        "zen_ready": 1,
        "zen_rows": 8,
        "zen_rows_in_use": 3,
        "zen_requests_waiting": 6,
        "zen_slots": 4,
        "zen_slots_used": 2,
        "zen_variant_loads_total": 5,
        "zen_variant_evictions_total": 9,
        "zen_compiles_total": 7,
        "zen_rows_lost_total": 2,
        "zen_host_bytes": 100,
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 6,
        "vllm:kv_cache_usage_perc": 0.4,
    }
    for name, value in expected.items():
        assert seen[name, ()] == value, name
    assert [seen["zen_pages", (("state", s),)] for s in ("held", "kept", "free")] == [4, 1, 5]
    assert seen["zen_variant_requests", (("model", "b"),)] == 3
    assert seen["zen_variant_requests", (("model", "a"),)] == 6  # of two versions
    (labels,) = [labels for name, labels in seen if name == "vllm:lora_requests_info"]
    assert dict(labels) == {
        "max_lora": "4",
        "running_lora_adapters": "a",
        "waiting_lora_adapters": "a,b",
    }


def test_models_without_end_are_one():
    metrics = Metrics(lambda: None)
    for i in range(MOST_MODELS + 50):
        metrics.observe(record(f"m{i}"))
    seen = read(metrics)
    models = {dict(labels).get("model") for _, labels in seen if labels}
    assert len(models) == MOST_MODELS + 1
    assert seen["zen_requests_total", (("code", "OK"), ("model", "other"))] == 50
