"""Merges while training: what is merged with what, what is kept apart, and resuming to the bit."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from zen_jax.layout import unfuse
from zen_jax.merge.folding import Mean
from zen_jax.merge.monosoup import MonoSoup, TruncatedSoup, monosoup, truncated_soup
from zen_jax.training.batches import Batch
from zen_jax.training.checkpoints import RunFolder
from zen_jax.training.finetune import TrainConfig, TrainState, make_optimizer, train
from zen_jax.training.smoothing import (
    Smoother,
    SmoothingConfig,
    merge_pair,
    merge_running,
    reset_moments,
    train_smoothed,
)

# Every run compiles the same programs anew.
pytestmark = pytest.mark.usefixtures("compiled")

SETTINGS = TrainConfig(steps=8, learning_rate=1e-2, warmup=2, checkpoint_every=3)
SHADOWS = SmoothingConfig(("none", "mean", "truncated-soup"), every=2, rank=4)
Tensors = dict[str, np.ndarray]


def batches(step: int) -> tuple[Batch, ...]:
    rng = np.random.default_rng((1, step))
    tokens = np.cumsum(rng.integers(0, 3, (8, 17)), 1).astype(np.int32)
    return (Batch(tokens, np.ones((8, 16), np.float32)),)


HELD_OUT = batches(10**6)


def smooth(tiny, tiny_params, folder: Path, smoothing=SHADOWS, steps=batches, settings=SETTINGS):
    return train_smoothed(
        tiny, tiny_params, steps, settings, smoothing, HELD_OUT, folder, progress=False
    )


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)


@pytest.fixture(scope="module")
def whole(tiny, tiny_params, tmp_path_factory):
    """An uninterrupted run with shadows, and its folder."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    return smooth(tiny, tiny_params, folder), folder


# ---- shadows


def test_shadows_leave_training_alone(tiny, tiny_params, whole) -> None:
    plain = train(tiny, tiny_params, batches, SETTINGS, progress=False)
    assert same(plain.params, whole[0].trained.params)
    assert plain.losses == whole[0].trained.losses


def test_every_method_has_a_point_at_every_merge(whole) -> None:
    for name, shadow in whole[0].shadows.items():
        assert [step for step, _ in shadow.curve] == [2, 4, 6, 8]
        assert shadow.count == 4
        assert (shadow.weights is None) == (name == "none")


def test_a_run_that_stops_anywhere_ends_with_the_same_bits(
    tiny, tiny_params, whole, tmp_path
) -> None:
    class Killed(BaseException):
        pass

    def dies_at(last: int):
        def dies(step: int) -> tuple[Batch, ...]:
            if step == last:
                raise Killed
            return batches(step)

        return dies

    for last in (1, 4, 7):  # before a checkpoint, between merge and checkpoint, after both
        with pytest.raises(Killed):
            smooth(tiny, tiny_params, tmp_path / "run", steps=dies_at(last))
    done = smooth(tiny, tiny_params, tmp_path / "run")
    assert len(done.trained.losses) == 8 - 6, "it went on from the checkpoint of step 6"
    assert same(done.trained.params, whole[0].trained.params)
    for name, shadow in whole[0].shadows.items():
        found = done.shadows[name]
        assert (found.curve, found.loss, found.count) == (shadow.curve, shadow.loss, shadow.count)
        assert shadow.weights is None or same(found.weights, shadow.weights)
    again = smooth(tiny, tiny_params, tmp_path / "run", steps=dies_at(0))
    assert not again.trained.losses and same(again.raw, done.raw)


def test_a_folder_of_another_run_is_refused(tiny, tiny_params, whole) -> None:
    other = dataclasses.replace(SHADOWS, rank=5)
    with pytest.raises(ValueError, match="is of a run with .*; choose another folder"):
        smooth(tiny, tiny_params, whole[1], other)
    moved = jax.tree.map(lambda leaf: leaf + 1, tiny_params)
    with pytest.raises(ValueError, match="is of a run with"):
        smooth(tiny, moved, whole[1])


