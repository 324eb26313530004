"""The resident variants side by side: every part of every weight stacked on a leading axis M.

A `BankSchema` fixes the shapes when the bank is made. Afterwards slots are only written, each time
every leaf of the slot, so that nothing of an evicted variant shows through and nothing recompiles.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packing import packed_size
from zen_jax.config import ModelConfig
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import Params, ParamSpec, map_specs
from zen_jax.sharding import Placement


class DoesNotFit(ValueError):
    """A variant has a part that the bank has no room for."""


@dataclasses.dataclass(frozen=True)
class LeafSchema:
    """The parts that every slot holds for one weight.

    Attributes:
      levels: of signs and scales; 0 for none.
      dense: whether there is room for a whole difference.
    """

    levels: int
    dense: bool


@dataclasses.dataclass(frozen=True)
class BankSchema:
    """The shapes of a bank.

    Attributes:
      config: the base's architecture.
      slots: M, how many variants are resident at most.
      leaves: a `LeafSchema` for each of the base's Hugging Face tensors.
    """

    config: ModelConfig
    slots: int
    leaves: Mapping[str, LeafSchema]

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}; a bank needs at least 1")

    @classmethod
    def covering(
        cls, config: ModelConfig, slots: int, variants: Iterable[Mapping[str, LeafSchema]] = ()
    ) -> "BankSchema":
        """The least schema that holds 1-bit variants with whole vectors, and all of `variants`.

        Args:
          config: the base's architecture.
          slots: M.
          variants: what each known variant has, by Hugging Face tensor.
        """
        leaves: dict[str, LeafSchema] = {}

        def start(spec: ParamSpec) -> None:
            vector = spec.kind == "vector"
            for name in spec.sources:
                leaves[name] = LeafSchema(0 if vector else 1, vector)

        map_specs(start, config)
        for variant in variants:
            for name, leaf in variant.items():
                if name in leaves:
                    mine = leaves[name]
                    leaves[name] = LeafSchema(
                        max(mine.levels, leaf.levels), mine.dense or leaf.dense
                    )
        return cls(config, slots, leaves)

    def leaf(self, spec: ParamSpec) -> LeafSchema:
        """The room for a fused weight: the most that its tensors ask for."""
        parts = [self.leaves[name] for name in spec.sources]
        return LeafSchema(max(p.levels for p in parts), any(p.dense for p in parts))

    def empty(self, placement: Placement | None = None) -> Params:
        """A bank of zeros: every slot reads as the base.

        Args:
          placement: the mesh, or None for one device; bits and scales are sharded like weights.
        """

        def zeros(shape: tuple[int, ...], dtype: type, axes: tuple[str | None, ...]) -> jax.Array:
            if placement is None:
                return jnp.zeros(shape, dtype)
            return jax.device_put(jnp.zeros(shape, dtype), placement.sharding(axes))

        def stacked(spec: ParamSpec) -> WeightDelta:
            leaf, m, axes = self.leaf(spec), self.slots, spec.axes
            bits = scale = dense = None
            if leaf.levels:
                lead = (m, leaf.levels, *spec.shape[:-1])
                bits = zeros((*lead, packed_size(spec.shape[-1])), jnp.uint8, (None, None, *axes))
                scale = zeros(lead, jnp.float32, (None, None, *axes[:-1]))
            if leaf.dense:
                dense = zeros((m, *spec.shape), jnp.float32, (None, *axes))
            return WeightDelta(bits, scale, None, dense)

        return map_specs(stacked, self.config)

    def fit(self, deltas: Params) -> Params:
        """A variant's tree with exactly the parts of a slot; absent ones are zero.

        Args:
          deltas: a tree of `WeightDelta` as `zen_jax.layout.fuse_delta` makes it, in host memory.

        Returns:
          NumPy arrays in the shape of one slot.

        Raises:
          DoesNotFit: a part has more levels than the bank, or is dense or low-rank where the bank
            has no room; the tensors and the limit are named.
        """

        def fitted(spec: ParamSpec, delta: WeightDelta) -> WeightDelta:
            leaf, names = self.leaf(spec), ", ".join(spec.sources)
            levels = 0 if delta.bits is None else delta.bits.shape[0]
            if levels > leaf.levels:
                raise DoesNotFit(f"{names}: {levels} levels; the bank has room for {leaf.levels}")
            if delta.dense is not None and not leaf.dense:
                raise DoesNotFit(f"{names}: stored whole; the bank has room for signs only")
            if delta.low_rank is not None:
                raise DoesNotFit(f"{names}: a low-rank part; the bank has room for signs only")
            bits = scale = dense = None
            if leaf.levels:
                lead = (leaf.levels, *spec.shape[:-1])
                bits = np.zeros((*lead, packed_size(spec.shape[-1])), np.uint8)
                scale = np.zeros(lead, np.float32)
                if delta.bits is not None and delta.scale is not None:
                    bits[:levels], scale[:levels] = delta.bits, delta.scale
            if leaf.dense:
                dense = np.zeros(spec.shape, np.float32)
                if delta.dense is not None:
                    dense[...] = delta.dense
            return WeightDelta(bits, scale, None, dense)

        return map_specs(fitted, self.config, deltas)


def slot_axes(spec: ParamSpec, leaf: LeafSchema) -> WeightDelta:
    """Logical axes of each part of one slot, as a `WeightDelta` of tuples."""
    return WeightDelta(
        bits=(None, *spec.axes) if leaf.levels else None,
        scale=(None, *spec.axes[:-1]) if leaf.levels else None,
        dense=spec.axes if leaf.dense else None,
    )


def write_slot(bank: Params, slot: jax.Array, deltas: Params) -> Params:
    """The bank with one slot replaced, every leaf of it; to be jitted with `bank` donated.

    Args:
      bank: as `BankSchema.empty` makes it.
      slot: int32 scalar in 0..M-1.
      deltas: as `BankSchema.fit` makes it, on the device.
    """
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, slot, 0), bank, deltas
    )
