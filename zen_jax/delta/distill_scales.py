"""Training a delta's scales, and nothing else: Adam, the best by a held-out measure kept.

A rate is that of a scale of 0.01, about what BitDelta (arXiv:2402.10193) trains: others move in
proportion to their size, so that 1e-4 moves any scale by at most 1 % of itself a step. A run is
written down now and then, and goes on from there to the same end.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Scales = dict[str, jax.Array]
# (scales, what stays as it is, a batch) -> a loss; has to be one object for equal programs.
Loss = Callable[[Scales, Any, Any], jax.Array]
Curve = tuple[tuple[int, float | None, float], ...]
_UNIT = 0.01


@dataclasses.dataclass(frozen=True)
class Training:
    """How scales are trained.

    Attributes:
      steps: updates in all.
      rate: Adam's, for a scale of 0.01.
      cosine: whether it falls to 0 on a cosine, or stays.
      every: steps between two looks at held-out text, each of which is written down.
    """

    steps: int
    rate: float = 1e-4
    cosine: bool = True
    every: int = 25

    def __post_init__(self) -> None:
        if self.steps < 1 or self.every < 1:
            raise ValueError(f"steps is {self.steps} and every {self.every}; expected at least 1")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is {self.rate}; expected it in (0, 1)")


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training gives.

    Attributes:
      scales: the best by the held-out measure, those begun with among them.
      before: the measure of those.
      best: of `scales`; at most `before`.
      curve: (step, mean loss since the last one, held-out measure); the first without a loss.
    """

    scales: dict[str, np.ndarray]
    before: float
    best: float
    curve: Curve


def train_scales(
    start: Mapping[str, np.ndarray],
    loss: Loss,
    fixed: Any,
    batches: Sequence[Any],
    judge: Callable[[Scales], float],
    settings: Training,
    *,
    checkpoint: Path | None = None,
    key: str = "",
    hear: Callable[[int, int], None] = lambda done, total: None,
) -> Trained:
    """Trains scales.

    Args:
      start: by tensor, float32.
      loss: what is made small.
      fixed: its second argument, a pytree.
      batches: its third, one a step, over and over.
      judge: the held-out measure of scales; smaller is better.
      settings: how.
      checkpoint: a safetensors file that is written after each look and gone on from.
      key: of the run: everything else that decides where it ends.
      hear: called after each step with how many are done, and of how many.

    Raises:
      ValueError: the checkpoint is damaged or of another run.
      FloatingPointError: a loss is not finite.
    """
    begun = {name: jnp.asarray(value, jnp.float32) for name, value in start.items()}
    update, optimizer = _update(loss, settings)
    moves = {name: jnp.zeros_like(value) for name, value in begun.items()}
    run = _Run(0, moves, optimizer.init(moves), dict(begun), [])
    identity = hashlib.sha256(repr((settings, key, _digest(begun))).encode()).hexdigest()
    if checkpoint is not None and checkpoint.exists():
        run = _read(checkpoint, run, identity)
    if not run.curve:
        run.curve.append((0, None, judge(begun)))
    losses: list[float] = []
    for step in range(run.step, settings.steps):
        batch = batches[step % len(batches)]
        moves, slots, value = update(run.moves, run.optimizer, begun, fixed, batch)
        losses.append(_finite(float(value), step))
        run.step, run.moves, run.optimizer = step + 1, moves, slots
        hear(step + 1, settings.steps)
        if run.step % settings.every and run.step < settings.steps:
            continue
        now = _moved(begun, run.moves)
        measure, least = judge(now), min(point[2] for point in run.curve)
        if measure < least:
            run.best = now
        run.curve.append((run.step, float(np.mean(losses)), measure))
        losses = []
        if checkpoint is not None:
            _write(checkpoint, run, identity)
    best = {name: np.asarray(value, np.float32) for name, value in run.best.items()}
    measures = [point[2] for point in run.curve]
    return Trained(best, measures[0], min(measures), tuple(run.curve))


@dataclasses.dataclass
class _Run:
    step: int
    moves: Scales
    optimizer: Any
    best: Scales
    curve: list[tuple[int, float | None, float]]


def _moved(begun: Scales, moves: Scales) -> Scales:
    return {name: value * (1 + moves[name] / _UNIT) for name, value in begun.items()}


@functools.lru_cache(maxsize=8)
def _update(loss: Loss, settings: Training) -> tuple[Callable[..., Any], Any]:
    """Jitted (moves, optimizer, begun, fixed, batch) -> (moves, optimizer, loss)."""
    rate = settings.rate
    schedule = optax.cosine_decay_schedule(rate, settings.steps) if settings.cosine else rate
    optimizer = optax.adam(schedule)

    def of_moves(moves: Scales, begun: Scales, fixed: Any, batch: Any) -> jax.Array:
        return loss(_moved(begun, moves), fixed, batch)

    def update(moves: Scales, slots: Any, begun: Scales, fixed: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(of_moves)(moves, begun, fixed, batch)
        change, slots = optimizer.update(gradient, slots, moves)
        return optax.apply_updates(moves, change), slots, value

    return jax.jit(update), optimizer


def _finite(loss: float, step: int) -> float:
    if not np.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {step}; try a smaller rate")
    return loss


def _digest(values: Mapping[str, jax.Array]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(values):
        hashed.update(name.encode() + np.asarray(values[name]).tobytes())
    return hashed.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """One safetensors file, whole or not at all, also where the process is killed."""
    temporary = path.with_name(path.name + ".part")
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, temporary, dict(about))
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What `write_arrays` wrote.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; remove it to start anew") from error


def _named(run: _Run) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path((run.moves, run.optimizer, run.best))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _write(path: Path, run: _Run, identity: str) -> None:
    arrays = {name: np.asarray(leaf) for name, leaf in _named(run).items()}
    about = {"run": identity, "step": str(run.step), "curve": json.dumps(run.curve)}
    write_arrays(path, arrays, about)


def _read(path: Path, like: _Run, identity: str) -> _Run:
    arrays, about = read_arrays(path)
    named = _named(like)
    if about.get("run") != identity or set(arrays) != set(named):
        raise ValueError(f"{path} is of another run; remove it to start anew")
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in named.items()]
    structure = jax.tree.structure((like.moves, like.optimizer, like.best))
    moves, optimizer, best = jax.tree.unflatten(structure, leaves)
    curve = [
        (int(step), loss, float(measure)) for step, loss, measure in json.loads(about["curve"])
    ]
    return _Run(int(about["step"]), moves, optimizer, best, curve)