def test_a_damaged_checkpoint_is_named(tiny, tiny_params, whole, tmp_path) -> None:
    import shutil

    folder = Path(shutil.copytree(whole[1], tmp_path / "run"))
    shutil.rmtree(folder / "8/master/00003")
    with pytest.raises(ValueError, match="8 cannot be read .*; remove it to go on from none"):
        smooth(tiny, tiny_params, folder)


# ---- what is saved apart


def test_raw_merged_and_master_weights_are_saved_apart(tiny, tiny_params, tmp_path) -> None:
    """A run that merges into live weights goes on from float32 masters, and keeps what was raw."""
    replace = SmoothingConfig(("mean",), every=2, live="replace", optimizer="keep")
    settings = dataclasses.replace(SETTINGS, steps=4, checkpoint_every=4)
    done = smooth(tiny, tiny_params, tmp_path / "run", replace, settings=settings)
    assert {p.name for p in (tmp_path / "run/4").iterdir()} >= {"master", "raw", "merged", "record"}

    smoother = Smoother(tiny, tiny_params, settings, replace, HELD_OUT, tmp_path / "run")
    optimizer = make_optimizer(tiny, settings)
    fresh = TrainState(tiny_params, optimizer.init(tiny_params), 0)
    state = smoother.restore(fresh)
    assert state.step == 4 and same(state.params, done.trained.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    moments = state.optimizer[1][0].mu
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {np.dtype("float32")}
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(moments))

    raw, merged = (_read(tmp_path / f"run/4/{item}") for item in ("raw", "merged/mean"))
    live = unfuse(tiny, done.trained.params)
    assert {value.dtype for value in raw.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert {value.dtype for value in merged.values()} == {np.dtype("float32")}
    name = "model.layers.0.mlp.up_proj.weight"
    # Live weights are the last merge; the raw ones are what was merged, not what came of it.
    assert not np.array_equal(np.asarray(live[name]), raw[name].astype(np.float32))
    assert set(raw) == set(merged) == set(live)


def _read(folder: Path) -> Tensors:
    import orbax.checkpoint as ocp

    item, _, name = str(folder).partition("/merged/")
    path = Path(f"{item}/merged") if name else folder
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        found = checkpointer.restore(path.resolve())
    found = found[name] if name else found
    return {key: np.asarray(value) for key, value in found.items()}


# ---- live weights


def test_replacing_needs_a_policy_for_the_optimizer() -> None:
    with pytest.raises(ValueError, match="choose optimizer='keep' or 'reset'"):
        SmoothingConfig(("mean",), live="replace")
    for bad, told in (
        ({"optimizer": "keep"}, "give live='replace'"),
        ({"live": "replace", "optimizer": "drop"}, "optimizer has 'drop'"),
        ({"live": "replace", "optimizer": "keep", "methods": ("none",)}, "one that merges"),
        ({"live": "replace", "optimizer": "keep", "methods": ("mean", "monosoup")}, "one that"),
        ({"methods": ("soup",)}, "methods has 'soup'"),
        ({"methods": ()}, "at least one"),
        ({"every": 0}, "every is 0"),
        ({"rank": 0}, "rank is 0"),
        ({"pairing": "all"}, "pairing has 'all'"),
    ):
        with pytest.raises(ValueError, match=told):
            SmoothingConfig(**bad)
    assert SmoothingConfig().every == 1000 and SmoothingConfig().live == "shadow"


@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_live_weights_become_the_merge(tiny, tiny_params, tmp_path, policy) -> None:
    config = SmoothingConfig(("mean",), every=2, live="replace", optimizer=policy)
    smoother = Smoother(tiny, tiny_params, SETTINGS, config, HELD_OUT, tmp_path)
    losses = iter([3.0, 3.0, 2.0, 1.0])
    smoother._held_out_loss = lambda tensors: next(losses)
    optimizer = make_optimizer(tiny, SETTINGS)
    slots = jax.tree.map(lambda leaf: leaf + 1, optimizer.init(tiny_params))
    one = jax.tree.map(lambda leaf: leaf + 2, tiny_params)
    two = jax.tree.map(lambda leaf: leaf + 4, tiny_params)
    smoother.after(TrainState(one, slots, 2))
    done = smoother.after(TrainState(two, slots, 4))
    middle = jax.tree.map(lambda leaf: leaf + 3, tiny_params)
    for found, expected in zip(jax.tree.leaves(done.params), jax.tree.leaves(middle), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    if policy == "keep":
        assert same(done.optimizer, slots)
    else:
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(done.optimizer[1][0].mu))
        assert _schedule(done.optimizer) == _schedule(slots) == 1


def _schedule(state: Any) -> int:
    def walk(node: Any) -> Iterator[Any]:
        if isinstance(node, optax.ScaleByScheduleState):
            yield node
        elif isinstance(node, tuple):
            for child in node:
                yield from walk(child)

    (found,) = walk(state)
    return int(found.count)


def test_reset_moments_touches_nothing_but_moments() -> None:
    old = (optax.ScaleByScheduleState(jnp.array(7)), {"mu": jnp.ones(2)})
    fresh = (optax.ScaleByScheduleState(jnp.array(0)), {"mu": jnp.zeros(2)})
    found = reset_moments(fresh, old)
    assert int(found[0].count) == 7 and not np.asarray(found[1]["mu"]).any()


# ---- merging


def test_pairs_are_merged_by_the_methods_themselves() -> None:
    rng = np.random.default_rng(0)
    base, current, best = (rng.normal(size=(6, 5)).astype(np.float32) for _ in range(3))
    found = merge_pair(TruncatedSoup(2), base, current, best, 2, "w")
    np.testing.assert_allclose(found, truncated_soup(base, [current, best], 2, "w"), atol=1e-5)
    found = merge_pair(MonoSoup(), base, current, best, 2, "w")
    cleaned = [monosoup(base, tuned) for tuned in (current, best)]
    np.testing.assert_allclose(found, np.mean(cleaned, axis=0), atol=1e-5)
    np.testing.assert_allclose(merge_pair(Mean(), base, current, None, 1, "w"), current, atol=1e-6)


def test_halving_forgets_and_a_running_mean_does_not() -> None:
    base, n = np.zeros((3, 3), np.float32), 5
    checkpoints = [np.full((3, 3), 2.0**i, np.float32) for i in range(n)]
    pairwise = running = None
    for i, current in enumerate(checkpoints, 1):
        pairwise = merge_pair(Mean(), base, current, pairwise, i, "w")
        running = merge_running(Mean(), base, current, running, i, "w")
    weights = [2.0 ** -(n - 1), *(2.0 ** -(n - i) for i in range(1, n))]
    np.testing.assert_allclose(pairwise, np.tensordot(weights, checkpoints, 1), rtol=1e-6)
    np.testing.assert_allclose(running, np.mean(checkpoints, axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("losses", "best", "loss"),
    [
        # (raw, merged) at each of two merges; what the shadow then is: how much was added
        ([3, 3, 2, 1], 3, 1),  # the merge of both
        ([3, 3, 1, 2], 4, 1),  # the second raw checkpoint
        ([1, 1, 2, 3], 2, 1),  # the first stays
        ([3, 3, 2, np.inf], 4, 2),  # a merge that is not finite is never the best
    ],
)
def test_the_best_is_chosen_by_held_out_loss(tiny, tiny_params, tmp_path, losses, best, loss):
    config = SmoothingConfig(("mean",), every=1)
    smoother = Smoother(tiny, tiny_params, SETTINGS, config, HELD_OUT, tmp_path)
    given = iter(float(value) for value in losses)
    smoother._held_out_loss = lambda tensors: next(given)
    for step, more in ((1, 2), (2, 4)):
        moved = jax.tree.map(lambda leaf, more=more: leaf + more, tiny_params)
        assert smoother.after(TrainState(moved, (), step)).params is moved
    (shadow,) = smoother.shadows.values()
    assert shadow.loss == loss
    start = unfuse(tiny, tiny_params)
    for name, value in shadow.weights.items():
        np.testing.assert_allclose(value - start[name], best, atol=1e-5)


def test_without_held_out_batches_nothing_can_be_chosen(tiny, tiny_params, tmp_path) -> None:
    with pytest.raises(ValueError, match="held_out is empty"):
        Smoother(tiny, tiny_params, SETTINGS, SHADOWS, (), tmp_path)


def test_an_empty_folder_is_a_start(tmp_path) -> None:
    assert RunFolder(tmp_path).restore("x", []) is None
    assert RunFolder(tmp_path / "no").restore("x", []) is None


# ---- kill -9

SCRIPT = """
import hashlib, os, signal, sys, threading, time, warnings
from pathlib import Path
import jax, numpy as np
from zen_jax.config import ModelConfig
from zen_jax.model import init_params
from zen_jax.training.batches import Batch
from zen_jax.training.checkpoints import RunFolder
from zen_jax.training.finetune import TrainConfig
from zen_jax.training.smoothing import SmoothingConfig, train_smoothed

warnings.simplefilter("ignore")  # Nothing runs yet when this forks.
root, kills = Path(sys.argv[1]), int(sys.argv[2])
jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

def batch(step):
    rng = np.random.default_rng((1, step))
    tokens = np.cumsum(rng.integers(0, 3, (4, 17)), 1).astype(np.int32)
    return (Batch(tokens, np.ones((4, 16), np.float32)),)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def work(folder, last=None, delay=None):
    def batches(step):
        if step == last:
            die()
        return batch(step)
    save = RunFolder.save
    def dies(self, step, *rest):
        if delay is not None and step > 3:
            threading.Timer(delay, die).start()
        save(self, step, *rest)
    RunFolder.save = dies
    config = ModelConfig(264, 16, 24, 1, 2, 1, 8, 32, 1e-5, 1e4, True)
    done = train_smoothed(
        config, init_params(config, jax.random.key(0)), batches,
        TrainConfig(9, 1e-2, 2, checkpoint_every=3),
        SmoothingConfig(("mean", "truncated-soup"), every=2, rank=4),
        batch(10**6), root / folder, progress=False,
    )
    digest = hashlib.sha256(repr([(s.curve, s.loss) for s in done.shadows.values()]).encode())
    for tree in (done.raw, *(s.weights for s in done.shadows.values())):
        for name, value in sorted(tree.items()):
            digest.update(value.tobytes())
    (root / f"{folder}.sha256").write_text(digest.hexdigest())

def child(*given):
    number = os.fork()
    if number == 0:
        work(*given)
        os._exit(0)
    return os.waitpid(number, 0)[1]

assert child("whole") == 0
assert child("killed", 4) == signal.SIGKILL
died = 0
for i in range(kills):
    # In the middle of writing a checkpoint; a later one of a longer delay may come through.
    died += child("killed", None, 0.004 * (i + 1)) == signal.SIGKILL
assert child("killed") == 0
one, other = ((root / f"{name}.sha256").read_text() for name in ("whole", "killed"))
assert one == other, "the bits differ"
print(died)
"""


def test_killed_at_any_moment_a_run_ends_with_the_same_bits(tmp_path: Path, scale: int) -> None:
    kills = 1 if scale == 1 else 30
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(kills)],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert int(process.stdout) >= 1
    steps = json.loads((tmp_path / "killed/9/record/metadata").read_text())["step"]
    assert steps == 9
