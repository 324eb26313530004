"""Training of scales: the best is kept, and a run that is killed ends as one that is not."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.delta.distill_scales import Scales, Training, train_scales

START = {"a": np.array([[0.02, 0.04]], np.float32), "b": np.array([[-0.5]], np.float32)}
WANTED = {"a": jnp.array([[0.03, 0.035]]), "b": jnp.array([[-0.6]])}
BATCHES = [jnp.float32(1.0), jnp.float32(2.0)]


def _loss(scales: Scales, fixed: Any, batch: Any) -> jax.Array:
    return batch * sum(jnp.sum(jnp.square((scales[n] - fixed[n]) / fixed[n])) for n in fixed)


def _judge(scales: Scales) -> float:
    return float(_loss(scales, WANTED, 1.0))


def test_scales_of_any_size_find_what_is_wanted() -> None:
    done = train_scales(START, _loss, WANTED, BATCHES, _judge, Training(400, 1e-4, every=50))
    for name, value in done.scales.items():
        np.testing.assert_allclose(value, WANTED[name], rtol=0.02)
    assert done.best == pytest.approx(_judge(jax.tree.map(jnp.asarray, done.scales)))
    assert done.before == pytest.approx(_judge(jax.tree.map(jnp.asarray, START)))
    assert [step for step, _, _ in done.curve] == [0, *range(50, 401, 50)]


def test_a_step_moves_a_scale_by_one_per_cent() -> None:
    once = train_scales(START, _loss, WANTED, BATCHES, lambda s: -_judge(s), Training(1, 1e-4))
    assert once.scales["a"][0, 0] == START["a"][0, 0]  # the measure says that it got worse
    moved = train_scales(START, _loss, WANTED, BATCHES, _judge, Training(1, 1e-4))
    for name, value in moved.scales.items():
        np.testing.assert_allclose(np.abs(value / START[name] - 1), 0.01, rtol=1e-3)


def test_the_best_is_kept_when_training_ruins_all() -> None:
    ruin = Training(20, 0.5, cosine=False, every=5)
    done = train_scales(START, _loss, WANTED, BATCHES, _judge, ruin)
    assert done.best <= done.before
    assert max(measure for _, _, measure in done.curve) > done.before


def test_a_run_that_was_killed_ends_where_another_does(tmp_path: Path) -> None:
    file, settings = tmp_path / "run.safetensors", Training(30, 2e-4, every=10)
    whole = train_scales(START, _loss, WANTED, BATCHES, _judge, settings)

    def killed(done: int, total: int) -> None:
        if done == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_scales(START, _loss, WANTED, BATCHES, _judge, settings, checkpoint=file, hear=killed)
    steps: list[int] = []
    again = train_scales(
        START,
        _loss,
        WANTED,
        BATCHES,
        _judge,
        settings,
        checkpoint=file,
        hear=lambda done, total: steps.append(done),
    )
    assert steps[0] == 11
    assert again.curve == whole.curve
    for name in START:
        np.testing.assert_array_equal(again.scales[name], whole.scales[name])
    with pytest.raises(ValueError, match="another run"):
        train_scales(START, _loss, WANTED, BATCHES, _judge, Training(31, 2e-4), checkpoint=file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="remove it"):
        train_scales(START, _loss, WANTED, BATCHES, _judge, settings, checkpoint=file)


def test_a_loss_that_is_no_number_ends_it() -> None:
    def loss(scales: Scales, fixed: Any, batch: Any) -> jax.Array:
        return _loss(scales, fixed, batch) * jnp.nan

    with pytest.raises(FloatingPointError, match="smaller rate"):
        train_scales(START, loss, WANTED, BATCHES, _judge, Training(2))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 1, "rate": float("nan")}])
def test_settings_that_will_not_do(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Training(**wrong)
