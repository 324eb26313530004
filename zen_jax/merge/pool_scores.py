"""M of an adapter: its score on tasks, with the base and the factors bound together."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import bind
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import Params, fuse, fuse_delta
from zen_jax.merge.lora import Adapter, Factors
from zen_jax.merge.pool_change import Score, Tasks


def padded(factors: Factors, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(a float32[rank, I], b float32[O, rank]) with zeros behind: equal shapes compile once."""
    more = rank - factors.rank
    a, b = factors.a.astype(np.float32), factors.b.astype(np.float32)
    return np.pad(a, ((0, max(more, 0)), (0, 0))), np.pad(b, ((0, 0), (0, max(more, 0))))


def deltas_of(config: ModelConfig, names: Mapping[str, Any], adapter: Adapter, rank: int) -> Params:
    """An adapter as a tree of `WeightDelta` in the shape of ``Params``.

    Args:
      config: the base's architecture.
      names: its Hugging Face tensors.
      adapter: the factors.
      rank: each weight's is filled up to it.

    Raises:
      ValueError: the adapter has weights that the base lacks, or of other shapes.
    """
    strange = sorted(set(adapter) - set(names))
    if strange:
        raise ValueError(f"the base has no {', '.join(strange[:3])}; is it another base's adapter?")
    deltas = {
        name: WeightDelta(low_rank=padded(adapter[name], rank))
        if name in adapter
        else WeightDelta()
        for name in names
    }
    return fuse_delta(config, deltas)


def scorer(config: ModelConfig, base: Mapping[str, np.ndarray], rank: int) -> Score:
    """M of adapters of a base.

    Args:
      config: its architecture.
      base: its Hugging Face tensors, as stored.
      rank: of a merge at most.
    """
    params = fuse(config, dict(base))
    top = functools.partial(deltas_of, config, base)

    def score(adapter: Adapter, tasks: Tasks) -> float:
        most = max([rank, *(factors.rank for factors in adapter.values())])
        bound = bind(params, top(adapter, most))
        if tasks.metric == "text":
            windows = np.asarray(tasks.examples, np.int32)
            return 2 ** -evaluate.bits_per_byte(config, bound, windows)
        return evaluate.exact_match(config, bound, tasks.examples, batch=64)

    return score
