"""Merging while training: now and then the current checkpoint is merged with the best so far.

Every so many steps the weights of a run are merged, by one or several methods, with the best that
each method has had by held-out loss. Deltas are always taken from the same base, the weights that
training started from. Merges are shadows: training does not see them, unless `live` says that they
replace its weights, and then what becomes of the optimizer has to be said too.

Merging pairwise with the best halves what was there before each time: of n merges, the first has a
weight of 2^-(n - 1). It forgets. `pairing="running"` keeps a mean of all with their count instead.

Raw weights, merged weights, and float32 masters with the optimizer are saved apart: a run that is
resumed goes on from its masters, never from a merge.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from zen_jax.config import ModelConfig
from zen_jax.layout import Params, fuse, unfuse
from zen_jax.merge.folding import Mean, Method, place_any
from zen_jax.merge.monosoup import MonoSoup, TruncatedSoup
from zen_jax.merge.spectrum import trim
from zen_jax.training.batches import Batch
from zen_jax.training.checkpoints import RunFolder
from zen_jax.training.finetune import (
    Batches,
    TrainConfig,
    TrainResult,
    TrainState,
    make_loss,
    make_optimizer,
    named_leaves,
    train,
)

MethodName = Literal["none", "mean", "truncated-soup", "monosoup"]
Pairing = Literal["best", "running"]
Live = Literal["shadow", "replace"]
OptimizerPolicy = Literal["keep", "reset"]
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SmoothingConfig:
    """What is merged during training, and how.

    Attributes:
      methods: each has a merge of its own; "none" only records the raw weights' held-out loss.
      every: gradient steps from one merge to the next.
      rank: of truncated soup.
      pairing: merge with the "best" so far, or keep a "running" mean of all with its count.
      live: "shadow" leaves training alone; "replace" goes on from the merged weights.
      optimizer: with "replace" only, and then required: "keep" the moments as they are, or "reset"
        them to zero. Neither touches the learning rate's schedule.
    """

    methods: tuple[MethodName, ...] = ("truncated-soup",)
    every: int = 1000
    rank: int = 32
    pairing: Pairing = "best"
    live: Live = "shadow"
    optimizer: OptimizerPolicy | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            _one_of("methods", method, MethodName)
        _one_of("pairing", self.pairing, Pairing)
        _one_of("live", self.live, Live)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods are {self.methods}; expected at least one, none twice")
        if type(self.every) is not int or self.every < 1:
            raise ValueError(
                f"every is {self.every!r}; expected a whole number of steps, 1 or more"
            )
        TruncatedSoup(self.rank)
        if self.live == "shadow" and self.optimizer is not None:
            raise ValueError("optimizer says what replacing does; give live='replace' with it")
        if self.live == "replace":
            if self.optimizer is None:
                raise ValueError(
                    "live is 'replace', but not what becomes of the optimizer's state; choose "
                    "optimizer='keep' or 'reset'"
                )
            _one_of("optimizer", self.optimizer, OptimizerPolicy)
            if len(self.methods) != 1 or self.methods == ("none",):
                raise ValueError(
                    f"live is 'replace' and methods are {self.methods}; expected one that merges"
                )

    def method(self, name: MethodName) -> Method | None:
        """How a method merges; None for "none"."""
        return {
            "none": None,
            "mean": Mean(),
            "truncated-soup": TruncatedSoup(self.rank),
            "monosoup": MonoSoup(),
        }[name]


def _one_of(name: str, value: str, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name} has {value!r}; expected one of {', '.join(get_args(allowed))}")


@dataclasses.dataclass
class Shadow:
    """What one method has made so far.

    Attributes:
      weights: float32 by Hugging Face name: the best by held-out loss, or the running mean; None
        before the first merge, and always for "none".
      loss: its held-out loss.
      count: checkpoints that went in, or merges so far.
      curve: (step, held-out loss of what was merged at that step).
    """

    weights: Tensors | None = None
    loss: float = math.inf
    count: int = 0
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class Smoother:
    """A `zen_jax.training.finetune.Keeper` that merges, and keeps the run in orbax checkpoints.

    Attributes:
      shadows: by method.
    """

    def __init__(
        self,
        config: ModelConfig,
        base: Params,
        settings: TrainConfig,
        smoothing: SmoothingConfig,
        held_out: tuple[Batch, ...],
        folder: Path,
    ) -> None:
        """Takes a run.

        Args:
          config: the model.
          base: float32 weights that training starts from; all deltas are taken from them.
          settings: of training.
          smoothing: what is merged.
          held_out: batches whose loss chooses the best.
          folder: for the run's checkpoints.

        Raises:
          ValueError: there is nothing held out.
        """
        if not held_out:
            raise ValueError("held_out is empty; the best checkpoint is chosen by its loss")
        self._config, self._settings, self._smoothing = config, settings, smoothing
        self._held_out = held_out
        self._base = _tensors(config, base)
        self._loss = jax.jit(make_loss(config, jnp.float32))
        self._optimizer = make_optimizer(config, settings)
        self._folder = RunFolder(folder)
        self.shadows = {name: Shadow() for name in smoothing.methods}
        self._raw: Tensors | None = None

    @property
    def identity(self) -> str:
        """All that decides how a run goes on."""
        digest = hashlib.sha256()
        for name, value in sorted(self._base.items()):
            digest.update(name.encode())
            digest.update(memoryview(np.ascontiguousarray(value)).cast("B"))
        for batch in self._held_out:
            digest.update(np.ascontiguousarray(batch.tokens).tobytes())
        merging = json.dumps(dataclasses.asdict(self._smoothing), sort_keys=True)
        return f"{self._settings.identity}; {merging}; base {digest.hexdigest()[:16]}"

    # ---- what the training loop calls

    def restore(self, fresh: TrainState) -> TrainState:
        """Goes on with the folder's last checkpoint, if it has one.

        Raises:
          ValueError: it is of another run or model.
        """
        leaves = named_leaves(fresh)
        found = self._folder.restore(self.identity, list(leaves.values()))
        if found is None:
            return fresh
        for name, entry in found.record["shadows"].items():
            curve = [(int(step), float(loss)) for step, loss in entry["curve"]]
            weights = found.merged.get(name)
            loss = math.inf if entry["loss"] is None else float(entry["loss"])
            self.shadows[name] = Shadow(weights, loss, int(entry["count"]), curve)
        structure = jax.tree.structure((fresh.params, fresh.optimizer))
        params, optimizer = jax.tree.unflatten(structure, found.master)
        return TrainState(params, optimizer, int(found.record["step"]))

    def after(self, state: TrainState) -> TrainState:
        """Merges when it is time."""
        self._raw = None
        if state.step % self._smoothing.every:
            return state
        current = _tensors(self._config, state.params)
        raw_loss = self._held_out_loss(current)
        merged: Tensors | None = None
        for name, shadow in self.shadows.items():
            merged = self._merge(name, shadow, current, raw_loss, state.step)
        if self._smoothing.live == "shadow" or merged is None:
            return state
        self._raw = current
        return self._replace(state, merged)

    def save(self, state: TrainState) -> None:
        """Writes masters, raw weights and merged weights, each apart."""
        raw = self._raw if self._raw is not None else _tensors(self._config, state.params)
        record = {
            "identity": self.identity,
            "step": state.step,
            "shadows": {
                name: {
                    "loss": shadow.loss if math.isfinite(shadow.loss) else None,
                    "count": shadow.count,
                    "kept": shadow.weights is not None,
                    "curve": shadow.curve,
                }
                for name, shadow in self.shadows.items()
            },
        }
        merged = {n: s.weights for n, s in self.shadows.items() if s.weights is not None}
        rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in raw.items()}
        master = list(named_leaves(state).values())
        self._folder.save(state.step, master, rounded, merged, record)

    # ---- merging

    def _merge(
        self, name: str, shadow: Shadow, current: Tensors, raw_loss: float, step: int
    ) -> Tensors | None:
        """Brings one method's shadow up to date; returns what was merged."""
        method = self._smoothing.method(name)  # pyright: ignore[reportArgumentType]
        shadow.count += 1
        if method is None:
            shadow.curve.append((step, raw_loss))
            shadow.loss = min(shadow.loss, raw_loss)
            return None
        running = self._smoothing.pairing == "running"
        merge = merge_running if running else merge_pair
        before, count = shadow.weights, shadow.count
        merged = {
            key: merge(method, base, current[key], before[key] if before else None, count, key)
            for key, base in self._base.items()
        }
        loss = self._held_out_loss(merged)
        shadow.curve.append((step, loss))
        if running:
            shadow.weights, shadow.loss = merged, loss
            return merged
        # The raw checkpoint may be the best there is, and then the next merge is with it.
        for weights, its in ((merged, loss), (current, raw_loss)):
            if its < shadow.loss:
                shadow.weights, shadow.loss = weights, its
        return merged

    def _held_out_loss(self, tensors: Tensors) -> float:
        loss = float(self._loss(fuse(self._config, tensors), self._held_out))
        return loss if math.isfinite(loss) else math.inf

    def _replace(self, state: TrainState, merged: Tensors) -> TrainState:
        params = jax.tree.map(jnp.asarray, fuse(self._config, merged))
        optimizer = state.optimizer
        if self._smoothing.optimizer == "reset":
            optimizer = reset_moments(self._optimizer.init(params), optimizer)
        return TrainState(params, optimizer, state.step)


