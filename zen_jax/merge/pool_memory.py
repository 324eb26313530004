"""Bytes in memory of a base and a pool of adapters, from the engine's own tables."""

import jax

from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema, LeafSchema
from zen_jax.layout import ParamSpec, map_specs


def pool_schema(config: ModelConfig, slots: int, rank: int) -> BankSchema:
    """A bank for members of a rank: factors beside every matrix of the layers, and nothing else."""
    leaves: dict[str, LeafSchema] = {}

    def add(spec: ParamSpec) -> None:
        if spec.kind == "linear" and spec.sources[0].startswith("model.layers."):
            leaves.update(dict.fromkeys(spec.sources, LeafSchema(0, False, rank)))

    map_specs(add, config)
    return BankSchema.covering(config, slots, [leaves], bits=False)


def pool_bytes(config: ModelConfig, rank: int) -> tuple[int, int]:
    """What a base takes in bfloat16, and what each member of a pool takes beside it.

    Args:
      config: the base's architecture.
      rank: of the members.

    Returns:
      (bytes of the base, bytes of a member), in memory on one device.
    """
    sizes = list[int]()

    def add(spec: ParamSpec) -> None:
        count = 1
        for size in spec.shape:
            count *= size
        sizes.append(2 * count)

    map_specs(add, config)
    bank = jax.eval_shape(pool_schema(config, 1, rank).empty)
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(bank))
    return sum(sizes), each
