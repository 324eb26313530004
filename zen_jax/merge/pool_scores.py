"""M of an adapter: its score on tasks, with the base and the factors bound together."""

import functools
from collections.abc import Collection, Mapping

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


def deltas_of(config: ModelConfig, names: Collection[str], adapter: Adapter, rank: int) -> Params:
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
    return scorer_of(config, fuse(config, dict(base)), base, rank)


def scorer_of(config: ModelConfig, params: Params, names: Collection[str], rank: int) -> Score:
    """M of adapters of a base that is in memory already; no weight of it is copied.

    Args:
      config: its architecture.
      params: its arrays, on one device.
      names: of its Hugging Face tensors.
      rank: of a merge at most.
    """
    top = functools.partial(deltas_of, config, names)

    def score(adapter: Adapter, tasks: Tasks) -> float:
        if tasks.largest >= config.vocab_size:
            raise ValueError(
                f"tasks have the token id {tasks.largest}; the base has {config.vocab_size}"
            )
        most = max([rank, *(factors.rank for factors in adapter.values())])
        bound = bind(params, top(adapter, most))
        if tasks.metric == "text":
            windows = np.asarray(tasks.examples, np.int32)
            return 2 ** -evaluate.bits_per_byte(config, bound, windows)
        return evaluate.exact_match(config, bound, tasks.examples, _rows(config, tasks))

    return score


def _rows(config: ModelConfig, tasks: Tasks) -> int:
    """Of a forward pass: 64, or fewer where their logits would pass 128 MB."""
    longest = max(1 + len(prompt) + len(answer) for prompt, answer in tasks.examples)
    return max(1, min(64, 2**27 // (4 * config.vocab_size * longest)))
