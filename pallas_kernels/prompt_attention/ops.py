"""A prompt's attention: one function, and who computes it.

"reference" is plain XLA and says what is meant; "blocks" is plain XLA too, and does not make all
scores at once. "cpu" is our kernel. "auto" takes the kernel where there is one, else "blocks"; it
chooses when a program is traced.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.prompt_attention import blocks, cpu, reference

Implementation = Literal["auto", "reference", "blocks", "cpu"]


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Chunks of queries, each to the positions before it in its row of the cache.

    Args:
      q: float[C, T, K, G, H].
      k: float[B, S, K, H], keys of the queries' own positions among them.
      v: likewise.
      rows: int32[C], each chunk's row; a chunk whose row is outside 0..B-1 gives zeros.
      starts: int32[C], the position of its first query.
      lengths: int32[C], queries that exist; those behind them give zeros.
      window: positions that a query sees, its own counted; None: all.
      implementation: who computes it.

    Returns:
      [C, T, K, G, H] in q's dtype.

    Raises:
      ValueError: shapes do not fit, or the implementation is unknown or not to be had here.
    """
    if q.ndim != 5 or k.ndim != 4 or k.shape[2:] != (q.shape[2], q.shape[4]):
        raise ValueError(
            f"q has shape {q.shape} and k {k.shape}; expected [C, T, K, G, H] and [B, S, K, H]"
        )
    if (v.shape, v.dtype) != (k.shape, k.dtype):
        raise ValueError(f"v is {v.dtype}{v.shape}; expected what k is, {k.dtype}{k.shape}")
    for name, array in (("rows", rows), ("starts", starts), ("lengths", lengths)):
        if array.shape != q.shape[:1] or array.dtype != jnp.int32:
            raise ValueError(f"{name} are {array.dtype}{array.shape}; expected int32 {q.shape[:1]}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1 position, or None for all")
    case = (q, k, v, rows, starts, lengths, window)
    if _on_cpu(implementation, q, k):
        return cpu.prompt_attention(*case)
    chosen = reference if implementation == "reference" else blocks
    return chosen.prompt_attention(*case)


def _on_cpu(implementation: str, q: jax.Array, k: jax.Array) -> bool:
    match implementation:
        case "auto":
            return cpu.takes(q, k) and cpu.available()
        case "reference" | "blocks":
            return False
        case "cpu" if cpu.takes(q, k) and cpu.available():
            return True
        case "cpu":
            raise ValueError(
                f"no CPU kernel for {q.dtype} over a cache of {k.dtype} here; it takes float32 "
                "over float32 or bfloat16, and has to be built: python -m pallas_kernels.cpu_build"
            )
        case _:
            raise ValueError(
                f"implementation is {implementation!r}; expected 'auto', 'reference', 'blocks' or "
                "'cpu'"
            )
