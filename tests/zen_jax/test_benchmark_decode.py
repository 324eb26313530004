"""The decode benchmark's figures, and that its ways are what they are named."""

import numpy as np
import pytest

from zen_jax import benchmark_decode
from zen_jax.benchmark_decode import bench_decode

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark_decode.SHAPES, "tiny", TINY)


def test_ratios_follow_from_times() -> None:
    figures = bench_decode([1, 4], [1, 4], "tiny", context=3, repeats=3)
    cases = figures["cases"]
    assert [(c["batch"], c["variants"]) for c in cases] == [(1, 1), (4, 1), (4, 4)]
    for case in cases:
        assert case["variant_over_base"] == case["variant_ms"] / case["base_ms"]
        assert case["speedup"] == case["naive_ms"] / case["mixed_ms"]
        assert case["tokens_per_s"] == 1e3 * case["batch"] / case["mixed_ms"]
        assert case["compiles"] == 0 and 0 < case["host_share"] < 1
    assert [c["bound"] for c in cases] == [1, 1, 3.2]
    assert cases[2]["fraction_of_bound"] == cases[2]["speedup"] / 3.2
    assert figures["model"] == "tiny" and figures["products"] == "bfloat16"


def test_variants_differ_from_the_base_and_from_each_other() -> None:
    """What is timed does read the deltas: logits of three slots differ, the base's are its own."""
    bench = benchmark_decode._Bench(*benchmark_decode._model("tiny", 2), 3, 2, "float32", 3)
    bank = bench.bank
    state, _ = bench.engine.decode(bank, bench.state(np.array([-1, 0, 1])))
    keys = np.asarray(state.cache[-1].k)[:, 3].reshape(3, -1)
    assert len(np.unique(keys, axis=0)) == 3
    again, _ = bench.engine.decode(bank, bench.state(np.array([-1, -1, -1])))
    assert np.array_equal(np.asarray(again.cache[-1].k)[:, 3].reshape(3, -1), keys[[0, 0, 0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], [2], "tiny"), "no batch is a multiple"),
        (([0], [1], "tiny"), "1 or more"),
        (([1], [1], "nothing"), "'nothing'; expected smollm2-135m"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_decode(*arguments)
