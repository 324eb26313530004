"""Products with weights: the only place that knows whether a weight carries a delta.

A weight in ``Params`` is an array, or a `Weight`: the base's array with one variant's delta, or
with a bank of them and the slot of each row. Under a mesh every product runs inside shard_map,
column-parallel when an output dimension is sharded and row-parallel (one sum over the mesh) when
the input dimension is: XLA left alone would gather whole weights first.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.bitdelta_matmul import ops, reference
from zen_jax.delta.format import WeightDelta
from zen_jax.sharding import Placement

Axes = tuple[str | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """A base weight together with what variants add to it.

    Attributes:
      base: [*out, I], or [D] for a vector.
      delta: one variant's when `slots` is None, else a bank's leaf with axis M in front.
      slots: int32[B], the slot of each row of a batch; one outside 0..M-1 reads as the base.
    """

    base: jax.Array
    delta: WeightDelta
    slots: jax.Array | None = None


def as_bank(w: Weight, rows: int) -> tuple[WeightDelta, jax.Array]:
    """A weight's deltas as a bank and the slots of `rows` rows, whichever form it has."""
    if w.slots is not None:
        return w.delta, w.slots
    return jax.tree.map(lambda part: part[None], w.delta), jnp.zeros((rows,), jnp.int32)


def linear(
    x: jax.Array,
    w: jax.Array | Weight,
    axes: Axes,
    placement: Placement | None = None,
    products: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """x W^T, with each row's delta added where the weight carries one.

    Args:
      x: float[B, T, I]; row b belongs to the variant in slot b.
      w: [*out, I].
      axes: logical axes of the weight's dimensions.
      placement: the mesh, or None for one device.
      products: what x is rounded to before it is multiplied; None leaves it as it is.

    Returns:
      [B, T, *out] in x's dtype, summed in float32.

    Raises:
      ValueError: the input sizes of x and w differ.
    """
    base = w.base if isinstance(w, Weight) else w
    if x.ndim != 3 or x.shape[-1] != base.shape[-1]:
        raise ValueError(
            f"x has shape {x.shape}; expected [B, T, {base.shape[-1]}] for this weight"
        )
    bank, slots = as_bank(w, x.shape[0]) if isinstance(w, Weight) else (WeightDelta(), None)
    tail, bank = bank.tail, dataclasses.replace(bank, tail=None)
    rounded = x if products is None else x.astype(products)
    if placement is None:
        y = _local(rounded, base, bank, slots).astype(x.dtype)
    else:
        y = _sharded(rounded, base, bank, slots, axes, placement).astype(x.dtype)
    if tail is None or slots is None:
        return y
    more = _dense_rows(x, tail, slots).astype(y.dtype)
    return y.at[..., -tail.shape[1] :].add(more)


def _local(x: jax.Array, base: jax.Array, bank: WeightDelta, slots: jax.Array | None) -> jax.Array:
    """`linear` on one device, or on one shard, in float32; one token a row is a decode step."""
    out, size = base.shape[:-1], base.shape[-1]
    outputs = math.prod(out)
    w = base.reshape(outputs, size)
    batch, tokens = x.shape[:2]
    rows, prompt = x.reshape(batch * tokens, size), tokens > 1
    signs = _signs(bank, outputs)
    if signs is None or slots is None:
        y = ops.base_matmul(rows, w, prompt=prompt)
    else:
        if not prompt:
            y = ops.bitdelta_matmul_mixed(rows, w, signs, slots)
        elif batch == 1:
            y = ops.bitdelta_matmul(rows, w, signs, slots[0])
        else:
            ends = tokens * (jnp.arange(batch, dtype=jnp.int32) + 1)
            y = ops.bitdelta_matmul_segments(rows, w, signs, slots, ends)
    y = y.reshape(batch, tokens, outputs)
    if bank.low_rank is not None and slots is not None:
        a, b = bank.low_rank
        y += _low_rank_rows(x, a, b.reshape(-1, outputs, b.shape[-1]), slots)
    if bank.dense is not None and slots is not None:
        y += _dense_rows(x, bank.dense.reshape(-1, outputs, size), slots)
    return y.reshape(*x.shape[:-1], *out)


def _signs(bank: WeightDelta, outputs: int) -> ops.SignBank | ops.KernelBank | None:
    """A bank's signs and scales as the products take them; None when it has none."""
    if bank.kernel is not None:
        return bank.kernel
    if bank.bits is None or bank.scale is None:
        return None
    m, levels = bank.bits.shape[:2]
    bits = bank.bits.reshape(m, levels, outputs, -1)
    return ops.SignBank(bits, bank.scale.reshape(m, levels, outputs))


def _low_rank_rows(x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array) -> jax.Array:
    """x[B, T, I] . a[slot of b][R, I] . b[slot of b][O, R] -> float32[B, T, O]."""
    valid = (slots >= 0) & (slots < a.shape[0])
    index = jnp.where(valid, slots, 0)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    inner = jnp.einsum("bti,bri->btr", x.astype(jnp.float32), a[index], **exact)
    y = jnp.einsum("btr,bor->bto", inner, b[index], **exact)
    return jnp.where(valid[:, None, None], y, 0.0)


def _dense_rows(x: jax.Array, dense: jax.Array, slots: jax.Array) -> jax.Array:
    """x[B, T, I] . dense[slot of b][O, I] -> float32[B, T, O], by tiles of output rows."""
    valid = (slots >= 0) & (slots < dense.shape[0])
    index = jnp.where(valid, slots, 0)
    row_bytes = x.shape[0] * dense.shape[-1] * x.dtype.itemsize

    def tile(rows: Any) -> jax.Array:
        part = rows(dense, 1)[index].astype(x.dtype)
        return jnp.einsum(
            "bti,boi->bto",
            x,
            part,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    y = reference.over_tiles(tile, dense.shape[1], row_bytes, x.shape[:-1])
    return jnp.where(valid[:, None, None], y, 0.0)


def _sharded(
    x: jax.Array,
    base: jax.Array,
    bank: WeightDelta,
    slots: jax.Array | None,
    axes: Axes,
    placement: Placement,
) -> jax.Array:
    """`linear` inside shard_map; x is replicated, or sharded along I as the weight is."""
    mesh_axes = placement.spec(axes)
    over = mesh_axes[-1]
    specs = bank_specs(bank, mesh_axes)

    def shard(x: Any, base: Any, bank: WeightDelta, slots: Any) -> jax.Array:
        y = _local(x, base, bank, slots)
        return y if over is None else jax.lax.psum(y, over)

    return jax.shard_map(
        shard,
        mesh=placement.mesh,
        in_specs=(PartitionSpec(None, None, over), mesh_axes, specs, PartitionSpec()),
        out_specs=PartitionSpec(None, None, *mesh_axes[:-1]),
        check_vma=False,
    )(x, base, bank, slots)


def bank_specs(bank: WeightDelta, axes: PartitionSpec) -> WeightDelta:
    """How a bank's leaf is sharded where its weight is, without a tail; for shard_map.

    Args:
      bank: each part with M in front; what it lacks has no partition either.
      axes: the mesh axis of each dimension of the weight.

    Signs in the kernels' order are each shard's own: the whole is the shards one after the other.
    """
    outputs = [axis for axis in axes[:-1] if axis is not None]
    over = outputs[0] if outputs else None
    ordered: Any = ops.KernelBank(
        PartitionSpec(None, None, over, axes[-1], None),  # pyright: ignore[reportArgumentType]
        PartitionSpec(None, None, over),  # pyright: ignore[reportArgumentType]
        PartitionSpec(),  # pyright: ignore[reportArgumentType]
    )
    return WeightDelta(
        bits=None if bank.bits is None else PartitionSpec(None, None, *axes),
        scale=None if bank.scale is None else PartitionSpec(None, None, *axes[:-1]),
        low_rank=None
        if bank.low_rank is None
        else (PartitionSpec(None, None, axes[-1]), PartitionSpec(None, *axes[:-1], None)),
        dense=None if bank.dense is None else PartitionSpec(None, *axes),
        kernel=None if bank.kernel is None else ordered,
    )


def embed(
    ids: jax.Array,
    w: jax.Array | Weight,
    axes: Axes,
    dtype: jax.typing.DTypeLike,
    placement: Placement | None = None,
) -> jax.Array:
    """Looks tokens up, each row of the batch in its own variant's embedding.

    Args:
      ids: int32[B, T], in 0..V-1.
      w: [V, D].
      axes: logical axes of w.
      dtype: of the result.
      placement: the mesh, or None for one device.

    Returns:
      dtype[B, T, D], replicated.
    """
    base = w.base if isinstance(w, Weight) else w
    bank, slots = as_bank(w, ids.shape[0]) if isinstance(w, Weight) else (WeightDelta(), None)
    over = None if placement is None else placement.mesh_axis(axes[0])
    tail, bank = bank.tail, dataclasses.replace(bank, tail=None)
    if placement is None or over is None:
        y = _embed_local(ids, base, bank, slots)
    else:
        y = _embed_sharded(ids, base, bank, slots, over, placement)
    if tail is not None and slots is not None:
        y += _embed_tail(ids - (base.shape[0] - tail.shape[1]), tail, slots)
    return y.astype(dtype)


def _embed_tail(ids: jax.Array, tail: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows [B, T] of each slot's tail [M, E, D] in float32; zeros for ids below 0."""
    valid = (slots >= 0) & (slots < tail.shape[0])
    found = tail[jnp.where(valid, slots, 0)[:, None], jnp.maximum(ids, 0)].astype(jnp.float32)
    return jnp.where((valid[:, None] & (ids >= 0))[..., None], found, 0.0)


def _embed_sharded(
    ids: jax.Array,
    base: jax.Array,
    bank: WeightDelta,
    slots: jax.Array | None,
    over: str,
    placement: Placement,
) -> jax.Array:
    """`embed` inside shard_map: each shard looks up the tokens whose rows it has."""

    def shard(ids: Any, base: Any, bank: WeightDelta, slots: Any) -> jax.Array:
        local = ids - jax.lax.axis_index(over) * base.shape[0]
        here = (local >= 0) & (local < base.shape[0])
        y = _embed_local(jnp.where(here, local, 0), base, bank, slots)
        return jax.lax.psum(jnp.where(here[..., None], y, 0.0), over)

    specs = bank_specs(bank, PartitionSpec(over, None))
    return jax.shard_map(
        shard,
        mesh=placement.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(over, None), specs, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(ids, base, bank, slots)


def _embed_local(
    ids: jax.Array, base: jax.Array, bank: WeightDelta, slots: jax.Array | None
) -> jax.Array:
    """`embed` on one device, or on one shard -> float32[B, T, D]."""
    signs = _signs(bank, base.shape[0])
    if signs is None or slots is None:
        y = base[ids].astype(jnp.float32)
    else:
        y = ops.bitdelta_embed(ids, base, signs, slots)
    if bank.dense is not None and slots is not None:
        valid = (slots >= 0) & (slots < bank.dense.shape[0])
        index = jnp.where(valid, slots, 0)
        y += jnp.where(valid[:, None, None], bank.dense[index[:, None], ids], 0.0)
    if bank.low_rank is not None and slots is not None:
        a, b = bank.low_rank
        valid = (slots >= 0) & (slots < a.shape[0])
        index = jnp.where(valid, slots, 0)
        exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        added = jnp.einsum("btr,brd->btd", b[index[:, None], ids], a[index], **exact)
        y += jnp.where(valid[:, None, None], added, 0.0)
    return y


def vector(w: jax.Array | Weight) -> jax.Array:
    """A vector weight as each row of a batch has it: float32[*shape], or with slots
    float32[B, 1, *shape].

    Args:
      w: [*shape], a norm's weight [D] or fused biases [K, G].
    """
    if not isinstance(w, Weight):
        return w.astype(jnp.float32)
    base = w.base.astype(jnp.float32)
    if w.delta.dense is None:
        return base
    if w.slots is None:
        return base + w.delta.dense
    valid = (w.slots >= 0) & (w.slots < w.delta.dense.shape[0])
    added = w.delta.dense[jnp.where(valid, w.slots, 0)]
    valid = valid.reshape(-1, *(1,) * base.ndim)
    return (base + jnp.where(valid, added, 0.0))[:, None]
