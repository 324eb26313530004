"""Calls of CPU kernels that write a cache in place; `cpu_pages.h` is what they share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.pages import Pages


def call(
    target: str,
    result: jax.ShapeDtypeStruct,
    arguments: Sequence[jax.Array],
    pages: Pages,
    **how: Any,
) -> tuple[jax.Array, Pages]:
    """Calls a kernel with its arguments and, after them, keys, values and their scales.

    Args:
      target: its registered name.
      result: what it gives beside the cache.
      arguments: in its order.
      pages: the cache; where it is donated, it is written in place.
      how: attributes.
    """
    none = jnp.zeros((0,), jnp.float32)
    scaled = pages.k_scale is not None
    held = [pages.k, pages.v, *((pages.k_scale, pages.v_scale) if scaled else (none, none))]
    out = (result, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in held))
    before = len(arguments)
    aliases = {before + i: 1 + i for i in range(4 if scaled else 2)}
    kernel = jax.ffi.ffi_call(target, out, input_output_aliases=aliases)
    y, k, v, *scales = kernel(*arguments, *held, **how)
    return y, Pages(k, v, *(scales if scaled else ()))
