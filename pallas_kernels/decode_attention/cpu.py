"""A decode step's norms and attention on the CPU: `cpu.cc` through XLA's FFI.

Activations in float32 or bfloat16, a cache of any kind; everything between is float32. The order of
a row's sums depends on nothing but its own position, so a row's result has the same bits in any
batch, and in pages of any size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu_build, target
from pallas_kernels.paged_attention import cpu_pages
from pallas_kernels.paged_attention.pages import DTYPES, Pages

_TARGETS = {"zen_decode_attention": "ZenDecodeAttention", "zen_rms_norm": "ZenRmsNorm"}

# The widest code that is run where the processor has it; the bits are the same.
PLAIN, AVX2, AVX512 = 0, 1, 2


def available() -> bool:
    """Whether the kernel was built and what is traced is for the CPU."""
    return target.platform() == "cpu" and built()


@functools.cache
def built() -> bool:
    """Whether there is a library; it is made known to XLA."""
    library = cpu_build.load("decode_attention")
    if library is None:
        return False
    for name, symbol in _TARGETS.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return True


def takes(x: jax.Array, cache: jax.Array | None = None) -> bool:
    """Whether the kernel has a form for activations, and a cache, of these dtypes."""
    fits = x.dtype in (jnp.bfloat16, jnp.float32)
    return fits and (cache is None or cache.dtype.name in DTYPES)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """As `reference.rms_norm`: x[B, ..., D], float32 or bfloat16, by float32[B or 1, D]."""
    call = jax.ffi.ffi_call("zen_rms_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x.astype(jnp.float32), weight, eps=np.float32(eps)).astype(x.dtype)


def decode_attention(
    qkv: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    window: int | None = None,
    level: int = AVX512,
) -> tuple[jax.Array, Pages]:
    """As `reference.decode_attention`, in place where the cache is donated.

    Args:
      qkv: float32 or bfloat16[B, K, G + 2, H].
      pages: of any kind.
      table: int32[B, J].
      positions: int32[B].
      angles: float32[B, H / 2] each.
      norms: float32[B or 1, H] each.
      eps: of the norms.
      window: positions seen, or None.
      level: the widest code to run.
    """
    batch, kv_heads, group, size = qkv.shape
    absent = jnp.zeros((0, size), jnp.float32)
    y, pages = cpu_pages.call(
        "zen_decode_attention",
        jax.ShapeDtypeStruct((batch, kv_heads, group - 2, size), jnp.float32),
        (
            qkv.astype(jnp.float32),
            *angles,
            positions,
            table,
            *((absent, absent) if norms is None else norms),
        ),
        pages,
        eps=np.float32(eps),
        window=np.int64(window or 0),
        level=np.int64(level),
    )
    return y.astype(qkv.dtype), pages
