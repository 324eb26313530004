"""A training loop: AdamW, warm-up and cosine, gradient clipping, checkpoints, a progress bar.

Masters and optimizer are float32; products run in bfloat16 unless asked otherwise. What a step sees
is a function of its number alone, so a run that is resumed ends where an uninterrupted one does.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zen_jax.config import ModelConfig
from zen_jax.layout import Params, map_specs
from zen_jax.model import make_forward
from zen_jax.training.batches import Batch

Batches = Callable[[int], tuple[Batch, ...]]
# (what is trained, batches) -> mean loss in nats.
Loss = Callable[[Any, tuple[Batch, ...]], jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
      steps: updates in all.
      learning_rate: at the peak.
      warmup: steps from 0 to the peak; from there a cosine falls to `floor` of it.
      weight_decay: of matrices, not of vectors.
      clip: largest global norm of a gradient.
      beta2: of Adam's second moment.
      floor: share of the peak that the rate ends with; 1 keeps it constant.
      held_out_every, checkpoint_every: in steps.
      dtype: of activations and of the weights in products.
    """

    steps: int
    learning_rate: float
    warmup: int = 20
    weight_decay: float = 0.0
    clip: float = 1.0
    beta2: float = 0.98
    floor: float = 0.01
    held_out_every: int = 100
    checkpoint_every: int = 200
    dtype: jax.typing.DTypeLike = jnp.bfloat16

    def __post_init__(self) -> None:
        for name in ("steps", "held_out_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected it in (0, 1)")

    def due(self, every: int, done: int) -> bool:
        """Whether something done every so many steps, and after the last, is due after `done`."""
        return done % every == 0 or done == self.steps

    @property
    def identity(self) -> str:
        """Everything that decides what weights a run ends with; a checkpoint carries it."""
        decisive = ("steps", "learning_rate", "warmup", "weight_decay", "clip", "beta2", "floor")
        values = ", ".join(f"{name}={getattr(self, name)}" for name in decisive)
        return f"{values}, dtype={jnp.dtype(self.dtype).name}"


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Where a run stands.

    Attributes:
      params: float32 masters.
      optimizer: optax's state.
      step: updates done.
    """

    params: Params
    optimizer: Any
    step: int


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run gives.

    Attributes:
      params: float32, after the last step.
      losses: mean loss of each step done in this call, nats a weighted token.
      held_out: (step, loss) pairs.
    """

    params: Params
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]


class Keeper(Protocol):
    """Where a run is kept, and what else is done in it after each step."""

    def restore(self, fresh: TrainState) -> TrainState:
        """The state that the run was left in, or `fresh`; called once, at the start."""
        ...

    def after(self, state: TrainState) -> TrainState:
        """Called after each step; what it returns is gone on with."""
        ...

    def save(self, state: TrainState) -> None:
        """Called now and then, and after the last step."""
        ...


def make_optimizer(config: ModelConfig | None, train: TrainConfig) -> optax.GradientTransformation:
    """Clipping and AdamW (arXiv:1711.05101) under a warm-up and a cosine; weights decay where a
    model of `config` has matrices, or all that is trained without one."""
    peak = train.learning_rate
    warmup = min(train.warmup, train.steps)
    rate = optax.schedules.warmup_cosine_decay_schedule(
        peak / max(1, warmup), peak, warmup, max(train.steps, warmup + 1), peak * train.floor
    )
    mask = None if config is None else map_specs(lambda spec: spec.kind != "vector", config)
    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(rate, b1=0.9, b2=train.beta2, weight_decay=train.weight_decay, mask=mask),
    )


