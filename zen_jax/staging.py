"""A variant's way from its files into the shapes of a bank's slot and onto the devices.

The three steps are those that `server.loader` runs, each of which may fail by itself. Between the
second and the third a variant lies in host memory, in the bank's shapes: on an accelerator in
memory that is pinned, from where devices fetch it by themselves.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from zen_jax.checkpoint.manifest import Variant
from zen_jax.checkpoint.raw import RawVariant
from zen_jax.checkpoint.store import Store
from zen_jax.delta.bank import BankSchema, DeltaBank, slot_axes
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import ParamSpec, map_specs
from zen_jax.sharding import Placement

_PINNED = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Staging:
    """How variants of a store come into a bank's slots; may be shared by threads.

    Attributes:
      store: where they are read.
      schema: the bank's shapes.
      placement: the mesh, or None for one device.
    """

    store: Store
    schema: BankSchema
    placement: Placement | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one variant in the bank's shapes, over all devices once."""
        shapes = jax.eval_shape(self.schema.empty)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)) // self.schema.slots

    def read(self, variant: Variant) -> RawVariant:
        """Its files in host memory; raises as `Store.read_files` does."""
        return self.store.read_files(variant)

    def verify(self, raw: RawVariant) -> DeltaBank:
        """What was read, checked and in the shapes of a slot; raises as `Store.check` and
        `BankSchema.fit` do."""
        fitted = self.schema.fit(self.store.check(raw))
        if jax.default_backend() == "cpu":
            return fitted
        return jax.block_until_ready(jax.device_put(fitted, self.shardings(_PINNED)))

    def put(self, fitted: DeltaBank) -> DeltaBank:
        """The same on the devices, ready to be written into a slot."""
        return jax.block_until_ready(jax.device_put(fitted, self.shardings()))

    def shardings(self, memory: str | None = None) -> Any:
        """Where the parts of a slot lie, as a tree like a slot.

        Args:
          memory: a kind of memory of the devices; None for their own.
        """

        def where(axes: tuple[str | None, ...]) -> Any:
            if self.placement is None:
                return SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
            whole = self.placement.sharding(axes)
            return whole if memory is None else whole.with_memory_kind(memory)

        def parts(spec: ParamSpec) -> WeightDelta:
            return jax.tree.map(
                where, slot_axes(self.schema, spec), is_leaf=lambda node: isinstance(node, tuple)
            )

        return DeltaBank(map_specs(parts, self.schema.held.config), where(()))
