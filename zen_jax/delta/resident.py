"""A bank on the devices: in which order its signs lie there, and on which device each part."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zen_jax.delta.bank import BankSchema, DeltaBank, is_axes, slot_axes
from zen_jax.delta.format import WeightDelta
from zen_jax.delta.kernel_order import kernel_shardings, on_hopper, to_kernel_order
from zen_jax.layout import Params, ParamSpec, map_specs
from zen_jax.sharding import Placement


@dataclasses.dataclass(frozen=True)
class ResidentBank:
    """How a schema's bank lies on the devices.

    Attributes:
      schema: the shapes of the bank and of the model.
      params: the base's arrays, or their shapes.
      placement: the mesh, or None for one device.
      ordered: whether signs are in the Hopper kernels' order, else packed as in the store.
    """

    schema: BankSchema
    params: Params
    placement: Placement | None
    ordered: bool

    @classmethod
    def of(
        cls, schema: BankSchema, params: Params, mesh: Mesh | None, signs: str
    ) -> "ResidentBank":
        """As `EngineConfig.signs` says: "packed", "hopper", or "auto" for what the devices are."""
        placement = None if mesh is None else Placement.of(schema.held.config, mesh)
        ordered = signs == "hopper" or (signs == "auto" and on_hopper(mesh))
        return cls(schema, params, placement, ordered)

    def order(self, params: Params, bank: DeltaBank) -> DeltaBank:
        """A packed bank or slot, as it lies on the devices; to be jitted."""
        if not self.ordered:
            return bank
        return to_kernel_order(self.schema.held.config, params, bank, self.placement)

    def empty(self) -> DeltaBank:
        """A bank in which every slot reads as the base."""
        if not self.ordered:
            return self.schema.empty(self.placement)
        shapes = self.shapes()
        make: Any = jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes),
            out_shardings=self.shardings(stacked=True),
        )
        bank = make()
        vocab = jnp.full_like(bank.vocab, self.schema.held.base.vocab_size)
        return dataclasses.replace(bank, vocab=vocab)

    def shapes(self) -> DeltaBank:
        """Shapes and dtypes of the bank."""
        return jax.eval_shape(self.order, self.params, jax.eval_shape(self.schema.empty))

    def slot_shapes(self, *, packed: bool) -> DeltaBank:
        """Shapes and dtypes of a slot, as it comes from the store or as it lies on the devices."""
        stacked = jax.eval_shape(self.schema.empty) if packed else self.shapes()
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)

    def shardings(self, *, stacked: bool) -> DeltaBank | None:
        """Where the parts of a slot lie, or of the bank when stacked."""
        if self.placement is None or not self.ordered:
            return self.packed_shardings(stacked=stacked)
        config = self.schema.held.config
        return kernel_shardings(config, self.shapes(), self.placement, stacked=stacked)

    def packed_shardings(self, *, stacked: bool) -> DeltaBank | None:
        """The same of what comes from the store."""
        place = self.placement
        if place is None:
            return None
        lead = (None,) if stacked else ()

        def parts(spec: ParamSpec) -> WeightDelta:
            return jax.tree.map(
                lambda axes: place.sharding((*lead, *axes)),
                slot_axes(self.schema, spec),
                is_leaf=is_axes,
            )

        return DeltaBank(map_specs(parts, self.schema.held.config), place.sharding(lead))
