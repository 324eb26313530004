"""Whether one model is a fine-tune of another, told from figures of their matrices.

A fine-tune keeps nearly all signs of its base, and what it adds is smaller than what was there. Of
two models that have nothing to do with each other, half the signs agree by chance, and the
difference is as long as the two together: ||t - b||^2 = ||t||^2 + ||b||^2, so at least ||b||.

Measured over the layers' matrices of a four-layer model of 2.6 million weights, trained for 1,800
steps:

    pair                                            difference/base   signs kept   energy left
    14 fine-tunes, the nearest (arithmetic)         0.07              97.7 %       0.32
    14 fine-tunes, the farthest (German)            0.30              90.7 %       0.36
    another training of 120 steps from its start    0.93              61.6 %       0.37
    such a training from another start              1.08              50.0 %       0.37
    its own layers, each against the next           1.41              50.1 %       0.36
    its own rows, shuffled                          1.40              50.7 %       0.37
    random weights of the same spread               1.41              50.0 %       0.36
    random weights a tenth as large                 1.00              50.0 %       0.37

and for SmolLM2-135M 1.41 and 50 % with its layers against the next, its rows shuffled, or random
weights. So the limits stand between, at 0.65 and 70 %, and both have to be passed: a model that was
only made larger, or one that was trained for very long, is not refused. The share of zeros and the
energy that 1 bit leaves say nothing of kinship (0 to 3 % and about a third in either case); neither
does the entropy of the difference's signs (1 bit). They are reported all the same: many zeros come
from small updates of bfloat16 weights, and few bits of entropy from a constant shift.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

FARTHEST = 0.65
FEWEST_SIGNS = 0.7
# Elements of a matrix that are looked at, in rows spread evenly over it.
_SAMPLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Kinship:
    """How a tuned matrix, or several together, stand to the base's.

    Attributes:
      elements: how many there are, looked at or not.
      base_square: mean square of the base's elements.
      delta_square: of the difference's.
      scale: mean of the difference's absolute values.
      explained: mean square of what signs with one scale a row say of the difference.
      zeros: share of differences that are exactly 0.
      signs_kept: share of elements that have the same sign in both.
      rising: share of differences above 0 among those that are not 0.
    """

    elements: int
    base_square: float
    delta_square: float
    scale: float
    explained: float
    zeros: float
    signs_kept: float
    rising: float

    @property
    def distance(self) -> float:
        """||tuned - base|| / ||base||, at most 1e9."""
        return _ratio(math.sqrt(self.delta_square), math.sqrt(self.base_square))

    @property
    def scale_over_base(self) -> float:
        """The mean scale over the base's root mean square, at most 1e9."""
        return _ratio(self.scale, math.sqrt(self.base_square))

    @property
    def energy_left(self) -> float:
        """Share of the difference's energy that one level of signs and row scales leaves."""
        if not self.delta_square:
            return 0.0
        return max(0.0, 1 - self.explained / self.delta_square)

    @property
    def sign_entropy(self) -> float:
        """Bits that the sign of a difference tells, 1 when both are as frequent."""
        shares = (self.rising, 1 - self.rising)
        return abs(sum(share * math.log2(share) for share in shares if share > 0))

    @property
    def unrelated(self) -> bool:
        """Whether the figures are those of two models that have nothing to do with each other."""
        return self.distance > FARTHEST and self.signs_kept < FEWEST_SIGNS

    def report(self) -> dict[str, float]:
        """The figures that manifests keep."""
        names = ("distance", "signs_kept", "scale_over_base", "zeros", "sign_entropy")
        return {name: round(getattr(self, name), 9) for name in (*names, "energy_left")}

    def __str__(self) -> str:
        return (
            f"difference over base {self.distance:.3f}, signs kept {self.signs_kept:.1%}, "
            f"scale over base {self.scale_over_base:.2e}, differences of 0 {self.zeros:.1%}, "
            f"entropy of signs {self.sign_entropy:.3f} bits, energy left {self.energy_left:.1%}"
        )


def _ratio(one: float, other: float) -> float:
    return min(one / other, 1e9) if other else 1e9 * bool(one)


def compare(base: np.ndarray, tuned: np.ndarray) -> Kinship:
    """Figures of one matrix, from rows spread evenly over it.

    Args:
      base: [O, I], any float type.
      tuned: [O, I], any float type.

    Raises:
      ValueError: a difference is not finite.
    """
    step = max(1, base.size // _SAMPLE)
    start, end = base[::step].astype(np.float32), tuned[::step].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # looked for below
        delta = end - start
    absolute = np.abs(delta).mean(axis=1, dtype=np.float64)
    moved, square = np.count_nonzero(delta), float(np.mean(np.square(delta, dtype=np.float64)))
    if not math.isfinite(square):
        raise ValueError(
            "a difference is not finite; look for NaN or infinity in either checkpoint"
        )
    return Kinship(
        elements=base.size,
        base_square=float(np.mean(np.square(start, dtype=np.float64))),
        delta_square=square,
        scale=float(absolute.mean()),
        explained=float(np.square(absolute).mean()),
        zeros=1 - moved / delta.size,
        signs_kept=float(np.mean(np.sign(start) == np.sign(end))),
        rising=float(np.count_nonzero(delta > 0) / moved) if moved else 0.5,
    )


def together(parts: Sequence[Kinship]) -> Kinship:
    """Figures of several matrices as of one.

    Raises:
      ValueError: there are none.
    """
    if not parts:
        raise ValueError("no matrices to take together")
    total = sum(part.elements for part in parts)

    def mean(name: str, weights: Sequence[float]) -> float:
        every = sum(weights)
        values = [getattr(part, name) for part in parts]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / every if every else 0.5

    sizes = [float(part.elements) for part in parts]
    names = ("base_square", "delta_square", "scale", "explained", "zeros", "signs_kept")
    moved = [part.elements * (1 - part.zeros) for part in parts]
    return Kinship(total, **{n: mean(n, sizes) for n in names}, rising=mean("rising", moved))
