"""Which rows of a decode batch belong together, for the decode kernel on Hopper."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MOST_ROWS = 64
MOST_ENTRIES = 256


def padded_rows(rows: int) -> int:
    """Rows that a batch takes in the kernel: 8, 16, 32 or 64."""
    return max(8, 1 << (rows - 1).bit_length())


class Plan(NamedTuple):
    """Which rows of a batch belong together. Made once for a step, for all of its weights.

    order: int32[rows], the rows sorted by slot.
    rank: int32[B], where each row went.
    slots: int32[64], of the sorted rows; the base's, and those that fill up, are M.
    entries: int32[5, E]: what is multiplied with which rows. Row of the bank; first group of 8
      rows; which width; slot; and [3, 0] is their number.
    """

    order: jax.Array
    rank: jax.Array
    slots: jax.Array
    entries: jax.Array


def widths_of(rows: int, one: bool) -> tuple[int, ...]:
    """Numbers of rows that the kernel multiplies at a time, of a padded batch."""
    return (rows,) if one else tuple(n for n in (8, 16, 32, 64) if n <= rows)


def plan(slots: jax.Array, variants: int, levels: int, one: bool = False) -> Plan:
    """Sorts a batch by comparing each with each: a few small operations, no sort and no loop.

    Args:
      slots: int32[B], 1 to 64; one outside 0..M-1 reads as the base.
      variants: M.
      levels: of the bank.
      one: whether all rows have the first one's slot.

    Raises:
      ValueError: a batch may have more entries than one copy brings.
    """
    batch = slots.shape[0]
    rows = padded_rows(batch)
    if (entries := min(rows, variants) * levels) > MOST_ENTRIES:
        raise ValueError(
            f"{variants} variants of {levels} levels in {rows} rows are {entries} entries, at most "
            f"{MOST_ENTRIES}; take fewer rows at a time"
        )
    slots = jnp.where((slots >= 0) & (slots < variants), slots, variants).astype(jnp.int32)
    slots = jnp.broadcast_to(slots[:1], (batch,)) if one else slots
    at = jnp.arange(batch)
    earlier = (slots < slots[:, None]) | ((slots == slots[:, None]) & (at < at[:, None]))
    rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(rank == jnp.arange(rows)[:, None], at, 0), axis=1, dtype=jnp.int32)
    of = jnp.arange(variants)
    counts = jnp.sum(slots == of[:, None], axis=1, dtype=jnp.int32)
    starts = jnp.sum(slots < of[:, None], axis=1, dtype=jnp.int32)
    present = (counts > 0) & (starts < batch)
    place = jnp.sum(present & (of < of[:, None]), axis=1)
    # Of the variants in the batch, the n-th.
    chosen = present & (place == jnp.arange(min(rows, variants))[:, None])

    def pick(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, values, 0), axis=1, dtype=jnp.int32)

    widths = jnp.array(widths_of(rows, one), jnp.int32)
    group = starts // 8
    kind = jnp.sum(widths < (starts + counts - 8 * group)[:, None], axis=1, dtype=jnp.int32)
    kind = jnp.minimum(kind, len(widths) - 1)
    group = jnp.minimum(group, (rows - widths[kind]) // 8)
    bank_row = pick(of)[:, None] * levels + jnp.arange(levels)
    each = [jnp.repeat(pick(values), levels) for values in (group, kind, of)]
    count = jnp.full_like(each[0], jnp.sum(present) * levels)
    entries = jnp.stack([bank_row.reshape(-1), each[0], each[1], count, each[2]])
    entries = jnp.pad(entries.astype(jnp.int32), ((0, 0), (0, -entries.shape[1] % 32)))
    return Plan(order, rank, jnp.full(MOST_ROWS, variants).at[rank].set(slots), entries)
