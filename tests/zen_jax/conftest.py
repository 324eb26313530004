"""A small model of random weights and a few random variants of it, shared by the tests here."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.delta.compress import compress_tensor, keep_vector
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import unfuse
from zen_jax.model import init_params

Tensors = dict[str, np.ndarray]
Deltas = dict[str, WeightDelta]


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    """Grouped queries, tied, all sizes divisible by eight devices but the kv heads."""
    return ModelConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        max_position=128,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def base(config: ModelConfig) -> dict[str, Any]:
    """Params in bfloat16, wide enough that logits differ."""
    params = init_params(config, jax.random.key(0))
    return jax.tree.map(lambda w: (w * 4 if w.ndim > 1 else w).astype("bfloat16"), params)


@pytest.fixture(scope="session")
def make_variant(config: ModelConfig, base: dict[str, Any]) -> Callable[..., Deltas]:
    """Makes deltas by Hugging Face tensor from a seed and options of compress_tensor."""
    tensors: Tensors = {name: np.asarray(w) for name, w in unfuse(config, base).items()}

    def make(seed: int, **options: Any) -> Deltas:
        rng = np.random.default_rng(seed)
        deltas: Deltas = {}
        for name, w in tensors.items():
            tuned = w.astype(np.float32) + rng.normal(0, 0.05, w.shape).astype(np.float32)
            if w.ndim == 2:
                deltas[name], _ = compress_tensor(w, tuned, **options)
            else:
                deltas[name] = keep_vector(w, tuned)
        return deltas

    return make
