"""The one leaf type that the store, the bank and ``linear()`` share: what a variant adds to one
weight of the base."""

import dataclasses
from typing import Any

import jax

from pallas_kernels.bitdelta_matmul.bank import KernelBank

# A NumPy or JAX array; which of the two is the business of who holds it.
Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightDelta:
    """What is added to one weight W[*out, I] of the base; the parts add up, and all None means the
    base's own tensor.

    In a bank every part has one more axis in front, M, the resident variants.

    Attributes:
      bits: uint8[levels, *out, ceil(I / 8)], signs as `pallas_kernels.packing` defines them; 1 is
        +1.
      scale: float32[levels, *out], or float32[levels, 1, ...] for one scale a matrix.
      low_rank: (a[R, I], b[*out, R]) in float32 or bfloat16; adds b @ a.
      dense: [*out, I], the difference itself.
      tail: [E, I], the last E output rows themselves, where the base has none: rows of a larger
        vocabulary. The base's rows there are zeros.
      kernel: signs and scales in the order of the Hopper kernels in the place of `bits` and
        `scale`; on the device only, see `zen_jax.delta.kernel_order`.
    """

    bits: Array | None = None
    scale: Array | None = None
    low_rank: tuple[Array, Array] | None = None
    dense: Array | None = None
    tail: Array | None = None
    kernel: KernelBank | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) != (self.scale is None):
            raise ValueError("bits and scale belong together; one of them is None")

    @property
    def empty(self) -> bool:
        """Whether nothing is added: the base's tensor is used as it is."""
        return not jax.tree.leaves(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(int(part.nbytes) for part in jax.tree.leaves(self))
