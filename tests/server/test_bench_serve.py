"""The load generator and its figures, worked out by hand and against a server."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.app import running
from server.benchmark_serve import ServePlan, bench_serve, summary
from server.load_generator import Outcome, Run, Traffic
from server.serve_options import ServeOptions
from zen_jax.checkpoint.store import Store


def traffic(**settings: Any) -> Traffic:
    defaults = {"zipf": 1.0, "base_share": 0.25, "vocab_size": 50, "prompt_tokens": 3}
    return Traffic(["base", "a", "b", "c"], **{**defaults, "answer_tokens": 8, **settings})


def test_zipfs_law_over_the_variants():
    assert traffic().shares() == pytest.approx(
        {"base": 0.25, "a": 0.75 * 6 / 11, "b": 0.75 * 3 / 11, "c": 0.75 * 2 / 11}
    )
    assert set(traffic(zipf=0.0, base_share=0.0).shares().values()) == {0.0, 1 / 3}
    assert Traffic(["base"], 1.0, 0.1, 50, 3, 8).shares() == {"base": 1.0}


def test_requests_follow_the_shares_and_no_two_begin_alike():
    made = traffic().requests(np.random.default_rng(0))
    sample = [next(made) for _ in range(4000)]
    counts = Counter(request.model for request in sample)
    for name, share in traffic().shares().items():
        assert counts[name] / 4000 == pytest.approx(share, abs=0.03)
    lengths = [request.sampling.max_tokens for request in sample]
    assert (min(lengths), max(lengths)) == (4, 12)
    assert np.mean(lengths) == pytest.approx(8, abs=0.2)
    prompts = {tuple(request.token_ids.ids) for request in sample}
    assert len(prompts) > 3800 and all(len(prompt) == 3 for prompt in prompts)


def outcome(model: str, due: float, *at: float, code: str = "OK", ended: float = 0.0) -> Outcome:
    pieces = [(due + t, 1) for t in at]
    return Outcome(model, due, due, pieces, ended or due + max(at, default=0.01), code, True)


def test_the_figures_of_a_run():
    outcomes = [
        outcome("base", 0.0, 0.1, 0.2, 0.3),
        outcome("base", 1.0, 0.1, 0.2, 0.3),
        outcome("a", 2.0, 0.2, 0.4, 0.6),
        outcome("b", 3.0, 0.4, 0.6),  # too late
        outcome("b", 4.0, 0.1, 2.1),  # too slow
        outcome("a", 5.0, code="RESOURCE_EXHAUSTED", ended=5.02),
        outcome("a", 6.0, 0.1, code="UNAVAILABLE"),  # it had begun: that is no refusal
        outcome("a", 7.0, code="INTERNAL"),
    ]
    plan = ServePlan(rate=1.0, seconds=10.0, slo_ttft_ms=300, slo_tpot_ms=500)
    figures = summary(Run(outcomes, 10.0, 0.25), 0.8, plan)
    assert figures["goodput"] == pytest.approx(0.3)
    assert figures["completed"] == pytest.approx(0.5)
    assert (figures["refused"], figures["errors"]) == (1, {"INTERNAL": 1, "UNAVAILABLE": 1})
    assert figures["refused_p95_ms"] == pytest.approx(20)
    assert figures["refused_without_time"] == 0
    rows = {row["variant"]: row for row in figures["variants"]}
    assert list(rows) == ["base", "all variants", "a", "b"]
    assert rows["base"]["p50_ttft_ms"] == pytest.approx(100)
    assert rows["base"]["p50_tpot_ms"] == pytest.approx(100)
    assert rows["a"]["p50_over_base"] == pytest.approx(2)
    assert rows["b"]["p50_ttft_ms"] == pytest.approx(250)
    assert rows["b"]["p99_itl_ms"] == pytest.approx(1982)
    assert rows["all variants"]["requests"] == 3
    assert rows["all variants"]["tokens_per_s"] == pytest.approx(0.7)
    json.dumps(figures)


def test_a_run_without_answers_has_figures_too():
    figures = summary(Run([], 1.0, 0.0), 1.0, ServePlan(rate=1.0))
    assert (figures["variants"], figures["goodput"], figures["refused_p95_ms"]) == ([], 0, None)


@pytest.mark.parametrize(
    "settings",
    [{"rate": 0.0}, {"seconds": float("inf")}, {"rows": 0}, {"base_share": 2.0}, {"zipf": -1.0}],
)
def test_plans_that_cannot_be(settings: dict[str, Any]):
    with pytest.raises(ValueError, match="expected"):
        ServePlan(**settings)


@pytest.mark.usefixtures("compiled")
def test_a_server_under_load(tiny_store: Path):
    plan = ServePlan(seconds=0.5, prompt_tokens=8, answer_tokens=4, rows=2, inbox=1)
    told: list[str] = []
    with running(Store(tiny_store), ServeOptions(port=0, rows=2, inbox=1, max_length=64)) as server:
        figures = bench_serve(
            tiny_store, plan, server.address, lambda what, done, total: told.append(what)
        )
        with pytest.raises(ValueError, match="variants is 9; the store has 3"):
            bench_serve(tiny_store, ServePlan(variants=9), server.address)
        with pytest.raises(ValueError, match="do not fit; the model has 256"):
            bench_serve(tiny_store, ServePlan(prompt_tokens=250), server.address)
    assert [load["rate"] / figures["capacity"] for load in figures["loads"]] == [0.5, 1.0, 2.0]
    assert figures["rate"] == figures["capacity"] > 0
    assert "capacity" in told and len(set(told)) == 4
    for load in figures["loads"]:
        assert load["errors"] == {} and load["refused_without_time"] == 0
        answered = sum(
            row["requests"] for row in load["variants"] if row["variant"] != "all variants"
        )
        assert answered + load["refused"] == load["requests"]
    assert figures["loads"][2]["refused"] > 0, "three at once are all that fit"


@pytest.mark.soak
def test_memory_does_not_grow_in_ten_minutes_of_all_that_a_server_can_do(tiny_store: Path):
    """The server's own process, once every variant and every kind of request has been there."""
    settings: dict[str, Any] = {"prompt_tokens": 64, "answer_tokens": 32, "rows": 4}
    warm = ServePlan(seconds=60.0, **settings)
    capacity = bench_serve(tiny_store, warm)["capacity"]
    figures = bench_serve(
        tiny_store, ServePlan(rate=capacity, seconds=600.0, warm_s=60.0, **settings)
    )
    (load,) = figures["loads"]
    assert load["errors"] == {} and load["completed"] > 0
    assert load["rss_after"] <= 1.02 * load["rss_before"], load
