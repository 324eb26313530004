"""A prompt's attention: one function, and who computes it.

"reference" is plain XLA and says what is meant; "blocks" is plain XLA too, and does not make all
scores at once. "cpu" is our kernel; "cudnn" and "xla" are jax.nn.dot_product_attention over
gathered pages, for GPUs. "auto" takes the kernel where there is one, else "blocks"; it chooses when
a program is traced.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import pages as paging
from pallas_kernels.paged_attention.pages import Pages
from pallas_kernels.prompt_attention import blocks, cpu, reference

Implementation = Literal["auto", "reference", "blocks", "cpu", "cudnn", "xla"]


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, Pages]:
    """Chunks of tokens go into their rows of the cache and look at what is before them there.

    Args:
      q: float[C, T, K, G, H].
      k: float[C, T, K, H], turned already.
      v: likewise.
      pages: the cache; donate it and it is written in place.
      table: int32[C, J], the pages of each chunk's row; a page outside 0..N-1 is none, and a chunk
        that lacks one gives zeros.
      starts: int32[C], the position of its first token.
      lengths: int32[C], tokens that exist; those behind them give zeros.
      window: positions that a query sees, its own counted; None: all.
      implementation: who computes it.

    Returns:
      [C, T, K, G, H] in q's dtype; and the cache.

    Raises:
      ValueError: shapes do not fit, or the implementation is unknown or not to be had here.
    """
    if q.ndim != 5:
        raise ValueError(f"q has shape {q.shape}; expected [C, T, K, G, H]")
    for name, array in (("k", k), ("v", v)):
        if array.shape != (*q.shape[:3], q.shape[4]):
            expected = (*q.shape[:3], q.shape[4])
            raise ValueError(f"the tokens' {name} has shape {array.shape}; expected {expected}")
    paging.check(pages, table, q.shape[0], q.shape[2], q.shape[4])
    for name, array in (("starts", starts), ("lengths", lengths)):
        if array.shape != q.shape[:1] or array.dtype != jnp.int32:
            raise ValueError(f"{name} are {array.dtype}{array.shape}; expected int32 {q.shape[:1]}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1 position, or None for all")
    case = (q, k, v, pages, table, starts, lengths, window)
    if _on_cpu(implementation, q, pages.k):
        return cpu.prompt_attention(*case)
    if implementation in ("cudnn", "xla"):
        return reference.prompt_attention(*case, implementation)
    chosen = reference if implementation == "reference" else blocks
    return chosen.prompt_attention(*case)


def _on_cpu(implementation: str, q: jax.Array, k: jax.Array) -> bool:
    match implementation:
        case "auto":
            return cpu.takes(q, k) and cpu.available()
        case "reference" | "blocks" | "cudnn" | "xla":
            return False
        case "cpu" if cpu.takes(q, k) and cpu.available():
            return True
        case "cpu":
            raise ValueError(
                f"no CPU kernel for {q.dtype} over a cache of {k.dtype} here; it takes float32 "
                "over any kind of cache, and has to be built: python -m pallas_kernels.cpu_build"
            )
        case _:
            raise ValueError(
                f"implementation is {implementation!r}; expected 'auto', 'reference', 'blocks', "
                "'cpu', 'cudnn' or 'xla'"
            )
