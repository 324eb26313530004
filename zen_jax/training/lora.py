"""LoRA fine-tuning (arXiv:2106.09685): thin factors beside chosen matrices are trained, the base is
not. The loop is `zen_jax.training.finetune.train`'s.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.layout import Params, fuse, tensor_shapes
from zen_jax.merge.lora import scaling
from zen_jax.training.batches import Batch
from zen_jax.training.finetune import Batches, Keeper, Loss, TrainConfig, make_loss, train

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# By weight: "a" [R, I] and "b" [O, R], without the scale.
Trained = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is trained.

    Attributes:
      rank: R of every pair of factors.
      alpha: b a is multiplied by alpha / R.
      targets: the last part of the modules that get factors.
      rslora: multiplied by alpha / sqrt(R) instead.
      seed: of the start.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = LAYERS
    rslora: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(LAYERS))
        if unknown or not self.targets:
            raise ValueError(f"targets are {self.targets}; expected some of {', '.join(LAYERS)}")
        scaling(self.rank, self.alpha, self.rslora)

    @property
    def scale(self) -> float:
        """What b a is multiplied by."""
        return scaling(self.rank, self.alpha, self.rslora)

    def weights(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of the weights that get factors."""
        return {
            name: shape
            for name, shape in tensor_shapes(config).items()
            if name.removesuffix(".weight").rsplit(".", 1)[-1] in self.targets and len(shape) == 2
        }


@dataclasses.dataclass(frozen=True)
class LoraResult:
    """What a run gives.

    Attributes:
      factors: float32 by weight, see `Trained`.
      losses: mean loss of each step done in this call.
      held_out: (step, loss) pairs.
    """

    factors: Mapping[str, Mapping[str, np.ndarray]]
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]


def start(config: ModelConfig, lora: LoraConfig) -> Trained:
    """PEFT's start: a uniform within 1 / sqrt(I), b zero, so that the first step sees the base."""
    rng = np.random.default_rng(lora.seed)
    made: Trained = {}
    for name, (rows, size) in lora.weights(config).items():
        bound = size**-0.5
        a = rng.uniform(-bound, bound, (lora.rank, size)).astype(np.float32)
        made[name] = {"a": a, "b": np.zeros((rows, lora.rank), np.float32)}
    return made


def with_factors(
    config: ModelConfig, base: Mapping[str, Any], factors: Trained, scale: float
) -> Params:
    """float32 ``Params`` of W + scale b a; differentiable in the factors.

    Args:
      config: the model.
      base: its Hugging Face tensors, any float type.
      factors: by weight.
      scale: of b a.
    """
    whole = {name: jnp.asarray(value, jnp.float32) for name, value in base.items()}
    for name, pair in factors.items():
        product = jnp.matmul(pair["b"], pair["a"], precision=jax.lax.Precision.HIGHEST)
        whole[name] = whole[name] + scale * product
    return fuse(config, whole)


def lora_loss(
    config: ModelConfig, base: Mapping[str, Any], lora: LoraConfig, dtype: jax.typing.DTypeLike
) -> Loss:
    """``loss(factors, batches)``: that of the model with the factors on."""
    loss = make_loss(config, dtype)
    held = {name: jnp.asarray(value) for name, value in base.items()}

    def whole(factors: Trained, batches: tuple[Batch, ...]) -> jax.Array:
        return loss(with_factors(config, held, factors, lora.scale), batches)

    return whole


def train_lora(
    config: ModelConfig,
    base: Mapping[str, np.ndarray],
    batches: Batches,
    settings: TrainConfig,
    lora: LoraConfig,
    *,
    held_out: tuple[Batch, ...] = (),
    checkpoint: Path | Keeper | None = None,
    title: str = "lora",
    progress: bool = True,
) -> LoraResult:
    """Trains an adapter of a base, from a checkpoint if there is one.

    Args:
      config: the model.
      base: its Hugging Face tensors as stored; not changed.
      batches: step -> what that step sees; has to be a pure function.
      settings: how.
      lora: what.
      held_out, checkpoint, title, progress: as for `zen_jax.training.finetune.train`.

    Raises:
      ValueError: no weight of this model is among the targets, or the checkpoint is of another run.
      FloatingPointError: a loss is not finite.
    """
    first = start(config, lora)
    if not first:
        raise ValueError(f"none of {', '.join(lora.targets)} is a module of this model")
    done = train(
        config,
        first,
        batches,
        settings,
        held_out=held_out,
        checkpoint=checkpoint,
        title=title,
        progress=progress,
        loss=lora_loss(config, base, lora, settings.dtype),
    )
    factors = jax.tree.map(np.asarray, done.params)
    return LoraResult(factors, done.losses, done.held_out)
