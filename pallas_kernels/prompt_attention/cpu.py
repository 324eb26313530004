"""A prompt's attention on the CPU: `cpu.cc` through XLA's FFI.

float32 queries over a cache of any kind. The order of a row's sums depends on nothing but its own
position, so that it has the same bits however a prompt is cut into chunks, and in pages of any
size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu_build, target
from pallas_kernels.paged_attention import cpu_pages
from pallas_kernels.paged_attention.pages import DTYPES, Pages

# The widest code that is run where the processor has it; the bits are the same.
PLAIN, AVX2, AVX512 = 0, 1, 2


def available() -> bool:
    """Whether the kernel was built and what is traced is for the CPU."""
    return target.platform() == "cpu" and built()


@functools.cache
def built() -> bool:
    """Whether there is a library; it is made known to XLA."""
    library = cpu_build.load("prompt_attention")
    if library is None:
        return False
    capsule = jax.ffi.pycapsule(library.ZenPromptAttention)
    jax.ffi.register_ffi_target("zen_prompt_attention", capsule, platform="cpu")
    return True


def takes(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel has a form for queries and a cache of these dtypes."""
    return q.dtype == jnp.float32 and k.dtype.name in DTYPES


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
    level: int = AVX512,
) -> tuple[jax.Array, Pages]:
    """As `reference.prompt_attention`, in place where the cache is donated.

    Args:
      q: float32[C, T, K, G, H].
      k: float[C, T, K, H].
      v: likewise.
      pages: of any kind.
      table: int32[C, J].
      starts: int32[C].
      lengths: int32[C].
      window: positions seen, or None.
      level: the widest code to run.
    """
    wide = (x.astype(jnp.float32) for x in (k, v))
    return cpu_pages.call(
        "zen_prompt_attention",
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        (q, *wide, table, starts, lengths),
        pages,
        window=np.int64(window or 0),
        level=np.int64(level),
    )
