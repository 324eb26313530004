"""A decode step's norms and attention: one function each, and who computes it.

"reference" is plain XLA and runs everywhere. "cpu" is our kernel; "cudnn" and "xla" are attention
by jax.nn.dot_product_attention over gathered pages, for GPUs. "auto" chooses when a program is
traced: our kernel where there is one, else plain XLA, until the others were measured on a card.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import cpu, reference
from pallas_kernels.paged_attention import pages as paging
from pallas_kernels.paged_attention.pages import Pages

Implementation = Literal["auto", "reference", "cpu", "cudnn", "xla"]


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, implementation: Implementation = "auto"
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) times a weight; not differentiable.

    Args:
      x: float[B, ..., D].
      weight: float32[B or 1, D], each row's own or one for all.
      eps: added to the mean square.
      implementation: who computes it.

    Returns:
      x's shape and dtype; inside float32.

    Raises:
      ValueError: shapes do not fit, or the implementation is unknown or not to be had here.
    """
    if x.ndim < 2 or weight.shape not in ((1, x.shape[-1]), (x.shape[0], x.shape[-1])):
        raise ValueError(
            f"x has shape {x.shape} and weight {weight.shape}; expected [B, ..., D] and [B or 1, D]"
        )
    if _on_cpu(implementation, x, None):
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def decode_attention(
    qkv: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    window: int | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, Pages]:
    """One token a row attends to its row of the cache; see `reference.decode_attention`.

    Args:
      qkv: float[B, K, G + 2, H], neither normed nor turned.
      pages: the cache; donate it and it is written in place.
      table: int32[B, J], each row's pages; a page outside 0..N-1 is none.
      positions: int32[B]; a row whose position is outside 0..S-1 sees and writes nothing, nor does
        one that lacks a page.
      angles: cosine and sine, float32[B, H / 2].
      norms: of queries and keys, float32[B or 1, H], or None.
      eps: of the norms.
      window: how many positions are seen, the token's own counted; None: all.
      implementation: who computes it.

    Returns:
      [B, K, G, H] in qkv's dtype, zeros for a row that sees nothing; and the cache.

    Raises:
      ValueError: shapes do not fit, or the implementation is unknown or not to be had here.
    """
    _check(qkv, pages, table, positions, angles, norms, window)
    case = (qkv, pages, table, positions, angles, norms, eps, window)
    if _on_cpu(implementation, qkv, pages.k):
        return cpu.decode_attention(*case)
    library = implementation if implementation in ("cudnn", "xla") else None
    return reference.decode_attention(*case, library)


def _check(
    qkv: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    window: int | None,
) -> None:
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.shape[3] % 2:
        raise ValueError(f"qkv has shape {qkv.shape}; expected [B, K, G + 2, H], H even")
    batch, kv_heads, _, size = qkv.shape
    paging.check(pages, table, batch, kv_heads, size)
    if positions.shape != (batch,) or positions.dtype != jnp.int32:
        raise ValueError(
            f"positions are {positions.dtype}{positions.shape}; expected int32[{batch}]"
        )
    for name, angle in zip(("cosine", "sine"), angles, strict=True):
        if angle.shape != (batch, size // 2) or angle.dtype != jnp.float32:
            raise ValueError(
                f"the {name} is {angle.dtype}{angle.shape}; expected float32[{batch}, {size // 2}]"
            )
    for name, weight in zip("qk", norms or (), strict=False):
        if weight.shape not in ((1, size), (batch, size)) or weight.dtype != jnp.float32:
            raise ValueError(
                f"the norm of {name} is {weight.dtype}{weight.shape}; expected "
                f"float32[{batch} or 1, {size}]"
            )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1 position, or None for all")


def _on_cpu(implementation: str, x: jax.Array, cache: jax.Array | None) -> bool:
    match implementation:
        case "auto":
            return cpu.takes(x, cache) and cpu.available()
        case "reference" | "cudnn" | "xla":
            return False
        case "cpu" if cpu.takes(x, cache) and cpu.available():
            return True
        case "cpu":
            held = "" if cache is None else f" over a cache of {cache.dtype}"
            raise ValueError(
                f"no CPU kernel for {x.dtype}{held} here; it takes float32 or bfloat16, and has "
                "to be built: python -m pallas_kernels.cpu_build"
            )
        case _:
            raise ValueError(
                f"implementation is {implementation!r}; expected 'auto', 'reference', 'cpu', "
                "'cudnn' or 'xla'"
            )