def make_loss(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Loss:
    """``loss(params, batches)``: weighted mean cross-entropy in nats over all batches' targets."""
    forward = make_forward(config, dtype=dtype)

    def loss(params: Params, batches: tuple[Batch, ...]) -> jax.Array:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        total, count = jnp.zeros(()), jnp.zeros(())
        for batch in batches:
            logits = forward(cast, jnp.asarray(batch.tokens)[:, :-1])
            targets = batch.tokens[:, 1:]
            each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            total += jnp.sum(each * batch.weights)
            count += jnp.sum(batch.weights)
        return total / jnp.maximum(count, 1e-9)

    return loss


def train(
    config: ModelConfig,
    params: Params,
    batches: Batches,
    settings: TrainConfig,
    *,
    held_out: tuple[Batch, ...] = (),
    checkpoint: Path | Keeper | None = None,
    title: str = "training",
    progress: bool = True,
    loss: Loss | None = None,
) -> TrainResult:
    """Trains, from a checkpoint if there is one.

    Args:
      config: the model.
      params: float32 start; not changed. With a `loss` of its own any tree that it takes.
      batches: step -> what that step sees; has to be a pure function.
      settings: how.
      held_out: batches whose loss is reported now and then.
      checkpoint: a .safetensors file to write now and then and to resume from, which stays after
        the last step; or a `Keeper` of another kind.
      title: in front of the progress bar.
      progress: whether to show it.
      loss: what is made less; None takes the model's cross-entropy.

    Raises:
      ValueError: the checkpoint is damaged or of another model or run.
      FloatingPointError: a loss is not finite.
    """
    optimizer = make_optimizer(config if loss is None else None, settings)
    masters = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    state = TrainState(masters, optimizer.init(masters), 0)
    keeper = _FileKeeper(checkpoint, settings) if isinstance(checkpoint, Path) else checkpoint
    if keeper is not None:
        state = keeper.restore(state)
    update, evaluate = _make_update(loss or make_loss(config, settings.dtype), optimizer)
    losses: list[float] = []
    seen: list[tuple[int, float]] = []
    with _progress(progress) as bar:
        task = bar.add_task(title, total=settings.steps, completed=state.step, note="")
        for step in range(state.step, settings.steps):
            tree, slots, value = update(state.params, state.optimizer, batches(step))
            state = TrainState(tree, slots, step + 1)
            losses.append(_finite(float(value), step))
            if held_out and settings.due(settings.held_out_every, step + 1):
                seen.append((step + 1, float(evaluate(state.params, held_out))))
            if keeper is not None:
                state = keeper.after(state)
                if settings.due(settings.checkpoint_every, step + 1):
                    keeper.save(state)
            bar.update(task, completed=step + 1, note=_note(losses, seen))
    return TrainResult(state.params, tuple(losses), tuple(seen))


class _FileKeeper:
    """One safetensors file, replaced as a whole."""

    def __init__(self, path: Path, settings: TrainConfig):
        self._path, self._identity = path, settings.identity

    def restore(self, fresh: TrainState) -> TrainState:
        if not self._path.exists():
            return fresh
        return load_checkpoint(self._path, fresh, self._identity)

    def after(self, state: TrainState) -> TrainState:
        return state

    def save(self, state: TrainState) -> None:
        save_checkpoint(self._path, state, self._identity)


def _make_update(
    loss: Loss, optimizer: optax.GradientTransformation
) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Jitted (params, optimizer, batches) -> (params, optimizer, loss), donated; and the loss."""

    def update(params: Params, slots: Any, batches: tuple[Batch, ...]) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batches)
        change, slots = optimizer.update(gradient, slots, params)
        return optax.apply_updates(params, change), slots, value

    return jax.jit(update, donate_argnums=(0, 1)), jax.jit(loss)


def _finite(loss: float, step: int) -> float:
    if not np.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {step}; try a smaller learning rate")
    return loss


def _note(losses: list[float], seen: list[tuple[int, float]]) -> str:
    note = f"loss {np.mean(losses[-20:]):.3f}"
    return f"{note}  held out {seen[-1][1]:.3f}" if seen else note


def _progress(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=not shown,
    )


def named_leaves(state: TrainState) -> dict[str, Any]:
    """Every array of parameters and optimizer, by its path in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((state.params, state.optimizer))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def save_checkpoint(path: Path, state: TrainState, identity: str) -> None:
    """Writes parameters, optimizer and step to one safetensors file: whole or not at all.

    Args:
      path: where to.
      state: what to keep.
      identity: of the run, see `TrainConfig.identity`.
    """
    tensors = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    temporary = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, temporary, metadata={"step": str(state.step), "run": identity})
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path, like: TrainState, identity: str) -> TrainState:
    """Reads what `save_checkpoint` wrote.

    Raises:
      ValueError: the file is damaged, its tensors are not those of `like`, or it is of a run with
        another identity.
    """
    try:
        with safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
            step, run = int(metadata["step"]), metadata["run"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is no checkpoint of this trainer: {error}; remove it") from error
    if run != identity:
        raise ValueError(f"{path} is of a run with {run}; this one has {identity}; remove it")
    named = named_leaves(like)
    if set(named) != set(tensors) or any(tensors[n].shape != v.shape for n, v in named.items()):
        raise ValueError(f"{path} belongs to another model or optimizer; remove it to start anew")
    structure = jax.tree.structure((like.params, like.optimizer))
    leaves = [jnp.asarray(tensors[name], named[name].dtype) for name in named]
    params, optimizer = jax.tree.unflatten(structure, leaves)
    return TrainState(params, optimizer, step)
