"""The engine's check for a card: skipped without one, its figures at a size that a CPU can do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu_check_engine
from zen_jax import benchmark_decode

SCRIPT = Path(gpu_check_engine.__file__)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def test_without_a_card_it_is_skipped() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("skipped"), done.stderr


def test_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark_decode.SHAPES, "few", SHAPE)
    one, mixed = gpu_check_engine.steps("few", 3, 2, bandwidth=1e9)
    assert (one["batch"], mixed["batch"], mixed["variants"]) == (1, 14, 14)
    # Weights of two layers and the head; a byte of signs for 8 inputs, 4 bytes an output.
    layer = 64 * 32 + 32 * 32 + 96 * 32 + 32 * 48
    outputs = 2 * (64 + 32 + 96 + 32) + 64
    base = 2 * (2 * layer + 64 * 32)
    assert one["bytes"] == {"base": base, "mixed": base + base // 16 + 4 * outputs}
    assert mixed["bandwidth_share"] == pytest.approx(
        mixed["bytes"]["mixed"] / (mixed["mixed_ms"] * 1e6)
    )
    times = gpu_check_engine.first_tokens("few", 5, 2)
    assert times["variant_over_base"] == times["variant_ms"] / times["base_ms"] > 0
