"""LoRA fine-tuning: it starts at the base, learns, resumes, and leaves the base alone."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.layout import unfuse
from zen_jax.model import init_params, make_forward
from zen_jax.training.batches import Batch
from zen_jax.training.finetune import TrainConfig
from zen_jax.training.lora import LoraConfig, start, train_lora, with_factors

TINY = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=32,
    tie_word_embeddings=True,
)
SETTINGS = TrainConfig(steps=12, learning_rate=3e-2, warmup=2, dtype=jnp.float32)
LORA = LoraConfig(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def base() -> dict[str, np.ndarray]:
    params = init_params(TINY, jax.random.key(0))
    return {name: np.asarray(value) for name, value in unfuse(TINY, params).items()}


def batches(step: int) -> tuple[Batch, ...]:
    """Each token is followed by the next one, as no random model says."""
    first = np.random.default_rng(step).integers(0, 16, (4, 1))
    tokens = (first + np.arange(9)) % 16
    return (Batch(tokens.astype(np.int32), np.ones((4, 8), np.float32)),)


def test_it_learns_and_the_base_stays(base) -> None:
    before = {name: value.copy() for name, value in base.items()}
    done = train_lora(TINY, base, batches, SETTINGS, LORA, progress=False)
    assert done.losses[-1] < done.losses[0] - 0.1
    assert set(done.factors) == {name for name in base if "_proj" in name}
    for name, value in base.items():
        np.testing.assert_array_equal(value, before[name])


def test_it_starts_at_the_base_and_is_scaled_once(base) -> None:
    forward, tokens = make_forward(TINY), batches(0)[0].tokens
    first = start(TINY, LORA)
    plain = with_factors(TINY, base, {}, 1.0)
    logits = forward(with_factors(TINY, base, first, LORA.scale), tokens)
    np.testing.assert_array_equal(logits, forward(plain, tokens))
    name = "model.layers.0.self_attn.o_proj.weight"
    b = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    tuned = unfuse(TINY, with_factors(TINY, base, {name: {"a": first[name]["a"], "b": b}}, 2.0))
    np.testing.assert_allclose(tuned[name], base[name] + 2 * b @ first[name]["a"], rtol=1e-5)


def test_a_run_that_is_resumed_ends_as_one_that_was_not(base, tmp_path: Path) -> None:
    whole = train_lora(TINY, base, batches, SETTINGS, LORA, progress=False)
    path = tmp_path / "run.safetensors"

    def breaks(step: int) -> tuple[Batch, ...]:
        if step == 9:
            raise KeyboardInterrupt
        return batches(step)

    settings = TrainConfig(**{**vars(SETTINGS), "checkpoint_every": 4})
    with pytest.raises(KeyboardInterrupt):
        train_lora(TINY, base, breaks, settings, LORA, checkpoint=path, progress=False)
    rest = train_lora(TINY, base, batches, settings, LORA, checkpoint=path, progress=False)
    assert len(rest.losses) == 4
    for name, pair in whole.factors.items():
        np.testing.assert_array_equal(pair["b"], rest.factors[name]["b"])


def test_targets() -> None:
    few = LoraConfig(targets=("q_proj", "down_proj"))
    assert len(few.weights(TINY)) == 2
    assert LoraConfig(rank=4, alpha=8, rslora=True).scale == 4
    for wrong in ((), ("nose_proj",)):
        with pytest.raises(ValueError, match="targets are"):
            LoraConfig(targets=wrong)
