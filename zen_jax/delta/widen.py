"""Members of a family that differ in vocabulary or tying, brought into one shape in memory.

A fine-tune may have more vocabulary rows than its base, or a head of its own where the base's is
the embedding. In memory all members then have the widest vocabulary, padded, and a head apart; the
rows that the base lacks are kept whole in each variant, as the tail of its embedding and head.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from zen_jax.config import ModelConfig
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import (
    EMBED,
    HEAD,
    Params,
    ParamSpec,
    fuse,
    fuse_delta,
    fuse_parts,
    tensor_shapes,
)

Array = Any
# Rows of a widened vocabulary are a multiple of this, so that a mesh divides them.
_ROWS = 64


@dataclasses.dataclass(frozen=True)
class HeldShape:
    """The shape in which a base and its variants are held.

    Attributes:
      base: the base's configuration, as its checkpoint has it.
      config: as held: the widest vocabulary, and untied as soon as one member is.
    """

    base: ModelConfig
    config: ModelConfig

    @classmethod
    def of(cls, base: ModelConfig, variants: Iterable[ModelConfig] = ()) -> "HeldShape":
        """The least shape that holds a base and these variants."""
        members = [base, *variants]
        vocab = max(member.vocab_size for member in members)
        if vocab > base.vocab_size:
            vocab = -(-vocab // _ROWS) * _ROWS
        tied = all(member.tie_word_embeddings for member in members)
        held = dataclasses.replace(base, vocab_size=vocab, tie_word_embeddings=tied)
        return cls(base, held)

    @property
    def tail(self) -> int:
        """Vocabulary rows that the base lacks."""
        return self.config.vocab_size - self.base.vocab_size

    def fuse_base(self, tensors: Mapping[str, Array]) -> Params:
        """The base's Hugging Face tensors -> ``Params`` as held; rows that it lacks are zero.

        Raises:
          ValueError: as `zen_jax.layout.fuse`.
        """
        missing = sorted(set(tensor_shapes(self.base)) - set(tensors))
        if missing:
            raise ValueError(f"tensors are missing: {', '.join(missing)}")
        return fuse(self.config, self._base_as_held(tensors))

    def fuse_base_weight(self, spec: ParamSpec, tensors: Mapping[str, Array]) -> Array:
        """One weight of `fuse_base`.

        Args:
          spec: of ``param_specs(config)``.
          tensors: those of `base_sources`.
        """
        return fuse_parts(self.config, spec, self._base_as_held(tensors))

    def base_sources(self, spec: ParamSpec) -> tuple[str, ...]:
        """The base's tensors that a weight is made of: the embedding for a head that it lacks."""
        has = tensor_shapes(self.base)
        return tuple(name if name in has else EMBED for name in spec.sources)

    def _base_as_held(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        held = dict(tensors)
        for name in {EMBED, HEAD} & set(held):
            held[name] = _with_rows(held[name], self.config.vocab_size)
        if not self.config.tie_word_embeddings and HEAD not in held and EMBED in held:
            held[HEAD] = held[EMBED]
        return held

    def fuse_variant(self, tensors: Mapping[str, WeightDelta]) -> Params:
        """A variant's deltas by Hugging Face tensor -> a tree in the shape of ``Params`` as held.

        A head that the variant ties is given its embedding's delta.

        Raises:
          ValueError: it has more vocabulary rows or another tying than was planned for, or as
            `zen_jax.layout.fuse_delta`.
        """
        return fuse_delta(self.config, self.as_held(tensors))

    def as_held(self, tensors: Mapping[str, WeightDelta]) -> dict[str, WeightDelta]:
        """A variant's deltas, or some of them, with embedding and head in the shape as held.

        Raises:
          ValueError: there are more vocabulary rows than was planned for.
        """
        held = dict(tensors)
        if not self.config.tie_word_embeddings and HEAD not in held and EMBED in held:
            held[HEAD] = held[EMBED]
        for name in {EMBED, HEAD} & set(held):
            held[name] = self._widened(name, held[name])
        return held

    def _widened(self, name: str, delta: WeightDelta) -> WeightDelta:
        if delta.tail is not None and delta.tail.shape[0] > self.tail:
            raise ValueError(
                f"{name} has {delta.tail.shape[0]} more rows than the base's; "
                f"there is room for {self.tail}"
            )
        if not self.tail:
            return delta
        rows = self.config.vocab_size
        shape = tensor_shapes(self.config)[name]
        bits, scale, tail = delta.bits, delta.scale, delta.tail
        if bits is not None and scale is not None:
            scale = np.broadcast_to(scale, bits.shape[:2])
            bits, scale = _with_rows(bits, rows, 1), _with_rows(scale, rows, 1)
        # bfloat16 holds a checkpoint's rows as they are in all but float32 and float16 sources.
        empty = np.zeros((self.tail, shape[1]), ml_dtypes.bfloat16)
        tail = empty if tail is None else _with_rows(tail, self.tail)
        dense = None if delta.dense is None else _with_rows(delta.dense, rows)
        low_rank = delta.low_rank
        if low_rank is not None:
            low_rank = low_rank[0], _with_rows(low_rank[1], rows)
        return WeightDelta(bits, scale, low_rank, dense, tail)


def _with_rows(array: Array, rows: int, axis: int = 0) -> Array:
    """Zeros appended along an axis up to a size."""
    more = rows - array.shape[axis]
    if not more:
        return array
    pad = [(0, 0)] * array.ndim
    pad[axis] = (0, more)
    return np.pad(np.asarray(array), pad)
