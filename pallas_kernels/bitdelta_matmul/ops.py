"""The products that the model calls: one function each, and who computes it.

"reference" is plain XLA and runs everywhere. "cpu" is our kernel, for few rows, where XLA would
spend most of its time on unpacking or converting; with many rows XLA's own product of unpacked
tiles is faster. "auto" chooses when a program is traced.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.bitdelta_matmul import cpu, reference

Implementation = Literal["auto", "reference", "cpu"]

# Rows up to which the CPU kernel is taken.
CPU_ROWS = 64


def base_matmul(x: jax.Array, w: jax.Array, implementation: Implementation = "auto") -> jax.Array:
    """x[B, T, I] W[O, I]^T -> float32[B, T, O].

    Args:
      x: float.
      w: float.
      implementation: who computes it.

    Raises:
      ValueError: the implementation is unknown, or not to be had for these dtypes here.
    """
    rows = x.shape[0] * x.shape[1]
    # Of one dtype, XLA's product is fast, but for one row of bfloat16, which this path never has.
    wanted = x.dtype != w.dtype and rows <= CPU_ROWS
    if _on_cpu(implementation, x, w, wanted):
        return cpu.base_matmul(x, w)
    return reference.base_matmul(x, w)


def bitdelta_matmul_mixed(
    x: jax.Array,
    w: jax.Array,
    bits: jax.Array,
    scale: jax.Array,
    slots: jax.Array,
    implementation: Implementation = "auto",
) -> jax.Array:
    """x W^T plus each row's own alpha (x S^T) -> float32[B, T, O].

    Args:
      x: float[B, T, I]; row b belongs to the variant in slot b.
      w: float[O, I].
      bits: uint8[M, levels, O, ceil(I / 8)].
      scale: float32[M, levels, O].
      slots: int32[B]; one outside 0..M-1 reads as the base.
      implementation: who computes it.

    Raises:
      ValueError: the implementation is unknown, or not to be had for these dtypes here.
    """
    if _on_cpu(implementation, x, w, x.shape[0] * x.shape[1] <= CPU_ROWS):
        return cpu.bitdelta_matmul_mixed(x, w, bits, scale, slots)
    if x.shape[0] > 1:
        return reference.bitdelta_matmul_mixed(x, w, bits, scale, slots)
    # One variant: its signs are unpacked once for all tokens.
    valid = (slots[0] >= 0) & (slots[0] < bits.shape[0])
    one = jnp.where(valid, slots[0], 0)
    return reference.bitdelta_matmul(x, w, bits[one], jnp.where(valid, scale[one], 0.0))


def _on_cpu(implementation: str, x: jax.Array, w: jax.Array, wanted: bool) -> bool:
    match implementation:
        case "auto":
            return wanted and cpu.takes(x, w) and cpu.available()
        case "reference":
            return False
        case "cpu" if cpu.takes(x, w) and cpu.available():
            return True
        case "cpu":
            raise ValueError(
                f"no CPU kernel for x {x.dtype} and w {w.dtype} here; it takes float32 rows over "
                "a bfloat16 or float32 weight, and has to be built: python -m "
                "pallas_kernels.cpu_build"
            )
        case _:
            raise ValueError(
                f"implementation is {implementation!r}; expected 'auto', 'reference' or 'cpu'"
            )
