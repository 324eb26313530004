"""The loop: it learns, it resumes to the same weights, it refuses what is not its own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.layout import Params
from zen_jax.training import tasks
from zen_jax.training.batches import Batch, example_batch
from zen_jax.training.finetune import TrainConfig, TrainState, load_checkpoint, make_loss, train
from zen_jax.training.tasks import SKILLS, Words

SETTINGS = TrainConfig(steps=12, learning_rate=1e-2, warmup=2, checkpoint_every=5, held_out_every=6)


@pytest.fixture
def batches(words: tuple[Words, Words]):
    def batch(step: int) -> tuple[Batch, ...]:
        rng = np.random.default_rng((7, step))
        examples = [(tasks.draw(SKILLS["upper"], words[0], rng), ()) for _ in range(16)]
        return (example_batch(examples, 24),)

    return batch


def _equal(left: Params, right: Params) -> bool:
    return all(
        (np.asarray(a) == np.asarray(b)).all()
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def test_the_loss_falls(tiny: ModelConfig, tiny_params: Params, batches) -> None:
    before = jax.tree.map(np.array, tiny_params)
    done = train(tiny, tiny_params, batches, SETTINGS, held_out=batches(10**6), progress=False)
    assert done.losses[0] == pytest.approx(np.log(264), abs=0.3)
    assert done.losses[-1] < done.losses[0] - 1.0
    assert [step for step, _ in done.held_out] == [6, 12]
    assert done.held_out[1][1] < done.held_out[0][1]
    assert _equal(before, tiny_params), "the start was changed"


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tiny: ModelConfig, tiny_params: Params, batches, tmp_path: Path
) -> None:
    whole = train(tiny, tiny_params, batches, SETTINGS, progress=False)

    class Killed(Exception):
        pass

    def dies(step: int) -> tuple[Batch, ...]:
        if step == 8:
            raise Killed
        return batches(step)

    checkpoint = tmp_path / "run.safetensors"
    with pytest.raises(Killed):
        train(tiny, tiny_params, dies, SETTINGS, checkpoint=checkpoint, progress=False)
    rest = train(tiny, tiny_params, batches, SETTINGS, checkpoint=checkpoint, progress=False)
    assert len(rest.losses) == 12 - 5, "it went on from the checkpoint of step 5"
    assert _equal(rest.params, whole.params)
    again = train(tiny, tiny_params, dies, SETTINGS, checkpoint=checkpoint, progress=False)
    assert not again.losses and _equal(again.params, whole.params)


def test_weights_of_zero_leave_targets_out(tiny: ModelConfig, tiny_params: Params, batches) -> None:
    loss = make_loss(tiny, jnp.float32)
    (batch,) = batches(0)
    changed = batch.tokens.copy()
    changed[:, 1:][batch.weights == 0] = 5
    last = np.flatnonzero(batch.weights[0])[-1] + 1
    alike = Batch(np.where(np.arange(25) > last, changed, batch.tokens), batch.weights)
    whole = loss(tiny_params, (batch,))
    assert loss(tiny_params, (batch, Batch(changed, batch.weights * 0))) == pytest.approx(whole)
    row = Batch(batch.tokens[:1], batch.weights[:1])
    other = Batch(alike.tokens[:1], alike.weights[:1])
    assert loss(tiny_params, (other,)) == pytest.approx(float(loss(tiny_params, (row,))))


def test_a_damaged_checkpoint_is_refused(
    tiny: ModelConfig, tiny_params: Params, batches, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run.safetensors"
    checkpoint.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="no checkpoint of this trainer"):
        train(tiny, tiny_params, batches, SETTINGS, checkpoint=checkpoint, progress=False)


def test_a_checkpoint_of_another_model_is_refused(
    tiny: ModelConfig, tiny_params: Params, batches, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run.safetensors"
    short = TrainConfig(steps=1, learning_rate=1e-3)
    train(tiny, tiny_params, batches, short, checkpoint=checkpoint, progress=False)
    with pytest.raises(ValueError, match="another model or optimizer"):
        load_checkpoint(checkpoint, TrainState(tiny_params, (), 0), short.identity)


def test_a_checkpoint_of_another_run_is_refused(
    tiny: ModelConfig, tiny_params: Params, batches, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run.safetensors"
    short = TrainConfig(steps=1, learning_rate=1e-3)
    train(tiny, tiny_params, batches, short, checkpoint=checkpoint, progress=False)
    longer = TrainConfig(steps=2, learning_rate=1e-3)
    with pytest.raises(ValueError, match="a run with steps=1.*this one has steps=2"):
        train(tiny, tiny_params, batches, longer, checkpoint=checkpoint, progress=False)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        TrainConfig(steps=0, learning_rate=1e-3)
    with pytest.raises(ValueError, match="learning_rate is nan"):
        TrainConfig(steps=1, learning_rate=float("nan"))


def test_a_loss_that_is_not_finite_stops_the_run(
    tiny: ModelConfig, tiny_params: Params, batches
) -> None:
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, tiny_params)
    with pytest.raises(FloatingPointError, match="step 0"):
        train(tiny, broken, batches, SETTINGS, progress=False)
