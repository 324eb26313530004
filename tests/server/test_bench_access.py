"""The figures of `zen bench access`, by hand."""

import numpy as np
import pytest

from server.benchmark_access import AccessPlan, _compared, _figures, _ratios


def test_ratios_are_of_medians_and_have_an_interval():
    plain = np.stack([np.arange(1.0, 102.0), np.full(101, 2.0)], -1)[:, None]
    found = _ratios(plain, plain * [1.5, 1.01])
    assert found["ttft"] == pytest.approx(1.5) and found["tpot"] == pytest.approx(1.01)
    # Drawn in rounds: what both have in common does not widen it.
    assert found["ttft_low"] == pytest.approx(1.5) and found["ttft_high"] == pytest.approx(1.5)


def test_an_interval_is_as_wide_as_what_differs():
    rng = np.random.default_rng(0)
    times = 1 + 0.1 * rng.standard_normal((400, 2, 2))
    found = _ratios(times[:, :1], times[:, 1:])
    for name in ("ttft", "tpot"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
        width = found[f"{name}_high"] - found[f"{name}_low"]
        # Of a ratio of two medians of 400: 2 x 1.96 x 0.1 x sqrt(pi / 2 / 400) x sqrt(2) = 0.035.
        assert width == pytest.approx(0.035, rel=0.4)


def test_servers_of_a_kind_are_taken_together_and_compared():
    # plain, guarded, guarded, plain: the second plain one is slower by a tenth.
    seconds = np.array([1.0, 1.2, 1.2, 1.1])
    times = np.repeat(np.stack([seconds, seconds / 10], -1)[None], 9, 0)
    found = _compared(times)
    assert found["over_plain"]["ttft"] == pytest.approx(1.2 / 1.05)
    assert found["over_same"]["plain"]["tpot"] == pytest.approx(1.1)
    assert found["over_same"]["guarded"]["ttft_high"] == pytest.approx(1)
    assert found["added_ms"]["ttft"] == pytest.approx(150)
    assert found["added_ms"]["tpot_low"] == pytest.approx(15)
    assert found["servers"]["guarded"]["ttft_p50_ms"] == pytest.approx(1200)


def test_figures_are_in_milliseconds():
    times = np.stack([np.linspace(0, 1, 101), np.linspace(0, 0.1, 101)], -1)[:, None]
    expected = {"ttft_p50_ms": 500, "ttft_p99_ms": 990, "tpot_p50_ms": 50, "tpot_p99_ms": 99}
    assert _figures(times) == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [{"requests": 1}, {"prompt_tokens": 0}, {"answer_tokens": 1}])
def test_a_plan_is_checked(wrong):
    with pytest.raises(ValueError, match="expected at least"):
        AccessPlan(**wrong)