def merge_pair(
    method: Method,
    base: np.ndarray,
    current: np.ndarray,
    best: np.ndarray | None,
    count: int,
    name: str,
) -> np.ndarray:
    """One tensor of the current checkpoint merged with the best so far, float32.

    MonoSoup, which is of one checkpoint, cleans both and takes their mean.

    Args:
      method: how.
      base: [O, I] or [D], what deltas are taken from.
      current: of its shape.
      best: of its shape; None for the first.
      count: not used.
      name: of the tensor.
    """
    fold = method.fold(name)
    for tuned in (current, best):
        if tuned is not None:
            fold.add(place_any(tuned - base))
    return base + trim(fold.merged(), base.shape)


def merge_running(
    method: Method,
    base: np.ndarray,
    current: np.ndarray,
    mean: np.ndarray | None,
    count: int,
    name: str,
) -> np.ndarray:
    """One tensor of the mean of all checkpoints, each made fit by the method, float32.

    Args:
      method: how.
      base: [O, I] or [D], what deltas are taken from.
      current: of its shape.
      mean: of the checkpoints before; None for the first.
      count: of checkpoints, this one included.
      name: of the tensor.
    """
    fold = method.fold(name)
    fold.add(place_any(current - base))
    made = base + trim(fold.merged(), base.shape)
    return made if mean is None else mean + (made - mean) / np.float32(count)


