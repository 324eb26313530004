"""The fused products on the CPU: `cpu.cc` through XLA's FFI.

Rows in float32 or bfloat16 over a bfloat16 or float32 weight. `reconstruct` chooses between the two
forms: False keeps the base's sum and the signs' apart (signs against 8-bit sums of four
activations, see cpu_tables.h: for few rows of any variants), True makes the effective weight in
float32 a tile at a time (for many rows). In either form the order of a row's sums depends on
nothing but the input size, so that a row's result has the same bits in any batch.

Rows in bfloat16 over a bfloat16 weight are multiplied in bfloat16 with float32 sums where the
processor can (VDPBF16PS), and in float32 elsewhere. In the second form the effective weight is then
rounded where that leaves the delta, and elsewhere the signs are looked up; see cpu_prompt.h.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu_build, target
from pallas_kernels.bitdelta_matmul import reference
from pallas_kernels.bitdelta_matmul.bank import SignBank

_TARGETS = {
    "zen_base_matmul": "ZenBaseMatmul",
    "zen_bitdelta_matmul": "ZenBitdeltaMatmul",
    "zen_bitdelta_embed": "ZenBitdeltaEmbed",
    "zen_read_all": "ZenReadAll",
}


def available() -> bool:
    """Whether the kernel was built and what is traced is for the CPU."""
    return target.platform() == "cpu" and built()


@functools.cache
def built() -> bool:
    """Whether there is a library; it is made known to XLA."""
    library = cpu_build.load("bitdelta_matmul")
    if library is None:
        return False
    for name, symbol in _TARGETS.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return True


def takes(x: jax.Array, w: jax.Array) -> bool:
    """Whether the kernel has a form for these dtypes."""
    known = (jnp.bfloat16, jnp.float32)
    return x.dtype in known and w.dtype in known


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def base_matmul(x: jax.Array, w: jax.Array, reconstruct: bool, portable: bool = False) -> jax.Array:
    """x[R, I], w[O, I] -> float32[R, O].

    Args:
      x: float32 or bfloat16.
      w: bfloat16 or float32.
      reconstruct: the form for many rows; see above.
      portable: run the plain loops also where AVX-512 is there; float32 rows get the same bits.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("zen_base_matmul", out)
    return call(x, w, reconstruct=reconstruct, portable=portable)


def _base_forward(
    x: jax.Array, w: jax.Array, reconstruct: bool, portable: bool
) -> tuple[jax.Array, tuple]:
    return base_matmul(x, w, reconstruct, portable), (x, w)


def _base_backward(reconstruct: bool, portable: bool, saved: tuple, g: jax.Array) -> tuple:
    x, w = saved
    return reference.base_backward(x, w, g)


base_matmul.defvjp(_base_forward, _base_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def bitdelta_matmul(
    x: jax.Array,
    w: jax.Array,
    bank: SignBank,
    slots: jax.Array,
    reconstruct: bool,
    portable: bool = False,
) -> jax.Array:
    """x[R, I] with each row's variant -> float32[R, O].

    Args:
      x: float32 or bfloat16.
      w: bfloat16 or float32 [O, I].
      bank: signs and scales.
      slots: int32[R], in any order; one outside 0..M-1 reads as the base.
      reconstruct: the form for many rows; see above.
      portable: run the plain loops also where AVX-512 is there; float32 rows get the same bits.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("zen_bitdelta_matmul", out)
    return call(x, w, *bank, slots, reconstruct=reconstruct, portable=portable)


def _forward(
    x: jax.Array,
    w: jax.Array,
    bank: SignBank,
    slots: jax.Array,
    reconstruct: bool,
    portable: bool,
) -> tuple[jax.Array, tuple]:
    return bitdelta_matmul(x, w, bank, slots, reconstruct, portable), (x, w, bank, slots)


def _backward(reconstruct: bool, portable: bool, saved: tuple, g: jax.Array) -> tuple:
    x, w, bank, slots = saved
    dx, dw, dscale = reference.bitdelta_backward(x, w, bank, slots, g)
    none: list[Any] = [np.zeros(a.shape, jax.dtypes.float0) for a in (bank.bits, slots)]
    return dx, dw, SignBank(none[0], dscale), none[1]


bitdelta_matmul.defvjp(_forward, _backward)


def bitdelta_embed(ids: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array) -> jax.Array:
    """As `reference.bitdelta_embed`; not differentiable."""
    out = jax.ShapeDtypeStruct((*ids.shape, w.shape[1]), jnp.float32)
    rows = jnp.broadcast_to(slots[:, None], ids.shape)
    return jax.ffi.ffi_call("zen_bitdelta_embed", out)(ids, w, *bank, rows)


def read_all(array: jax.Array) -> jax.Array:
    """Reads an array with all threads and does nothing else -> float32[]; for benchmarks."""
    return jax.ffi.ffi_call("zen_read_all", jax.ShapeDtypeStruct((), jnp.float32))(array)
