"""Keys and values in pages: what they are kept as, and how a row finds its own.

A row's page table names the pages that hold its positions 0 to P - 1, P to 2 P - 1 and so on. With
one page a row, P its most positions, this is a cache of fixed rows.

Letters: N pages, P positions of a page, B rows, J pages of a row at most, T tokens, K kv heads,
H head size. S = J P.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# An array, or where one lies.
Array = Any

# What keys and values can be kept as; those of 8 bits have a scale for each position and kv head.
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}

# A kernel takes so many positions at a time, and none of these blocks may lie in two pages.
BLOCK = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """One layer's keys (already turned by rope) and values.

    Attributes:
      k: [N, P, K, H].
      v: likewise.
      k_scale: float32[N, P, K], what a key's numbers are multiplied by; None where they are whole.
      v_scale: likewise.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None

    @classmethod
    def empty(
        cls, pages: int, size: int, kv_heads: int, head: int, dtype: jax.typing.DTypeLike
    ) -> "Pages":
        """Zeros.

        Raises:
          ValueError: the dtype is none of `DTYPES`.
        """
        shape, name = (pages, size, kv_heads, head), jnp.dtype(dtype).name
        if name not in DTYPES:
            raise ValueError(f"keys and values as {name}; expected one of {', '.join(DTYPES)}")
        scales = [jnp.zeros(shape[:3], jnp.float32) for _ in "kv"] if scaled(dtype) else []
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)


def scaled(dtype: jax.typing.DTypeLike) -> bool:
    """Whether numbers of this dtype are kept with scales."""
    return jnp.dtype(dtype).name in _LARGEST


def check(pages: Pages, table: jax.Array, rows: int, kv_heads: int, head: int) -> None:
    """Sees whether pages and a table fit what attends to them.

    Raises:
      ValueError: they do not.
    """
    k, v = pages.k, pages.v
    if k.ndim != 4 or k.shape[2:] != (kv_heads, head):
        raise ValueError(f"k has shape {k.shape}; expected [N, P, {kv_heads}, {head}]")
    if (v.shape, v.dtype) != (k.shape, k.dtype):
        raise ValueError(f"v is {v.dtype}{v.shape}; expected {k.dtype}{k.shape}, as k")
    for name, scale in (("k", pages.k_scale), ("v", pages.v_scale)):
        if (scale is not None) != scaled(k.dtype):
            raise ValueError(f"{name} is {k.dtype}; expected scales with 8 bits, and none else")
        if scale is not None and (scale.shape, scale.dtype) != (k.shape[:3], jnp.float32):
            raise ValueError(
                f"the scales of {name} are {scale.dtype}{scale.shape}; expected float32"
                f"{k.shape[:3]}"
            )
    if table.ndim != 2 or table.shape[0] != rows or table.dtype != jnp.int32:
        raise ValueError(f"the table is {table.dtype}{table.shape}; expected int32[{rows}, J]")
    if table.shape[1] > 1 and k.shape[1] % BLOCK:
        raise ValueError(
            f"a page has {k.shape[1]} positions; expected a multiple of {BLOCK}, or one page a row"
        )


def there(table: jax.Array, pages: int, size: int, first: jax.Array, last: jax.Array) -> jax.Array:
    """Whether rows have a page for each of the positions first .. last, bool[B].

    Args:
      table: int32[B, J]; a page outside 0..N-1 is none.
      pages: N.
      size: P.
      first: int32[B].
      last: int32[B]; rows where it is outside 0..S-1 have none.
    """
    column = jnp.arange(table.shape[1])
    needed = (column >= first[:, None] // size) & (column <= last[:, None] // size)
    missing = needed & ((table < 0) | (table >= pages))
    return (last >= 0) & (last < table.shape[1] * size) & ~jnp.any(missing, axis=1)


def quantise(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Numbers as they are kept: x of the dtype, or codes of 8 bits and what they are multiplied by.

    The largest of a head becomes the largest code, so that a head of zeros stays one, and a NaN
    makes its whole head NaN.

    Args:
      x: float[..., H].
      dtype: of `DTYPES`.

    Returns:
      [..., H] of the dtype; float32[...] or None.
    """
    if not scaled(dtype):
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    limit = _LARGEST[jnp.dtype(dtype).name]
    # XLA's maximum may pass over a NaN.
    most = jnp.where(jnp.any(jnp.isnan(x), axis=-1), jnp.nan, jnp.max(jnp.abs(x), axis=-1))
    inverse = jnp.where((most > 0) & jnp.isfinite(most), limit / most, 0.0)[..., None]
    codes = jnp.where(inverse > 0, jnp.clip(x * inverse, -limit, limit), 0.0)
    codes = jnp.round(codes) if jnp.dtype(dtype) == jnp.int8 else codes
    return codes.astype(dtype), most / limit


def write(
    pages: Pages, table: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array, live: jax.Array
) -> Pages:
    """Pages with keys and values of some tokens.

    Args:
      pages: of N pages.
      table: int32[B, J].
      k: float[B, T, K, H].
      v: likewise.
      at: int32[B, T], the tokens' positions.
      live: bool[B, T], which are written; their rows have pages there.
    """
    count, size = pages.k.shape[:2]
    column = jnp.clip(at // size, 0, table.shape[1] - 1)
    page = jnp.where(live, jnp.take_along_axis(table, column, axis=1), count)

    def put(old: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
        if old is None or new is None:
            return None
        return old.at[page, at % size].set(new, mode="drop")

    (k, k_scale), (v, v_scale) = (quantise(x, pages.k.dtype) for x in (k, v))
    return Pages(
        pages.k.at[page, at % size].set(k, mode="drop"),
        pages.v.at[page, at % size].set(v, mode="drop"),
        put(pages.k_scale, k_scale),
        put(pages.v_scale, v_scale),
    )


def gather(
    pages: Pages, table: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Rows' keys and values side by side, [B, S, K, H] each, anything where there is no page.

    Args:
      pages: of N pages.
      table: int32[B, J].
      dtype: of the result.
    """
    own = jnp.clip(table, 0, pages.k.shape[0] - 1)

    def rows(values: jax.Array, scale: jax.Array | None) -> jax.Array:
        found = values[own]
        if scale is not None:
            found = found.astype(jnp.float32) * scale[own][..., None]
        return found.astype(dtype).reshape(table.shape[0], -1, *values.shape[2:])

    return rows(pages.k, pages.k_scale), rows(pages.v, pages.v_scale)
