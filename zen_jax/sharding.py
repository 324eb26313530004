"""Where parameters lie on a mesh: one table from logical axes to mesh axes.

A logical axis is sharded over the mesh axis that the table names if it divides into whole units
(a kv head, eight features of a packed byte, a row of the vocabulary); otherwise it is replicated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zen_jax.config import ModelConfig

MODEL = "model"
# Logical axis -> mesh axis. "kv_heads" and "heads" go together: query heads lie by kv head.
TABLE = {
    "vocab": MODEL,
    "kv_heads": MODEL,
    "heads": MODEL,
    "ff": MODEL,
    "embed": None,
}


def make_mesh(model: int = 1, data: int = 1) -> Mesh:
    """A mesh of ``data x model`` devices with axes (data, model).

    Raises:
      ValueError: there are fewer devices than that.
    """
    devices = jax.devices()
    if model < 1 or data < 1 or data * model > len(devices):
        raise ValueError(
            f"a mesh of data {data} x model {model} was asked for; there are {len(devices)} devices"
        )
    grid = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(grid, ("data", MODEL))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and which logical axes of one model are sharded on it; hashable.

    Attributes:
      mesh: axes (data, model).
      sharded: the logical axes that divide.
    """

    mesh: Mesh
    sharded: frozenset[str]

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh) -> "Placement":
        """The placement of a model's parameters on a mesh."""
        kv = config.num_kv_heads
        group = config.num_heads // kv * config.head_dim
        units = {
            "vocab": config.vocab_size,
            "kv_heads": kv,
            "heads": kv if group % 8 == 0 else 0,
            "ff": config.intermediate_size // 8 if config.intermediate_size % 8 == 0 else 0,
        }
        divides = {
            axis
            for axis, unit in units.items()
            if unit and unit % mesh.shape[TABLE[axis] or "data"] == 0
        }
        if not {"kv_heads", "heads"} <= divides:
            divides -= {"kv_heads", "heads"}
        return cls(mesh, frozenset(divides))

    def share(self, config: ModelConfig) -> ModelConfig:
        """What one place of the mesh holds of a model, as a smaller model of the same kind."""
        count = self.mesh.shape[MODEL]
        axes = {
            "vocab_size": "vocab",
            "intermediate_size": "ff",
            "num_heads": "kv_heads",
            "num_kv_heads": "kv_heads",
        }
        names = [name for name, axis in axes.items() if axis in self.sharded]
        return dataclasses.replace(
            config, **{name: getattr(config, name) // count for name in names}
        )

    def mesh_axis(self, axis: str | None) -> str | None:
        """The mesh axis that a logical axis lies on, or None when it is replicated."""
        return TABLE[axis] if axis in self.sharded else None

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(self.mesh_axis(axis) for axis in axes))

    def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """The same with the mesh, for `jax.device_put` and jit."""
        return NamedSharding(self.mesh, self.spec(axes))


def on_shards(
    function: Callable[..., Any], placement: Placement | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """A function that each device runs on its own shards; without a mesh, the function itself.

    XLA cannot split a kernel of ours, and would gather what one takes.

    Args:
      function: of arrays.
      placement: the mesh, or None for one device.
      in_specs: partitions of its arguments.
      out_specs: of its results.
    """
    if placement is None:
        return function
    return jax.shard_map(
        function, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