def reset_moments(fresh: Any, old: Any) -> Any:
    """An optimizer's state as at the start, but for the place in the learning rate's schedule."""
    kinds = (optax.ScaleByScheduleState,)

    def choose(new: Any, before: Any) -> Any:
        return before if isinstance(new, kinds) else new

    return jax.tree.map(choose, fresh, old, is_leaf=lambda node: isinstance(node, kinds))


def _tensors(config: ModelConfig, params: Params) -> Tensors:
    """Copies in float32 by Hugging Face name, on the host: training gives its arrays away."""
    return {n: np.array(value, np.float32) for n, value in unfuse(config, params).items()}


@dataclasses.dataclass(frozen=True)
class SmoothResult:
    """What a smoothed run gives.

    Attributes:
      trained: see `TrainResult`.
      raw: float32 weights after the last step, by Hugging Face name.
      shadows: by method.
    """

    trained: TrainResult
    raw: Tensors
    shadows: Mapping[str, Shadow]


def train_smoothed(
    config: ModelConfig,
    params: Params,
    batches: Batches,
    settings: TrainConfig,
    smoothing: SmoothingConfig,
    held_out: tuple[Batch, ...],
    folder: Path,
    **options: Any,
) -> SmoothResult:
    """Fine-tunes and merges; goes on from the folder's last checkpoint if there is one.

    A run that was killed at any moment and started again ends with the same bits.

    Args:
      config: the model.
      params: float32 start, which is the base of all deltas; not changed.
      batches: see `zen_jax.training.finetune.train`.
      settings: of training.
      smoothing: what is merged.
      held_out: batches whose loss chooses the best.
      folder: for the run's checkpoints.
      options: `title` and `progress` of the bar.

    Raises:
      ValueError: the folder belongs to another run, or an option has a value it cannot have.
      FloatingPointError: a loss is not finite.
    """
    smoother = Smoother(config, params, settings, smoothing, held_out, folder)
    done = train(config, params, batches, settings, checkpoint=smoother, **options)
    return SmoothResult(done, _tensors(config, done.params), smoother.shadows)
