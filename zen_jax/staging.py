"""A variant's way from its files into the shapes of a bank's slot and onto the devices.

Each step may fail by itself: `server.loader` runs the two here and, as the third,
`zen_jax.engine.Engine.put`. Between them a variant lies in host memory, in the bank's shapes: on an
accelerator in memory that is pinned, from where devices fetch it by themselves.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from zen_jax.checkpoint.manifest import Manifest, Variant
from zen_jax.checkpoint.raw import RawVariant
from zen_jax.checkpoint.store import Store
from zen_jax.delta.bank import BankSchema, DeltaBank, slot_axes
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import EMBED, HEAD, ParamSpec, map_specs
from zen_jax.sharding import Placement

_PINNED = "pinned_host"
# A load beside requests works for so long, then rests for so many times that.
_WORK_S, _RESTS = 0.001, 2.0


@dataclasses.dataclass(frozen=True)
class Staging:
    """How variants of a store come into a bank's slots; may be shared by threads.

    Attributes:
      store: where they are read.
      schema: the bank's shapes.
      placement: the mesh, or None for one device.
      busy: whether requests decode on the processors that a load works on; it then rests for twice
        as long as it works, a few milliseconds each time.
    """

    store: Store
    schema: BankSchema
    placement: Placement | None = None
    busy: Callable[[], bool] = lambda: False

    @property
    def slot_bytes(self) -> int:
        """Bytes of one variant in the bank's shapes, over all devices once."""
        shapes = jax.eval_shape(self.schema.empty)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)) // self.schema.slots

    def read(self, variant: Variant) -> RawVariant:
        """Its files in host memory; raises as `Store.read_files` does.

        Weights whose files are all there are checked and brought into shape at once, while the disk
        is waited for; what is wrong with one is left for `verify` to find again, and to tell.
        """
        manifest = self.store.manifest(variant)
        weights, files = self._weights(manifest)
        left = {sources: len(own) for sources, own in files.items()}
        of_file: dict[str, list[tuple[str, ...]]] = {}
        for sources, own in files.items():
            for file in own:
                of_file.setdefault(file, []).append(sources)
        lock = threading.Lock()
        rest = _Rest(self.busy)

        def hear(raw: RawVariant, file: str) -> None:
            rest.after_a_while()
            for sources in of_file.get(file, ()):
                with lock:
                    left[sources] -= 1
                    ready = left[sources] == 0
                if ready:
                    with contextlib.suppress(ValueError):
                        raw.check(files[sources])
                        spec, tensors = weights[sources]
                        deltas = {name: self.store.delta(raw, name) for name in tensors}
                        raw.done[sources] = self.schema.fit_weight(spec, deltas)

        return self.store.read_files(variant, hear, _together(manifest, weights))

    def _weights(
        self, manifest: Manifest
    ) -> tuple[
        dict[tuple[str, ...], tuple[ParamSpec, list[str]]], dict[tuple[str, ...], list[str]]
    ]:
        """By a weight's sources: what it is and which tensors it takes; and their files."""
        weights: dict[tuple[str, ...], tuple[ParamSpec, list[str]]] = {}
        files: dict[tuple[str, ...], list[str]] = {}

        def add(spec: ParamSpec) -> None:
            own = [EMBED if n == HEAD and n not in manifest.tensors else n for n in spec.sources]
            if all(name in manifest.tensors for name in own):
                weights[spec.sources] = spec, own
                parts = [part for n in own for part in manifest.tensors[n].parts.values()]
                files[spec.sources] = [file for part in parts for file in part.files()]

        map_specs(add, self.schema.held.config)
        return weights, files

    def verify(self, raw: RawVariant) -> DeltaBank:
        """What was read, checked and in the shapes of a slot; raises as `Store.check` and
        `BankSchema.fit` do."""
        fitted = self.schema.fit(self.store.check(raw), raw.done)
        if jax.default_backend() == "cpu":
            return fitted
        return jax.block_until_ready(jax.device_put(fitted, self.shardings(_PINNED)))

    def shardings(self, memory: str) -> Any:
        """Where the parts of a slot lie in a kind of memory of the devices, as a tree like a
        slot."""

        def where(axes: tuple[str | None, ...]) -> Any:
            if self.placement is None:
                return SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
            return self.placement.sharding(axes).with_memory_kind(memory)

        def parts(spec: ParamSpec) -> WeightDelta:
            return jax.tree.map(
                where, slot_axes(self.schema, spec), is_leaf=lambda node: isinstance(node, tuple)
            )

        return DeltaBank(map_specs(parts, self.schema.held.config), where(()))


class _Rest(threading.local):
    """Has a thread sleep now and then, so that others have its processor meanwhile."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy, self._since = busy, time.thread_time()

    def after_a_while(self) -> None:
        """Sleeps if the thread has worked for long enough and somebody needs the processor."""
        worked = time.thread_time() - self._since
        if worked > _WORK_S:
            if self._busy():
                time.sleep(_RESTS * worked)
            self._since = time.thread_time()


def _together(
    manifest: Manifest, weights: Mapping[tuple[str, ...], tuple[ParamSpec, list[str]]]
) -> list[list[str]]:
    """Leaves of signs that are in the bank as they are read: those of a weight that has one source,
    and of gate and up, which lie one after the other when they are fused."""
    groups: list[list[str]] = []
    taken: set[str] = set()
    for _, names in weights.values():
        parts = [manifest.tensors[name].parts.get("bits") for name in names]
        whole = [p for p in parts if p is not None and p.shards == 1 and p.shape[0] == 1]
        leaves = [part.leaf for part in whole]
        if len(names) == len(leaves) <= 2 and not taken & set(leaves):
            groups.append(leaves)
            taken |= set(leaves)
    return groups
