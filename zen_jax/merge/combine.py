"""Adapters combined at once by their factors, as PEFT's add_weighted_adapter does; for comparison.

Both take a and b each for itself, so cross terms of different adapters come in: a merge of task
vectors (`zen_jax.merge.opcm_lora`) has none. Each of n adapters has the weight 1 / n, of which a
and b get the root.
"""

from collections.abc import Callable, Sequence

import numpy as np

from zen_jax.merge.lora import Adapter, Factors, weights_in

DENSITY = 0.5


def linear(adapters: Sequence[Adapter]) -> dict[str, Factors]:
    """PEFT's "linear": sums of the factors.

    Args:
      adapters: of the same weights and ranks, the scale in b.

    Raises:
      ValueError: ranks or weights differ.
    """
    return _combined(adapters, lambda parts: np.sum(parts, 0))


def ties(adapters: Sequence[Adapter], density: float = DENSITY) -> dict[str, Factors]:
    """PEFT's "ties" (arXiv:2306.01708): of each factor the largest values are kept, the sign of
    their sum is elected by their total, and the mean is of those that have it.

    Args:
      adapters: of the same weights and ranks, the scale in b.
      density: share of each factor's values that is kept.

    Raises:
      ValueError: ranks or weights differ, or the density is not in (0, 1].
    """
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}; expected a share above 0")
    return _combined(adapters, lambda parts: _ties(parts, density))


def _combined(
    adapters: Sequence[Adapter], combine: Callable[[list[np.ndarray]], np.ndarray]
) -> dict[str, Factors]:
    made: dict[str, Factors] = {}
    root = (1 / len(adapters)) ** 0.5
    for name in weights_in(adapters):
        if any(name not in adapter for adapter in adapters):
            raise ValueError(f"{name} is not adapted by all; PEFT combines like adapters only")
        parts = [adapter[name] for adapter in adapters]
        if len({part.rank for part in parts}) > 1:
            raise ValueError(f"{name} has ranks {[p.rank for p in parts]}; expected one")
        # PEFT's b is not scaled; where all scales are one s, root(s) goes to each side.
        a = combine([root * part.a.astype(np.float64) for part in parts])
        b = combine([root * part.b.astype(np.float64) for part in parts])
        made[name] = Factors(a, b)
    return made


def _ties(parts: list[np.ndarray], density: float) -> np.ndarray:
    kept = np.stack([_largest(part, density) for part in parts])
    elected = np.sign(kept.sum(0))
    elected = np.where(elected == 0, 1, elected)
    agree = np.sign(kept) == elected
    count = np.maximum(agree.sum(0), 1)
    return np.where(agree, kept, 0).sum(0) / count


def _largest(part: np.ndarray, density: float) -> np.ndarray:
    """The largest values by magnitude, the others 0."""
    count = int(density * part.size)
    order = np.argsort(-np.abs(part), axis=None, kind="stable")[:count]
    kept = np.zeros(part.size)
    kept[order] = part.reshape(-1)[order]
    return kept.reshape(part.shape)
