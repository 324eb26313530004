"""A prompt's attention on the CPU: `cpu.cc` through XLA's FFI.

float32 queries over a float32 or bfloat16 cache. The order of a row's sums depends on nothing but
its own position, so that it has the same bits however a prompt is cut into chunks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu_build, target
from pallas_kernels.prompt_attention import reference

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
    return q.dtype == jnp.float32 and k.dtype in (jnp.bfloat16, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
    level: int = AVX512,
) -> jax.Array:
    """As `reference.prompt_attention`; its gradients are the reference's.

    Args:
      q: float32[C, T, K, G, H].
      k: float32 or bfloat16[B, S, K, H].
      v: likewise.
      rows: int32[C].
      starts: int32[C].
      lengths: int32[C].
      window: positions seen, or None.
      level: the widest code to run.
    """
    call = jax.ffi.ffi_call("zen_prompt_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    numbers = {"window": np.int64(window or 0), "level": np.int64(level)}
    return call(q, k, v, rows, starts, lengths, **numbers)


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None,
    level: int,
) -> tuple[jax.Array, tuple]:
    saved = (q, k, v, rows, starts, lengths)
    return prompt_attention(*saved, window, level), saved


def _backward(window: int | None, level: int, saved: tuple, g: jax.Array) -> tuple:
    return reference.backward(saved, window, g)


prompt_attention.defvjp(_forward, _backward)
