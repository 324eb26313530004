"""The fused products on the CPU: `cpu.cc` through XLA's FFI.

float32 rows over a bfloat16 or float32 weight. The order of a row's sums depends on nothing but
the input size, so a row's result has the same bits in any batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu_build
from pallas_kernels.bitdelta_matmul import reference

_TARGETS = {"zen_base_matmul": "ZenBaseMatmul", "zen_bitdelta_matmul": "ZenBitdeltaMatmul"}


@functools.cache
def available() -> bool:
    """Whether the kernel was built and this process computes on the CPU."""
    if jax.default_backend() != "cpu":
        return False
    library = cpu_build.load("bitdelta_matmul")
    if library is None:
        return False
    for name, symbol in _TARGETS.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return True


def takes(x: jax.Array, w: jax.Array) -> bool:
    """Whether the kernel has a form for these dtypes."""
    return x.dtype == jnp.float32 and w.dtype in (jnp.bfloat16, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def base_matmul(x: jax.Array, w: jax.Array, portable: bool = False) -> jax.Array:
    """x float32[..., I], w[O, I] -> float32[..., O].

    Args:
      x: rows.
      w: bfloat16 or float32.
      portable: run the plain loops also where AVX-512 is there; the bits are the same.
    """
    out = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("zen_base_matmul", out)(x, w, portable=portable)


def _base_forward(x: jax.Array, w: jax.Array, portable: bool) -> tuple[jax.Array, tuple]:
    return base_matmul(x, w, portable), (x, w)


def _base_backward(portable: bool, saved: tuple, g: jax.Array) -> tuple:
    return jax.vjp(reference.base_matmul, *saved)[1](g)


base_matmul.defvjp(_base_forward, _base_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def bitdelta_matmul_mixed(
    x: jax.Array,
    w: jax.Array,
    bits: jax.Array,
    scale: jax.Array,
    slots: jax.Array,
    portable: bool = False,
) -> jax.Array:
    """As `reference.bitdelta_matmul_mixed`: x float32[B, T, I] -> float32[B, T, O].

    Args:
      x: rows; those of one b share a slot.
      w: bfloat16 or float32 [O, I].
      bits: uint8[M, levels, O, ceil(I / 8)].
      scale: float32[M, levels, O].
      slots: int32[B].
      portable: run the plain loops also where AVX-512 is there; the bits are the same.
    """
    out = jax.ShapeDtypeStruct((*x.shape[:2], w.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("zen_bitdelta_matmul", out)
    return call(x, w, bits, scale, slots, portable=portable)


def _mixed_forward(
    x: jax.Array,
    w: jax.Array,
    bits: jax.Array,
    scale: jax.Array,
    slots: jax.Array,
    portable: bool,
) -> tuple[jax.Array, tuple]:
    saved = (x, w, bits, scale, slots)
    return bitdelta_matmul_mixed(*saved, portable), saved


def _mixed_backward(portable: bool, saved: tuple, g: jax.Array) -> tuple:
    x, w, bits, scale, slots = saved

    def product(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        return reference.bitdelta_matmul_mixed(x, w, bits, scale, slots)

    dx, dw, dscale = jax.vjp(product, x, w, scale)[1](g)
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in (bits, slots)]
    return dx, dw, none[0], dscale, none[1]


bitdelta_matmul_mixed.defvjp(_mixed_forward, _mixed_backward)
