"""The benchmarks' figures: what is reported, and that ratios and bounds are worked out right."""

import math

import jax
import numpy as np
import pytest

from pallas_kernels.bitdelta_matmul import reference
from zen_jax import benchmark
from zen_jax.benchmark import bench_linear


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(benchmark, "_WORKING_SET", 1 << 16)
    monkeypatch.setattr(benchmark, "_PROGRAM", 1 << 14)
    return bench_linear([(48, 32)], [1, 4], [1, 4], repeats=2, activations=["float32"])


def test_every_case_has_its_ratios_and_its_bound(figures: dict) -> None:
    cases = figures["cases"]
    assert [(c["rows"], c["variants"]) for c in cases] == [(1, 1), (4, 1), (4, 4)]
    for case in cases:
        assert (case["d_out"], case["d_in"], case["impl"]) == (48, 32, "cpu")
        assert all(v is None or not isinstance(v, float) or v > 0 for v in case.values())
        assert case["fused_over_base"] == case["fused_ms"] / case["base_ms"]
        assert case["fused_over_unrounded"] == case["fused_ms"] / case["unrounded_base_ms"]
        assert case["unrounded_base_ms"] >= case["base_ms"]
        assert case["speedup_over_naive"] == case["naive_ms"] / case["fused_ms"]
        read = 48 * 32 * 2 + case["variants"] * (48 * 4 + 48 * 4)
        assert case["gb_per_s"] == pytest.approx(read / case["fused_ms"] / 1e6)
    one, _, four = cases
    assert one["bound"] == 1.0625 and math.isclose(four["bound"], 3.2)
    assert one["fraction_of_bound"] == one["bound"] / one["fused_over_base"]
    assert four["fraction_of_bound"] == four["speedup_over_naive"] / four["bound"]
    assert one["speedup_over_unpack"] == one["unpack_matmul_ms"] / one["fused_ms"]
    assert four["unpack_matmul_ms"] is None and four["speedup_over_unpack"] is None
    assert one["base_impl"] in ("ours", "XLA bfloat16", "XLA float32")
    assert set(figures["versions"]) == {"zen-jax", "jax", "jaxlib"}


def test_rows_of_both_types_are_measured_and_a_rounding_base_is_told_apart(monkeypatch) -> None:
    times = {"XLA bfloat16": 1.0, "XLA float32": 3.0, "ours": 2.0, "fused": 4.0, "naive": 4.0}
    monkeypatch.setattr(benchmark, "_WORKING_SET", 1 << 12)
    monkeypatch.setattr(benchmark, "_PROGRAM", 1 << 12)
    monkeypatch.setattr(
        benchmark, "_medians", lambda ways, repeats: [*times.values(), 5.0][: len(ways)]
    )
    wide, narrow = bench_linear([(24, 40)], [2], [1], repeats=1)["cases"]
    assert (wide["activations"], narrow["activations"]) == ("float32", "bfloat16")
    assert (wide["fused_over_base"], wide["fused_over_unrounded"]) == (4.0, 2.0)
    assert (narrow["fused_over_base"], narrow["fused_over_unrounded"]) == (4.0, 4.0)
    assert wide["base_impl"] == narrow["base_impl"] == "XLA bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(8, 8)], [1], [2]), "more variants than rows"),
        (([(8, 0)], [1], [1]), "1 or more"),
        (([(8, 8)], [0], [1]), "1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_linear(*arguments)


def test_many_rows_are_a_prompt_and_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way computes the product that it is timed for, the last weight's."""
    monkeypatch.setattr(benchmark, "_WORKING_SET", 1 << 12)
    monkeypatch.setattr(benchmark, "_PROGRAM", 1 << 12)
    for rows, count in ((4, 4), (130, 1), (130, 2)):
        data = benchmark._Data.make(24, 40, rows, count, "float32")
        args = (data.x, data.weights[0][-1], data.banks[0][-1], data.slots)
        want = np.asarray(reference.bitdelta_matmul_mixed(*args))
        assert np.linalg.norm(np.asarray(benchmark._fused(*args)) - want) < 1e-3 * np.linalg.norm(
            want
        )
        got = benchmark._in_turn(benchmark._fused)(*args[::3], data.weights[0], data.banks[0])
        assert np.array_equal(got, jax.jit(benchmark._fused)(*args))
        naive = np.asarray(benchmark._naive(*args))
        assert np.linalg.norm(naive - want[count - 1 :: count]) < 1e-3 * np.linalg.norm(naive)
    with pytest.raises(ValueError, match="'int8'"):
        bench_linear([(8, 8)], [1], [1], activations=["int8"])
