"""The figures of `zen bench access`, by hand."""

import numpy as np
import pytest

from server.benchmark_access import AccessPlan, _figures, _ratios


def test_ratios_are_of_medians_and_have_an_interval():
    plain = np.stack([np.arange(1.0, 102.0), np.full(101, 2.0)], -1)
    guarded = plain * [1.5, 1.01]
    found = _ratios(np.stack([plain, guarded], 1))
    assert found["ttft"] == pytest.approx(1.5) and found["tpot"] == pytest.approx(1.01)
    # Drawn in pairs: what both have in common does not widen it.
    assert found["ttft_low"] == pytest.approx(1.5) and found["ttft_high"] == pytest.approx(1.5)


def test_an_interval_is_as_wide_as_what_differs():
    rng = np.random.default_rng(0)
    times = 1 + 0.1 * rng.standard_normal((400, 2, 2))
    found = _ratios(times)
    for name in ("ttft", "tpot"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
        width = found[f"{name}_high"] - found[f"{name}_low"]
        # Of a ratio of two medians of 400: 2 x 1.96 x 0.1 x sqrt(pi / 2 / 400) x sqrt(2) = 0.035.
        assert width == pytest.approx(0.035, rel=0.4)


def test_figures_are_in_milliseconds():
    times = np.stack([np.linspace(0, 1, 101), np.linspace(0, 0.1, 101)], -1)
    expected = {"ttft_p50_ms": 500, "ttft_p99_ms": 990, "tpot_p50_ms": 50, "tpot_p99_ms": 99}
    assert _figures(times) == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [{"requests": 1}, {"prompt_tokens": 0}, {"answer_tokens": 1}])
def test_a_plan_is_checked(wrong):
    with pytest.raises(ValueError, match="expected at least"):
        AccessPlan(**wrong)
