"""What each place of a mesh holds of a variant, and which files it needs for that.

A share of a model is a smaller model of the same kind: fewer heads, fewer features, fewer rows of
the vocabulary. So what a device is to hold is fused and checked by the rules of a whole variant,
from what its own files have of each tensor. Nothing whole lies anywhere on the way, where the
store's files are cut as the mesh is; otherwise a place takes its part of files that others read
too. What every device holds whole, and an embedding that is widened for a variant with more
vocabulary, is made once for all.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from zen_jax.checkpoint.manifest import Manifest
from zen_jax.checkpoint.raw import Span
from zen_jax.delta.bank import BankSchema, DeltaBank, is_axes, slot_axes
from zen_jax.delta.format import WeightDelta
from zen_jax.delta.widen import HeldShape
from zen_jax.layout import EMBED, HEAD, ParamSpec, map_specs, param_specs, tensor_shapes
from zen_jax.sharding import MODEL, Placement

# Arrays that are put in one call: about two milliseconds' work.
_AT_ONCE = 64
# A weight's sources, and the place that it is of; None: all.
Key = tuple[tuple[str, ...], int | None]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A weight of a variant, or what one place of the mesh holds of it.

    Attributes:
      key: which.
      spec: what it is, in the size that it has here.
      spans: what it takes of which tensors of the variant; None: all.
      files: that these lie in.
    """

    key: Key
    spec: ParamSpec
    spans: Mapping[str, Span | None]
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shares:
    """How slots of a bank are spread over a mesh.

    Attributes:
      schema: the bank's shapes.
      placement: the mesh, or None for one device.
    """

    schema: BankSchema
    placement: Placement | None

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Those that this process has a device of."""
        return tuple(sorted({place for _, place in self._devices()}))

    @functools.cached_property
    def _own(self) -> BankSchema:
        """The bank of one place, but for weights that have a tail."""
        if self.placement is None:
            return self.schema
        config = self.placement.share(self.schema.held.config)
        return dataclasses.replace(self.schema, held=HeldShape(config, config))

    def pieces(self, manifest: Manifest, places: Sequence[int]) -> list[Piece]:
        """What has to be made of a variant for some places; weights of which it has not all tensors
        are left out."""
        made: list[Piece] = []

        def add(spec: ParamSpec, own: ParamSpec) -> None:
            names = [EMBED if n == HEAD and n not in manifest.tensors else n for n in spec.sources]
            if not all(name in manifest.tensors for name in names):
                return
            dimension = self._dimension(spec)
            for place in (None,) if dimension is None else places:
                spans = {name: self._span(name, dimension, place) for name in names}
                files = _files(manifest, spans)
                made.append(
                    Piece((spec.sources, place), spec if place is None else own, spans, files)
                )

        map_specs(add, self.schema.held.config, param_specs(self._own.held.config))
        return made

    def _dimension(self, spec: ParamSpec) -> int | None:
        """The dimension of a weight's tensors [O, I] that lies spread over the mesh, if it may be
        read so."""
        place = self.placement
        if place is None or place.mesh.shape[MODEL] == 1 or self.schema.tail(spec):
            return None
        if not any(map(place.mesh_axis, spec.axes)):
            return None
        return int(spec.kind != "vector" and place.mesh_axis(spec.axes[-1]) is not None)

    def _span(self, name: str, dimension: int | None, place: int | None) -> Span | None:
        if dimension is None or place is None:
            return None
        size = self._shapes[name][dimension]
        return Span(dimension, place * size, (place + 1) * size)

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor that a place holds a part of."""
        return tensor_shapes(self._own.held.config)

    def fit(self, piece: Piece, tensors: Mapping[str, WeightDelta]) -> WeightDelta:
        """A piece in the shapes of the bank; raises as `BankSchema.fit_weight` does."""
        schema = self.schema if piece.key[1] is None else self._own
        return schema.fit_weight(piece.spec, tensors)

    def rooms(self, manifest: Manifest, pieces: Sequence[Piece]) -> list[list[list[str]]]:
        """Files that lie in the bank as they are read, in groups of those that one after the other
        make a part of a weight; a room for each place."""
        rooms: dict[int | None, list[list[str]]] = {}
        taken: set[str] = set()
        for piece in pieces:
            leaf = self.schema.leaf(piece.spec)
            for kind, first in (("bits", leaf.levels), ("scale", leaf.levels), ("dense", None)):
                group = _whole_files(manifest, piece, kind, first)
                if group and not taken & set(group):
                    rooms.setdefault(piece.key[1], []).append(group)
                    taken |= set(group)
        return list(rooms.values())

    def slots(self, done: Mapping[Key, WeightDelta], vocab: np.int32) -> dict[int, DeltaBank]:
        """By place, what it is to hold.

        Args:
          done: all pieces in the bank's shapes, NumPy arrays.
          vocab: see `DeltaBank`.
        """

        def share(spec: ParamSpec, place: int) -> WeightDelta:
            own = done.get((spec.sources, place))
            if own is not None:
                return own
            return jax.tree.map(
                lambda array, axes: self._cut(array, axes, place),
                done[spec.sources, None],
                slot_axes(self.schema, spec),
            )

        config = self.schema.held.config
        return {
            place: DeltaBank(map_specs(functools.partial(share, place=place), config), vocab)
            for place in self.places
        }

    def _cut(self, whole: np.ndarray, axes: tuple[str | None, ...], place: int) -> np.ndarray:
        """A place's part of what is held whole."""
        if self.placement is None or not any(map(self.placement.mesh_axis, axes)):
            return whole
        count = self.placement.mesh.shape[MODEL]
        sizes = [size // count for size in whole.shape]
        return whole[
            tuple(
                slice(place * size, (place + 1) * size)
                if self.placement.mesh_axis(a)
                else slice(None)
                for size, a in zip(sizes, axes, strict=True)
            )
        ]

    def put(
        self,
        slots: Mapping[int, DeltaBank],
        memory: str | None,
        pause: Callable[[], None] = lambda: None,
    ) -> DeltaBank:
        """A slot on the devices: each is given what its place holds, and nothing else.

        Args:
          slots: of each place that this process has a device of.
          memory: a kind of the devices' memory; None: their own.
          pause: called after every few arrays.

        Returns:
          Arrays over the whole mesh, ready.
        """
        own: list[DeltaBank] = []
        for device, place in self._devices():
            leaves, shape = jax.tree.flatten(slots[place])
            for i in range(0, len(leaves), _AT_ONCE):
                where = SingleDeviceSharding(device, memory_kind=memory)
                leaves[i : i + _AT_ONCE] = jax.device_put(leaves[i : i + _AT_ONCE], where)
                pause()
            own.append(jax.tree.unflatten(shape, leaves))
        jax.block_until_ready(own)
        if self.placement is None:
            return own[0]

        def whole(sharding: Any, *shares: jax.Array) -> jax.Array:
            sizes = [
                size * (1 if axis is None else sharding.mesh.shape[axis])
                for size, axis in zip(shares[0].shape, sharding.spec, strict=True)
            ]
            return jax.make_array_from_single_device_arrays(tuple(sizes), sharding, list(shares))

        return jax.tree.map(whole, self.shardings(memory), *own)

    def shardings(self, memory: str | None) -> Any:
        """Where the parts of a slot lie on the mesh, in a kind of its devices' memory, as a tree
        like a slot."""
        assert self.placement is not None
        placement = self.placement

        def where(axes: tuple[str | None, ...]) -> Any:
            own = placement.sharding(axes)
            return own if memory is None else own.with_memory_kind(memory)

        def parts(spec: ParamSpec) -> WeightDelta:
            return jax.tree.map(where, slot_axes(self.schema, spec), is_leaf=is_axes)

        return DeltaBank(map_specs(parts, self.schema.held.config), where(()))

    def _devices(self) -> Iterator[tuple[Any, int]]:
        """This process's devices, and the place of each."""
        if self.placement is None:
            yield jax.devices()[0], 0
            return
        mesh = self.placement.mesh
        for row in np.moveaxis(mesh.devices, mesh.axis_names.index(MODEL), -1).reshape(
            -1, mesh.shape[MODEL]
        ):
            for place, device in enumerate(row):
                if device.process_index == jax.process_index():
                    yield device, place


def _files(manifest: Manifest, spans: Mapping[str, Span | None]) -> tuple[str, ...]:
    """Those that spans of tensors lie in."""
    return tuple(
        file
        for name, span in spans.items()
        for kind, part in manifest.tensors[name].parts.items()
        for file in (part.files() if span is None else span.files(kind, part))
    )


def _whole_files(manifest: Manifest, piece: Piece, kind: str, first: int | None) -> list[str]:
    """The files of a piece's parts of one kind, if they lie one after the other as the piece holds
    them, with `first` in front; else none."""
    group: list[str] = []
    parts = {name: manifest.tensors[name].parts.get(kind) for name in piece.spans}
    if len(parts) > 2 or len(parts) != len(piece.spec.sources) or (len(parts) == 2 and first != 1):
        return []
    for name, part in parts.items():
        if part is None or (first is not None and part.shape[0] != first):
            return []
        span = piece.spans[name]
        own = None if span is None else span.of(kind, part)
        cut = own is not None and part.axis == own[0]
        files = part.files() if own is None or span is None else span.files(kind, part)
        size = part.shape[part.axis] // part.shards
        if len(files) != 1 or (own is not None and not (cut and own[2] - own[1] == size)):
            return []
        group += files
    return group
