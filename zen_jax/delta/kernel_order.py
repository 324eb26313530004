"""A bank, or one variant's slot of it, in the order in which the Hopper kernels read signs.

Made once, at load and on the device, since the kernels would else turn every weight's signs about
in every call. Under a mesh each shard orders and pads its own part.
"""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.bitdelta_matmul.bank import KernelBank
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import DeltaBank
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import Params, ParamSpec, map_specs
from zen_jax.linear import bank_specs
from zen_jax.sharding import Placement, on_shards


def on_hopper(mesh: Mesh | None = None) -> bool:
    """Whether the devices are Hopper cards: those of a mesh, or this process's first."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return device.platform == "gpu" and str(device.compute_capability).startswith("9.")


def to_kernel_order(
    config: ModelConfig, params: Params, bank: DeltaBank, placement: Placement | None = None
) -> DeltaBank:
    """The bank with `kernel` in the place of `bits` and `scale`; to be jitted.

    Args:
      config: the model as held.
      params: the base's arrays, which decide where a variant may be added to its weight.
      bank: as `BankSchema.empty` makes it, or a slot of it, as `BankSchema.fit` does.
      placement: the mesh, or None for one device.
    """
    stacked = bank.vocab.ndim == 1

    def ordered(spec: ParamSpec, base: jax.Array, delta: WeightDelta) -> WeightDelta:
        if delta.bits is None or delta.scale is None:
            return delta
        bits, scale = delta.bits, delta.scale
        if not stacked:
            bits, scale = bits[None], scale[None]
        made = _ordered(spec, base, WeightDelta(bits, scale), placement)
        if not stacked:
            made = jax.tree.map(lambda part: part[0], made)
        return dataclasses.replace(delta, bits=None, scale=None, kernel=made)

    return DeltaBank(map_specs(ordered, config, params, bank.weights), bank.vocab)


def _ordered(
    spec: ParamSpec, base: jax.Array, delta: WeightDelta, placement: Placement | None
) -> KernelBank:
    """One weight's, with M in front."""
    # Not before a card asks for it: Pallas takes a second to import.
    from pallas_kernels.bitdelta_matmul import mosaic

    axes = PartitionSpec(*(None,) * base.ndim) if placement is None else placement.spec(spec.axes)
    over = [axis for axis in axes if axis is not None]

    def order(base: jax.Array, delta: WeightDelta) -> KernelBank:
        assert delta.bits is not None and delta.scale is not None
        size, m, levels = base.shape[-1], *delta.scale.shape[:2]
        w, bits = base.reshape(-1, size), delta.bits
        flat = (m, levels, w.shape[0])
        made = mosaic.to_kernel_order(bits.reshape(*flat, -1), delta.scale.reshape(flat), w)
        allowed = made.reconstruct
        for axis in over:  # only where it may be in every shard
            allowed = jax.lax.pmin(allowed.astype("int32"), axis) > 0
        return made._replace(reconstruct=allowed)

    into = bank_specs(WeightDelta(kernel=KernelBank(base, base, base)), axes).kernel
    return on_shards(order, placement, (axes, bank_specs(delta, axes)), into)(base, delta)


def kernel_shardings(
    config: ModelConfig, bank: DeltaBank, placement: Placement, *, stacked: bool
) -> DeltaBank:
    """Where the parts lie of a bank in the kernels' order, or of a slot of it.

    Args:
      config: the model as held.
      bank: what has the parts, arrays or their shapes.
      placement: the mesh.
      stacked: whether M stands in front.
    """

    def put(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(placement.mesh, spec if stacked else PartitionSpec(*spec[1:]))

    def parts(spec: ParamSpec, delta: WeightDelta) -> WeightDelta:
        tail, own = delta.tail, dataclasses.replace(delta, tail=None)
        specs = bank_specs(own, placement.spec(spec.axes))
        if tail is not None:
            specs = dataclasses.replace(specs, tail=PartitionSpec(None, None, None))
        return jax.tree.map(put, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))

    return DeltaBank(map_specs(parts, config, bank.weights), put(PartitionSpec(None)))
