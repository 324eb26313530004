"""MonoSoup and truncated soup: two methods that share nothing but singular values.

MonoSoup (arXiv:2602.09689) cleans one checkpoint: the part of its delta in the few directions that
carry most is kept nearly whole, what lies in the others is kept in part. Truncated soup is a mean
of several checkpoints' deltas, each cut to its best approximation of a rank; this project's
specification calls that MonoSoup too. Neither stands in for the other.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import jax
import numpy as np

from zen_jax.merge.folding import Figures, Fold, MeanFold, merge_arrays
from zen_jax.merge.spectrum import leading, reweigh, spectrum

Rank = Literal["effective", "energy"]
# A count that is whole but for rounding is not rounded up.
_WHOLE = 1e-9


@dataclasses.dataclass(frozen=True)
class Split:
    """What becomes of a delta's singular values.

    Attributes:
      rank: k, the head's.
      energy: P, the head's share of ||delta||^2.
      rho: (s[k+1] / s[1])^2; 0 if there is no tail.
      low: what the tail is multiplied by.
      high: what the head is multiplied by, 1 - low.
    """

    rank: int
    energy: float
    rho: float
    low: float

    @property
    def high(self) -> float:
        """What the head is multiplied by."""
        return 1.0 - self.low

    def weights(self, count: int) -> np.ndarray:
        """float64[count]: what each singular value is multiplied by."""
        return np.where(np.arange(count) < self.rank, self.high, self.low)


def split_values(values: np.ndarray, rank: Rank = "effective", energy: float = 0.8) -> Split:
    """Where MonoSoup cuts a spectrum, and what it gives to either side (arXiv:2602.09689).

    p = s / sum(s); "effective" takes k = ceil(exp(entropy of p)), "energy" the least k whose share
    of sum(s^2) reaches `energy`. low = rho + (1 - rho) sqrt(1 - P).

    Args:
      values: singular values, descending, not all 0.
      rank: how k is found.
      energy: in (0, 1].
    """
    squares = values**2
    total = float(squares.sum())
    if rank == "energy":
        reached = np.cumsum(squares) >= energy * total * (1 - _WHOLE)
        k = int(np.argmax(reached)) + 1 if reached.any() else len(values)
    else:
        p = values[values > 0] / values.sum()
        k = math.ceil(math.exp(-float((p * np.log(p)).sum())) * (1 - _WHOLE))
    k = min(max(k, 1), len(values))
    # Summed apart: 1 - P would lose what is small.
    tail = float(squares[k:].sum()) / total
    rho = float((values[k] / values[0]) ** 2) if k < len(values) else 0.0
    return Split(k, 1.0 - tail, rho, rho + (1.0 - rho) * math.sqrt(tail))


@dataclasses.dataclass(frozen=True)
class MonoSoup:
    """MonoSoup of one checkpoint; of several, the mean of each one's.

    Attributes:
      rank: "effective" or "energy".
      energy: the share that "energy" has to reach.
    """

    rank: Rank = "effective"
    energy: float = 0.8
    name, single = "monosoup", True

    def __post_init__(self) -> None:
        if self.rank not in get_args(Rank):
            raise ValueError(f"rank is {self.rank!r}; expected one of {', '.join(get_args(Rank))}")
        if not 0 < self.energy <= 1:
            raise ValueError(f"energy is {self.energy}; expected a share in (0, 1]")

    def fold(self, name: str) -> Fold:
        """See `zen_jax.merge.folding.Method`."""
        return _MonoSoupFold(self)


class _MonoSoupFold(MeanFold):
    def __init__(self, method: MonoSoup) -> None:
        super().__init__()
        self._method = method

    def add(self, delta: jax.Array) -> Figures:
        if delta.ndim == 1:
            return super().add(delta)
        found = spectrum(delta)
        if not found.values[0]:
            super().add(delta)
            return {"rank": 0, "energy": 1.0, "low": 0.0, "how": found.how}
        split = split_values(found.values, self._method.rank, self._method.energy)
        # Without a tail nothing is changed, so nothing is rounded either.
        whole = split.low == 0.0
        super().add(delta if whole else reweigh(delta, found, split.weights(len(found.values))))
        figures = {name: getattr(split, name) for name in ("rank", "energy", "rho", "low")}
        return {**figures, "how": found.how}


@dataclasses.dataclass(frozen=True)
class TruncatedSoup:
    """The mean of deltas, each cut to its best approximation of a rank; vectors are not cut.

    Attributes:
      rank: r, at least 1; from min(O, I) on this is the plain mean.
    """

    rank: int
    name, single = "truncated-soup", False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; expected a whole number, at least 1")

    def fold(self, name: str) -> Fold:
        """See `zen_jax.merge.folding.Method`."""
        return _TruncatedFold(self.rank, name)


class _TruncatedFold(MeanFold):
    def __init__(self, rank: int, name: str) -> None:
        super().__init__()
        self._rank, self._name = rank, name

    def add(self, delta: jax.Array) -> Figures:
        if delta.ndim == 1:
            return super().add(delta)
        cut, energy, how = leading(delta, self._rank, self._name)
        super().add(cut)
        return {"rank": min(self._rank, *delta.shape), "energy": energy, "how": how}


def monosoup(base: Any, tuned: Any, rank: Rank = "effective", energy: float = 0.8) -> np.ndarray:
    """MonoSoup of one matrix, as published in arXiv:2602.09689.

    With delta = tuned - base = U S V^T, head its first k singular directions and tail the rest:
    base + (1 - low) head + low tail, see `split_values`. A vector, and a matrix with
    ||delta|| / ||base|| < 1e-6, come back as they were tuned.

    Args:
      base: [O, I] or [D], any float type; not changed.
      tuned: of the same shape; not changed.
      rank: how the head's rank is found, "effective" or "energy".
      energy: the least share of ||delta||^2 that the head has under "energy", in (0, 1].

    Returns:
      [O, I] or [D], float64 if one of them is, else float32.

    Raises:
      ValueError: shapes differ, a value is not finite, or an option has a value it cannot have.
    """
    return merge_arrays(MonoSoup(rank, energy), base, [tuned])


def truncated_soup(base: Any, tuned_list: Iterable[Any], rank: int, name: str = "") -> np.ndarray:
    """base + mean_i of the best rank-r approximation of tuned_i - base.

    Args:
      base: [O, I] or [D], any float type; not changed.
      tuned_list: arrays of its shape, held one at a time; not changed.
      rank: r, at least 1. At min(O, I) and above this is the plain mean.
      name: what the random sketch of large matrices is seeded by.

    Returns:
      [O, I] or [D], float64 if one of them is, else float32.

    Raises:
      ValueError: there is no checkpoint, shapes differ, a value is not finite, or the rank is none.
    """
    return merge_arrays(TruncatedSoup(rank), base, tuned_list, name)
