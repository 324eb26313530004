"""Means over rows with their intervals, and the share of a fine-tune's gain that is recovered.

Rows (windows of text, or examples) are what is drawn again: tokens of one row depend on each other.
All models are judged on the same draws, so that differences between them are paired. All sums are
float64.
"""

import dataclasses
import math

import numpy as np

# Of every interval: 95 % of draws are inside.
COVERAGE = 0.95
_Z = 1.959963984540054  # the normal distribution's quantile at (1 + COVERAGE) / 2


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and where it would be in 95 of 100 draws of as many rows.

    Attributes:
      value: of the rows that there are; None where it means nothing.
      low, high: the interval; None with too few rows.
      why: why there is no value, in a few words.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    why: str | None = None


@dataclasses.dataclass(frozen=True)
class Draws:
    """How often each row stands in each draw with replacement; float64[R, n].

    The bootstrap of Efron, "Bootstrap methods: another look at the jackknife", 1979; intervals are
    its percentiles.
    """

    counts: np.ndarray

    @classmethod
    def of(cls, rows: int, draws: int, seed: int) -> "Draws":
        """As many draws of `rows` rows; the same for the same seed."""
        rng = np.random.default_rng(seed)
        return cls(rng.multinomial(rows, np.full(rows, 1 / rows), size=draws).astype(np.float64))

    def ratios(self, sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """sum(sums) / sum(weights) in each draw; nan where a draw weighs nothing."""
        below = self.counts @ weights
        return np.divide(
            self.counts @ sums, below, out=np.full(len(below), np.nan), where=below > 0
        )

    def mean(self, sums: np.ndarray, weights: np.ndarray) -> Estimate:
        """A mean per token, say.

        Args:
          sums: float64[n], of each row.
          weights: float64[n], how many tokens each row's sum is over.
        """
        value = float(sums.sum() / weights.sum())
        return Estimate(value, *_between(self.ratios(sums, weights), len(sums)))


def _between(values: np.ndarray, rows: int) -> tuple[float, float] | tuple[None, None]:
    """The percentiles of draws; nothing from fewer than two rows."""
    values = values[~np.isnan(values)]
    if rows < 2 or not values.size:
        return (None, None)
    tail = (1 - COVERAGE) / 2 * 100
    low, high = np.percentile(values, [tail, 100 - tail])
    return (float(low), float(high))


def share(right: np.ndarray) -> Estimate:
    """A share of right answers, float64[n] of 0 and 1, with Wilson's interval: the bootstrap's has
    no width where all are right, or none.

    Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    count = len(right)
    value = float(right.mean())
    middle = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    spread = (
        _Z / (1 + _Z**2 / count) * math.sqrt(value * (1 - value) / count + _Z**2 / (4 * count**2))
    )
    return Estimate(value, max(0.0, middle - spread), min(1.0, middle + spread))


def recovered(
    draws: Draws, base: np.ndarray, model: np.ndarray, tuned: np.ndarray, weights: np.ndarray
) -> Estimate:
    """The share of the fine-tune's gain that a model keeps: (base - model) / (base - tuned).

    1 is the fine-tune's own, 0 the base's; below 0 a model is worse than its base, above 1 better
    than the fine-tune. There is no such share where the fine-tune gains nothing, or so little that
    other rows might show the contrary: then the quotient is noise, whatever its sign.

    Args:
      draws: of these rows.
      base, model, tuned: float64[n], each row's loss: of text its NLL, of tasks 1 for a wrong
        answer and 0 for a right one, which makes the quotient one of accuracies.
      weights: float64[n], tokens of each row, or ones.

    Returns:
      The share. Where there is none it has no value and says why: "no gain" of the fine-tune over
      the base, "gain within chance", or "one row", which cannot tell the two apart.
    """
    gain = draws.mean(base - tuned, weights)
    if gain.value is None or gain.value <= 0:
        return Estimate(None, why="no gain")
    if gain.low is None:
        return Estimate(None, why="one row")
    if gain.low <= 0:
        return Estimate(None, why="gain within chance")
    whole = draws.ratios(base - tuned, weights)
    kept = draws.ratios(base - model, weights)
    # A draw without a gain, at most one in forty here, has no quotient.
    quotients = np.divide(kept, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    value = float((base - model).sum() / (base - tuned).sum())
    return Estimate(value, *_between(quotients, len(base)))
