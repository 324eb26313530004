"""The algebra of LoRA adapters (arXiv:2106.09685), from their factors alone: b a is never formed.

An adapter is a mapping from Hugging Face tensors to `Factors`; what it does not name it leaves as
the base has it. Everything is summed in float64 on the host: factors are thin. Nothing here is
changed in place.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

# Singular values of a product at or below this share of its largest are rounding.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Factors:
    """The task vector b a of one weight [O, I], with its scale in b.

    Attributes:
      a: [R, I], any float type.
      b: [O, R].
    """

    a: np.ndarray
    b: np.ndarray

    def __post_init__(self) -> None:
        if self.a.ndim != 2 or self.b.ndim != 2 or self.a.shape[0] != self.b.shape[1]:
            raise ValueError(
                f"factors have shapes {self.a.shape} and {self.b.shape}; expected [R, I] and [O, R]"
            )

    @property
    def rank(self) -> int:
        """R, which is no less than the rank of the product."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the task vector, [O, I]."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.a.nbytes + self.b.nbytes

    def wide(self) -> "Factors":
        """The same in float64."""
        return Factors(self.a.astype(np.float64), self.b.astype(np.float64))

    def dense(self) -> np.ndarray:
        """float64[O, I]: the task vector itself."""
        wide = self.wide()
        return wide.b @ wide.a


type Adapter = Mapping[str, Factors]


def scaling(rank: int, alpha: float, rslora: bool) -> float:
    """What b a is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732).

    Raises:
      ValueError: the rank is not above 0, or alpha is no finite number.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha is {alpha}; expected a finite number")
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def nbytes(adapter: Adapter) -> int:
    """Bytes of all factors."""
    return sum(factors.nbytes for factors in adapter.values())


def dot(one: Factors, other: Factors) -> float:
    """<b a, b' a'> = trace((b^T b')(a' a^T)), summed in float64.

    Raises:
      ValueError: the task vectors have different shapes.
    """
    if one.shape != other.shape:
        raise ValueError(f"task vectors have shapes {one.shape} and {other.shape}; expected one")
    x, y = one.wide(), other.wide()
    return float(np.sum((x.b.T @ y.b) * (x.a @ y.a.T)))


def norm(factors: Factors) -> float:
    """||b a||, the Euclidean length of the task vector."""
    return math.sqrt(max(dot(factors, factors), 0.0))


def cosine(one: Factors, other: Factors) -> float:
    """The cosine between two task vectors; 0 where one of them is 0."""
    lengths = norm(one) * norm(other)
    return dot(one, other) / lengths if lengths else 0.0


def similarity(one: Adapter, other: Adapter) -> float:
    """The mean cosine over the weights that either adapts, arXiv:2510.13537; one that only one of
    them does counts 0.

    Raises:
      ValueError: neither adapts anything, or task vectors of one weight differ in shape.
    """
    names = one.keys() | other.keys()
    if not names:
        raise ValueError("neither adapter has any factors; there is nothing to compare")
    return sum(cosine(one[n], other[n]) for n in one.keys() & other.keys()) / len(names)


def combine(parts: Sequence[tuple[float, Factors]]) -> Factors:
    """The weighted sum of task vectors, exactly: their factors side by side, of all ranks together.

    Args:
      parts: weights and factors of one shape, at least one.
    """
    if not parts:
        raise ValueError("there are no factors to combine; expected at least one")
    wide = [(weight, factors.wide()) for weight, factors in parts]
    a = np.concatenate([factors.a for _, factors in wide])
    return Factors(a, np.concatenate([weight * factors.b for weight, factors in wide], 1))


def svd(factors: Factors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(U[O, k], s[k], Vt[k, I]) of b a within its numerical rank k, in float64.

    By QR of both factors and the SVD of the small core between: no [O, I] is made. It does not
    depend on the gauge: (b g, g^-1 a) gives the same up to rounding.
    """
    wide = factors.wide()
    left, upper = np.linalg.qr(wide.b)
    right, lower = np.linalg.qr(wide.a.T)
    u, s, vt = np.linalg.svd(upper @ lower.T, full_matrices=False)
    kept = s > _ROUNDING * s[0] if s.size and s[0] > 0 else np.zeros(s.shape, bool)
    return left @ u[:, kept], s[kept], vt[kept] @ right.T


def cut(factors: Factors, rank: int) -> Factors:
    """The best approximation of a rank (Eckart and Young), with the singular values shared evenly
    between the two; itself where it has no more.

    Args:
      factors: a task vector.
      rank: of the result at most, at least 1; less where the task vector has less.

    Returns:
      float64.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1")
    if factors.rank <= rank:
        return factors.wide()
    u, s, vt = svd(factors)
    root = np.sqrt(s[:rank])
    if not root.size:  # the zero task vector keeps a row of zeros
        return Factors(np.zeros((1, factors.shape[1])), np.zeros((factors.shape[0], 1)))
    return Factors(root[:, None] * vt[:rank], u[:, :rank] * root)


def cast(adapter: Adapter, dtype: np.dtype) -> dict[str, Factors]:
    """All factors rounded to a type, once."""
    return {n: Factors(f.a.astype(dtype), f.b.astype(dtype)) for n, f in adapter.items()}


def weights_in(adapters: Iterable[Adapter]) -> list[str]:
    """The weights that any of them adapts, in order."""
    return sorted({name for adapter in adapters for name in adapter})
