"""Bytes that each card holds of a base, a bank of variants and the cache, exactly.

They follow from what the engine itself is made of: the table of parameters, the bank's shapes, the
pages. A place of a mesh holds a share of the model, which is a smaller model of the same kind, so
its bytes are those of the smaller model. No array is made.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema
from zen_jax.delta.format import WeightDelta
from zen_jax.engine_state import DecodeState, EngineConfig
from zen_jax.kv_cache import page_bytes
from zen_jax.layout import ParamSpec, map_specs
from zen_jax.sharding import MODEL, Placement

# Bytes of a weight by the base's dtype; those of 8 bits have a float32 scale a row of outputs.
BASE_DTYPES = {"bfloat16": 2, "int8": 1, "fp8": 1}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is planned for, and how it lies.

    Attributes:
      config: the whole model.
      variants: M, resident at once; 0 for a base alone.
      sizes: rows, lengths and pages of the engine.
      devices: of the mesh axis "model".
      base_dtype: one of `BASE_DTYPES`.
      ordered: whether signs lie in the Hopper kernels' order, else packed.
    """

    config: ModelConfig
    variants: int
    sizes: EngineConfig
    devices: int = 1
    base_dtype: str = "bfloat16"
    ordered: bool = False

    @functools.cached_property
    def placement(self) -> Placement:
        """Which axes are sharded, on a mesh without devices."""
        mesh: Any = AbstractMesh((1, self.devices), ("data", MODEL))
        return Placement.of(self.config, mesh)

    @functools.cached_property
    def share(self) -> ModelConfig:
        """What one card holds of the model."""
        return self.placement.share(self.config)


def weight_bytes(config: ModelConfig, base_dtype: str = "bfloat16") -> int:
    """Bytes of a model's parameters, or of a share's.

    Args:
      config: the model, or `Layout.share`.
      base_dtype: one of `BASE_DTYPES`; vectors are bfloat16 in any.
    """
    total = 0

    def add(spec: ParamSpec) -> None:
        nonlocal total
        count = math.prod(spec.shape)
        each = 2 if spec.kind == "vector" else BASE_DTYPES[base_dtype]
        total += count * each + (0 if each == 2 else 4 * count // spec.shape[-1])

    map_specs(add, config)
    return total


def bank_bytes(config: ModelConfig, variants: int, ordered: bool) -> int:
    """Bytes of a bank of 1-bit variants with whole vectors.

    Args:
      config: the model, or `Layout.share`.
      variants: M; 0 is no bank.
      ordered: padded and in the order of the Hopper kernels, else packed as in the store.
    """
    return 0 if variants < 1 else _over_layers(lambda c: _bank_bytes(c, variants, ordered), config)


def _over_layers(count: Any, config: ModelConfig) -> int:
    """A sum over layers that are all alike, from models of one layer and of two."""

    def of(layers: int) -> int:
        return count(dataclasses.replace(config, num_layers=layers, windows=()))

    one = of(1)
    return one if config.num_layers == 1 else one + (config.num_layers - 1) * (of(2) - one)


def _bank_bytes(config: ModelConfig, variants: int, ordered: bool) -> int:
    schema = BankSchema.covering(config, variants)
    bank = jax.eval_shape(schema.empty)
    total = _nbytes(bank.vocab)

    def add(spec: ParamSpec, delta: WeightDelta) -> None:
        nonlocal total
        if ordered and delta.bits is not None:
            levels = delta.bits.shape[1]
            high = layout.padded(math.prod(spec.shape[:-1]), layout.PADDED_ROWS)
            wide = layout.padded(spec.shape[-1], layout.PADDED_COLUMNS)
            total += variants * levels * high * wide // 8
            total += variants  # whether it may be added to its weight
            delta = dataclasses.replace(delta, bits=None, scale=None)
            total += 4 * variants * levels * math.prod(spec.shape[:-1])
        total += sum(_nbytes(part) for part in jax.tree.leaves(delta))

    map_specs(add, config, bank.weights)
    return total


def kernel_arrays(lay: Layout) -> set[tuple[str, int]]:
    """The large arrays of one card that a step must not copy: dtype as XLA writes it, and elements.

    Weights, their signs in the Hopper kernels' order, and a layer's keys.
    """
    found: set[tuple[str, int]] = set()

    def add(spec: ParamSpec) -> None:
        if spec.kind == "vector":
            return
        outputs, inputs = math.prod(spec.shape[:-1]), spec.shape[-1]
        found.add(("bf16", outputs * inputs))
        high = layout.padded(outputs, layout.PADDED_ROWS)
        wide = layout.padded(inputs, layout.PADDED_COLUMNS)
        found.add(("u32", lay.variants * high * wide // 32))

    map_specs(add, dataclasses.replace(lay.share, num_layers=1, windows=()))
    sizes, share = lay.sizes, lay.share
    kept = {"bfloat16": "bf16", "float32": "f32", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}
    numbers = sizes.all_pages * sizes.page_size * share.num_kv_heads * share.head_dim
    return found | {(kept[sizes.held_as], numbers)}


def kv_bytes(lay: Layout) -> int:
    """Bytes of all pages on one card."""
    return lay.sizes.all_pages * page_bytes(lay.share, lay.sizes.page_size, lay.sizes.held_as)


def state_bytes(lay: Layout) -> int:
    """Bytes of what the rows have beside keys and values, on each card: their settings, and how
    often each token was seen."""
    empty = functools.partial(DecodeState.empty, [], lay.sizes.rows, lay.config.vocab_size)
    return sum(_nbytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(empty)))


def temporary_bytes(lay: Layout) -> int:
    """An estimate of what a step needs beside its arguments, on one card.

    Decoding gathers the keys and values of all rows, at their longest, for one layer at a time. A
    call that reads prompts has logits for each of its tokens, and what lies between two products.
    """
    sizes, share = lay.sizes, lay.share
    each = jnp.dtype(sizes.dtype).itemsize
    head = share.num_kv_heads * share.head_dim
    gathered = 2 * sizes.rows * sizes.columns * sizes.page_size * head * each
    logits = 4 * sizes.rows * lay.config.vocab_size
    tokens = max(count * length for count, length in sizes.shapes)
    between = tokens * 4 * (2 * share.intermediate_size + 3 * lay.config.hidden_size)
    return max(gathered + logits, 4 * logits, between + 4 * logits)


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
