"""From a store to the shapes in memory: what a bank has to hold, and the base on the devices."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.checkpoint.manifest import Corrupt, Manifest
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema, LeafSchema
from zen_jax.delta.widen import HeldShape
from zen_jax.layout import Params, ParamSpec, map_specs
from zen_jax.sharding import Placement

_log = logging.getLogger(__name__)

# What is being done, how many steps are done, how many there are.
Progress = Callable[[str, int, int], None]

MAX_SLOTS = 14
# Threads that read the base: each has a weight on the host meanwhile.
_READERS = 8


def bank_schema(store: Store, slots: int | None = None) -> BankSchema:
    """A bank with room for every variant that a store has now.

    Args:
      store: the store; a variant whose manifest is damaged is left out, and said so in the log.
      slots: M; None takes as many as there are variants, at most 14.

    Raises:
      BaseCorrupt: the base's manifest is damaged.
    """
    leaves: list[dict[str, LeafSchema]] = []
    configs: list[ModelConfig] = []
    names = store.names()
    for name in names:
        try:
            manifest = store.manifest(store.variant(name))
        except Corrupt as error:  # requests for it are told
            _log.warning("%s", error)
            continue
        leaves.append(_leaves(manifest))
        configs.append(manifest.config)
    if slots is None:
        slots = max(1, min(MAX_SLOTS, len(names)))
    return BankSchema.covering(store.base().config, slots, leaves, configs)


def _leaves(manifest: Manifest) -> dict[str, LeafSchema]:
    whole = {"dense", "whole"}
    return {
        name: LeafSchema(
            tensor.levels,
            bool(whole & set(tensor.parts)),
            tensor.parts["lora_a"].shape[0] if "lora_a" in tensor.parts else 0,
        )
        for name, tensor in manifest.tensors.items()
    }


def base_shapes(store: Store, held: HeldShape, placement: Placement | None = None) -> Params:
    """Shapes, dtypes and places of what `read_base` gives, from the manifest alone: enough to
    compile by.

    Args:
      store: the store.
      held: the shape that the base is to have in memory.
      placement: the mesh, or None for one device.

    Raises:
      BaseCorrupt: the base's manifest is damaged.
    """
    tensors = store.base().tensors

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        kinds = [jnp.dtype(tensors[n].parts["weight"].dtype) for n in held.base_sources(spec)]
        where = None if placement is None else placement.sharding(spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, np.result_type(*kinds), sharding=where)

    return map_specs(shape, held.config)


def read_base(
    store: Store,
    held: HeldShape,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> Params:
    """Reads a store's base onto the devices, in the dtype that it is stored in.

    A few weights at a time are on the host, as many as threads read. Each file is read once, but
    for an embedding that is the head of other members too. A device gets its own part.

    Args:
      store: the store.
      held: the shape that it is to have in memory.
      placement: the mesh, or None for one device.
      progress: told what is read, how many weights are done and how many there are.

    Raises:
      BaseCorrupt: a file is damaged.
    """
    specs = jax.tree.leaves(
        map_specs(lambda spec: spec, held.config), is_leaf=lambda node: isinstance(node, ParamSpec)
    )

    def read(spec: ParamSpec) -> jax.Array:
        names = dict.fromkeys(held.base_sources(spec))
        value = held.fuse_base_weight(spec, {name: store.base_tensor(name) for name in names})
        return jax.device_put(value, None if placement is None else placement.sharding(spec.axes))

    made: list[jax.Array] = []
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "read-base") as pool:
        reading = [pool.submit(read, spec) for spec in specs]
        try:
            for done, one in enumerate(reading):
                if progress is not None:
                    progress("reading the base", done, len(specs))
                made.append(one.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    whole = iter(made)
    return map_specs(lambda spec: next(whole), held.config)
