"""Scale distillation, arXiv:2402.10193, eq. 4: a variant's scales trained so that its logits are
its fine-tune's, mean squared error; both models whole in memory."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.delta.apply import effective_weight
from zen_jax.delta.distill_layers import Samples, Sides
from zen_jax.delta.distill_scales import Loss, Scales, Trained, Training, train_scales
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import fuse, tensor_shapes
from zen_jax.model import make_forward


@functools.lru_cache(maxsize=4)
def _programs(config: ModelConfig) -> tuple[Loss, Callable[..., jax.Array]]:
    """(scales, (tuned, name -> (base, bits or None)), (tokens, counted)) -> the mean square of what
    the logits miss, and, jitted, the sum of KL(fine-tune || variant)."""
    forward = make_forward(config)

    def logits(scales: Scales, fixed: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        tuned, parts = fixed
        tensors = {
            name: value
            if bits is None
            else effective_weight(value, WeightDelta(bits=bits, scale=scales[name]))
            for name, (value, bits) in parts.items()
        }
        return forward(fuse(config, tensors), tokens[:, :-1]), forward(tuned, tokens[:, :-1])

    def loss(scales: Scales, fixed: Any, batch: Any) -> jax.Array:
        tokens, counted = batch
        mine, its = logits(scales, fixed, tokens)
        each = jnp.mean(jnp.square(mine - jax.lax.stop_gradient(its)), axis=-1)
        return jnp.sum(each * counted) / jnp.maximum(jnp.sum(counted), 1)

    def divergence(scales: Scales, fixed: Any, batch: Any) -> jax.Array:
        tokens, counted = batch
        mine, its = (jax.nn.log_softmax(y) for y in logits(scales, fixed, tokens))
        return jnp.sum(jnp.sum(jnp.exp(its) * (its - mine), axis=-1) * counted)

    return loss, jax.jit(divergence)


def distill_logits(
    sides: Sides,
    deltas: Mapping[str, WeightDelta],
    train: Samples,
    held: Samples,
    training: Training,
    *,
    rows: int = 4,
    checkpoint: Path | None = None,
    key: str = "",
    hear: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, WeightDelta], Trained]:
    """Trains the scales of all matrices with signs; the best by KL on held-out text is kept.

    Args:
      sides: the models; all of their tensors are read.
      deltas: what stands in for the variant's own, by tensor.
      train, held: what is trained on and what is compared on.
      training: how.
      rows: of a batch.
      checkpoint: gone on from; see `train_scales`.
      key: likewise.
      hear: called after each step with how many are done, and of how many.

    Returns:
      The matrices with signs with their new scales; and the curve, in which a measure is KL in nats
      a counted token.

    Raises:
      ValueError, FloatingPointError: as `train_scales`.
    """
    config = sides.config
    loss, divergence = _programs(config)
    found = {name: deltas.get(name) or sides.delta(name) for name in tensor_shapes(config)}
    parts, start = {}, {}
    for name, delta in found.items():
        if delta.bits is None or delta.scale is None:
            parts[name] = (sides.whole(name, delta), None)
            continue
        rest = dataclasses.replace(delta, bits=None, scale=None)
        parts[name] = (sides.whole(name, rest), jnp.asarray(_padded(delta, sides.base(name))))
        start[name] = _padded_scale(delta, len(sides.base(name)))
    fixed = (fuse(config, {name: sides.own(name) for name in found}), parts)

    def batches(samples: Samples) -> list[Any]:
        return [(samples.tokens[r], samples.counted[r]) for r in samples.batches(rows)]

    test = batches(held)

    def judge(scales: Scales) -> float:
        return _mean((float(divergence(scales, fixed, batch)) for batch in test), held)

    done = train_scales(
        start,
        loss,
        fixed,
        batches(train),
        judge,
        training,
        checkpoint=checkpoint,
        key=key,
        hear=hear,
    )
    better = {
        name: dataclasses.replace(found[name], scale=_cropped(found[name], done.scales[name]))
        for name in start
    }
    return better, done


def _mean(sums: Iterable[float], samples: Samples) -> float:
    return sum(sums) / max(float(samples.counted.sum()), 1.0)


def _padded(delta: WeightDelta, base: np.ndarray) -> np.ndarray:
    """Signs in the shape of a weight that has rows more than they: those of a tail."""
    bits = np.asarray(delta.bits)
    return np.pad(bits, ((0, 0), (0, len(base) - bits.shape[1]), (0, 0)))


def _padded_scale(delta: WeightDelta, rows: int) -> np.ndarray:
    scale, own = np.asarray(delta.scale, np.float32), np.asarray(delta.bits).shape[1]
    if rows == own:
        return scale
    return np.pad(np.broadcast_to(scale, (len(scale), own)), ((0, 0), (0, rows - own)))


def _cropped(delta: WeightDelta, scale: np.ndarray) -> np.ndarray:
    kept, rows = np.asarray(delta.scale).shape[1], np.asarray(delta.bits).shape[1]
    return scale if kept == scale.shape[1] else scale[:, :rows]
