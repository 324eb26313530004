"""The resident variants side by side: every part of every weight stacked on a leading axis M.

A `BankSchema` fixes the shapes when the bank is made. Afterwards slots are only written, each time
every leaf of the slot, so that nothing of an evicted variant shows through and nothing recompiles.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.packing import packed_size
from zen_jax import host_memory
from zen_jax.config import ModelConfig
from zen_jax.delta.format import Array, WeightDelta
from zen_jax.delta.widen import HeldShape
from zen_jax.layout import (
    EMBED,
    HEAD,
    Params,
    ParamSpec,
    check_names,
    fuse_weight,
    map_specs,
)
from zen_jax.sharding import Placement


class DoesNotFit(ValueError):
    """A variant has a part that the bank has no room for."""


@dataclasses.dataclass(frozen=True)
class LeafSchema:
    """The parts that every slot holds for one weight.

    Attributes:
      levels: of signs and scales; 0 for none.
      dense: whether there is room for a whole difference.
      rank: of a low-rank part; 0 for none.
    """

    levels: int
    dense: bool
    rank: int = 0

    def widened(self, other: "LeafSchema") -> "LeafSchema":
        """The room that holds either."""
        return LeafSchema(
            max(self.levels, other.levels), self.dense or other.dense, max(self.rank, other.rank)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaBank:
    """The resident variants; one variant's slot has the same parts without the axis M.

    Attributes:
      weights: a tree of `WeightDelta` in the shape of ``Params``, each part with M in front.
      vocab: int32[M], how many tokens each variant has.
    """

    weights: Params
    vocab: Array


@dataclasses.dataclass(frozen=True)
class BankSchema:
    """The shapes of a bank.

    Attributes:
      held: the shape in which the base and its variants are held.
      slots: M, how many variants are resident at most.
      leaves: a `LeafSchema` for each Hugging Face tensor as held.
    """

    held: HeldShape
    slots: int
    leaves: Mapping[str, LeafSchema]

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}; a bank needs at least 1")

    @classmethod
    def covering(
        cls,
        config: ModelConfig,
        slots: int,
        variants: Iterable[Mapping[str, LeafSchema]] = (),
        configs: Iterable[ModelConfig] = (),
        bits: bool = True,
    ) -> "BankSchema":
        """The least schema that holds 1-bit variants with whole vectors, and all of `variants`.

        Args:
          config: the base's architecture.
          slots: M.
          variants: what each known variant has, by Hugging Face tensor.
          configs: each known variant's own architecture, for its vocabulary and tying.
          bits: whether there is room for 1-bit variants where none of `variants` is one.
        """
        held = HeldShape.of(config, configs)
        leaves: dict[str, LeafSchema] = {}

        def start(spec: ParamSpec) -> None:
            vector = spec.kind == "vector"
            for name in spec.sources:
                leaves[name] = LeafSchema(int(bits and not vector), bits and vector)

        map_specs(start, held.config)
        for variant in variants:
            own = dict(variant)
            own.setdefault(HEAD, own.get(EMBED, LeafSchema(0, False)))  # a tied head's delta
            for name in leaves.keys() & own.keys():
                leaves[name] = leaves[name].widened(own[name])
        return cls(held, slots, leaves)

    def leaf(self, spec: ParamSpec) -> LeafSchema:
        """The room for a fused weight: the most that its tensors ask for, and their ranks
        together, since each has factors of its own."""
        parts = [self.leaves[name] for name in spec.sources]
        rank = sum(p.rank for p in parts)
        return LeafSchema(max(p.levels for p in parts), any(p.dense for p in parts), rank)

    def tail(self, spec: ParamSpec) -> int:
        """Rows of a tail for a weight: of embedding and head, where a variant has more."""
        return self.held.tail if spec.sources[0] in (EMBED, HEAD) else 0

    def empty(self, placement: Placement | None = None) -> DeltaBank:
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
            bits = scale = low_rank = dense = None
            if leaf.levels:
                lead = (m, leaf.levels, *spec.shape[:-1])
                bits = zeros((*lead, packed_size(spec.shape[-1])), jnp.uint8, (None, None, *axes))
                scale = zeros(lead, jnp.float32, (None, None, *axes[:-1]))
            if leaf.rank:
                rank, out = leaf.rank, spec.shape[:-1]
                a = zeros((m, rank, spec.shape[-1]), jnp.float32, (None, None, axes[-1]))
                low_rank = a, zeros((m, *out, rank), jnp.float32, (None, *axes[:-1], None))
            if leaf.dense:
                dense = zeros((m, *spec.shape), jnp.float32, (None, *axes))
            more, tail = self.tail(spec), None
            if more:
                tail = zeros((m, more, spec.shape[-1]), jnp.bfloat16, (None, None, None))
            return WeightDelta(bits, scale, low_rank, dense, tail)

        vocab = jnp.full((self.slots,), self.held.base.vocab_size, jnp.int32)
        if placement is not None:
            vocab = jax.device_put(vocab, placement.sharding((None,)))
        return DeltaBank(map_specs(stacked, self.held.config), vocab)

    def fit(self, tensors: Mapping[str, WeightDelta]) -> DeltaBank:
        """One variant in the shape of a slot; parts that it lacks are zero.

        Args:
          tensors: its deltas by Hugging Face tensor, in host memory.

        Returns:
          NumPy arrays.

        Raises:
          DoesNotFit: a part has more levels or a higher rank than the bank, or is dense where the
            bank has no room, or the vocabulary is larger than planned; tensor and limit are named.
          ValueError: the tensors are not this model's.
        """
        added = getattr(tensors.get(EMBED), "tail", None)
        vocab = self.vocabulary(tensors, 0 if added is None else added.shape[0])
        return DeltaBank(
            map_specs(lambda spec: self.fit_weight(spec, tensors), self.held.config), vocab
        )

    def vocabulary(self, names: Iterable[str], more: int) -> np.int32:
        """How many tokens a variant has.

        Args:
          names: its Hugging Face tensors.
          more: rows that its embedding has and the base lacks.

        Raises:
          DoesNotFit: that are more than the bank has room for, or a head that it has no room for.
          ValueError: the tensors are not this model's.
        """
        own, tied = set(names), self.held.config.tie_word_embeddings
        if more > self.held.tail or (HEAD in own and tied):
            raise DoesNotFit(
                f"the variant has {more} more vocabulary rows than the base and "
                f"{'a' if HEAD in own else 'no'} head of its own; the bank has room for "
                f"{self.held.tail} more rows, and a head only if it was started with one"
            )
        if EMBED in own and not tied:
            own.add(HEAD)
        check_names(self.held.config, dict.fromkeys(own))
        return np.int32(self.held.base.vocab_size + more)

    def fit_weight(self, spec: ParamSpec, tensors: Mapping[str, WeightDelta]) -> WeightDelta:
        """One weight of `fit`; `tensors` has its sources at least, for a head that the variant ties
        the embedding.

        Raises:
          DoesNotFit, ValueError: as `fit` does.
        """
        own = {name: tensors[name] for name in (*spec.sources, EMBED) if name in tensors}
        if EMBED not in spec.sources and HEAD not in spec.sources:
            own.pop(EMBED, None)
        config = self.held.config
        delta = fuse_weight(config, spec, self.held.as_held(own))
        leaf, names = self.leaf(spec), ", ".join(spec.sources)
        levels = 0 if delta.bits is None else delta.bits.shape[0]
        if levels > leaf.levels:
            raise DoesNotFit(f"{names}: {levels} levels; the bank has room for {leaf.levels}")
        if delta.dense is not None and not leaf.dense:
            raise DoesNotFit(f"{names}: stored whole; the bank has room for signs only")
        rank = 0 if delta.low_rank is None else delta.low_rank[0].shape[0]
        if rank > leaf.rank:
            raise DoesNotFit(f"{names}: rank {rank}; the bank has room for {leaf.rank}")
        bits = scale = low_rank = dense = None
        if leaf.levels:
            lead = (leaf.levels, *spec.shape[:-1])
            packed = (*lead, packed_size(spec.shape[-1]))
            bits, scale = _room(delta.bits, packed, np.uint8), _room(delta.scale, lead)
        if leaf.rank:
            a, b = delta.low_rank or (None, None)
            out = (leaf.rank, *spec.shape[:-1])
            b = None if b is None else np.moveaxis(b, -1, 0)
            b = np.ascontiguousarray(np.moveaxis(_room(b, out), 0, -1))
            low_rank = _room(a, (leaf.rank, spec.shape[-1])), b
        if leaf.dense:
            dense = _room(delta.dense, spec.shape)
        room, tail = self.tail(spec), None
        if room:
            tail = np.zeros((room, spec.shape[-1]), ml_dtypes.bfloat16)
            if delta.tail is not None:
                tail[...] = delta.tail
        return WeightDelta(bits, scale, low_rank, dense, tail)


def _room(part: Array | None, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """A part in the shape of a slot: itself, or zeros with its levels or ranks in front, if it has
    any."""
    if part is not None and part.shape == shape:
        return np.asarray(part, dtype)
    whole = host_memory.empty(shape, dtype)
    whole[...] = 0
    if part is not None:
        whole[: part.shape[0]] = part
    return whole


def slot_axes(schema: BankSchema, spec: ParamSpec) -> WeightDelta:
    """Logical axes of each part of one weight's slot, as a `WeightDelta` of tuples."""
    leaf = schema.leaf(spec)
    return WeightDelta(
        bits=(None, *spec.axes) if leaf.levels else None,
        scale=(None, *spec.axes[:-1]) if leaf.levels else None,
        low_rank=((None, spec.axes[-1]), (*spec.axes[:-1], None)) if leaf.rank else None,
        dense=spec.axes if leaf.dense else None,
        tail=(None, None) if schema.tail(spec) else None,
    )


def is_axes(node: object) -> bool:
    """Whether a node of `slot_axes`' tree is the axes of one part."""
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def write_slot(bank: DeltaBank, slot: jax.Array, variant: DeltaBank) -> DeltaBank:
    """The bank with one slot replaced, every leaf of it; to be jitted with `bank` donated.

    Args:
      bank: as `BankSchema.empty` makes it.
      slot: int32 scalar in 0..M-1.
      variant: as `BankSchema.fit` makes it, on the device.
    """
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, slot, 0), bank, variant
    )
