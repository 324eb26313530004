"""Banks in the Hopper kernels' order: the kernels, in Pallas' interpreter, give the numbers of
packed ones."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.bitdelta_matmul import mosaic
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema
from zen_jax.delta.kernel_order import kernel_shardings, to_kernel_order
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.engine_state import Chunk
from zen_jax.layout import fuse, tensor_shapes, unfuse
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement, make_mesh

SIZES = EngineConfig(rows=2, max_length=16, chunk_tokens=8, max_steps=1, products="bfloat16")
ASKED = SamplingParams(temperature=0, logprobs=8, max_tokens=8)


@pytest.fixture(scope="module")
def small(config: ModelConfig) -> ModelConfig:
    """One layer, since the interpreter takes its time."""
    return dataclasses.replace(config, num_layers=1)


@pytest.fixture(scope="module")
def params(config: ModelConfig, small: ModelConfig, base: Any) -> Any:
    tensors = unfuse(config, base)
    return fuse(small, {name: tensors[name] for name in tensor_shapes(small)})


@pytest.fixture(scope="module")
def variant(small: ModelConfig, make_variant: Any) -> Any:
    whole = make_variant(3)
    return {name: whole[name] for name in tensor_shapes(small)}


def told(config: Any, params: Any, variant: Any, signs: str) -> np.ndarray:
    """Log-probabilities of a variant's first token, and of a decode step beside the base."""
    sizes = dataclasses.replace(SIZES, signs=signs)
    engine = Engine(place_params(config, params), sizes, BankSchema.covering(config, 3))
    bank = engine.write_slot(engine.init_bank(), 2, engine.stage(variant))
    state = engine.init_state()
    asked = {"sampling": ASKED, "end": 16}
    state, first = engine.prefill(bank, state, [Chunk(0, 2, [5, 9, 11], **asked)])
    state = dataclasses.replace(
        state,
        lengths=state.lengths.at[1].set(state.lengths[0]),
        tokens=state.tokens.at[1].set(state.tokens[0]),
        active=state.active.at[1].set(True),
    )
    state, then = engine.decode(bank, state)
    return np.concatenate([np.asarray(first.logprobs.top), np.asarray(then.logprobs.top)[0]])


@pytest.mark.soak
def test_the_engine_tells_the_same_with_signs_in_the_kernels_order(
    small: Any, params: Any, variant: Any
) -> None:
    packed, ordered = (told(small, params, variant, signs) for signs in ("packed", "hopper"))
    assert np.abs(packed[1] - packed[2]).max() > 0.3  # the variant is not the base
    # Activations rounded to bfloat16 in one, in 8-bit tables in the other.
    np.testing.assert_allclose(ordered, packed, atol=3e-2)


@pytest.mark.parametrize("slot", [False, True], ids=["bank", "slot"])
def test_each_shard_orders_its_own_part(small: Any, params: Any, variant: Any, slot: bool) -> None:
    schema, mesh = BankSchema.covering(small, 1), make_mesh(model=2)
    placement = Placement.of(small, mesh)
    made = schema.fit(variant)
    if not slot:
        made = jax.tree.map(lambda part: np.asarray(part)[None], made)
    placed = place_params(small, params, placement)
    order = jax.jit(lambda params, bank: to_kernel_order(small, params, bank, placement))
    ordered = order(placed, made)
    wanted = kernel_shardings(small, ordered, placement, stacked=not slot)
    for leaf, sharding in zip(jax.tree.leaves(ordered), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    # gate | up: both halves of each shard's rows, one after the other.
    fused = made.weights["layers"][0]["gate_up"].bits.reshape(1, 1, 2, 2, -1, 8)
    kernel = ordered.weights["layers"][0]["gate_up"].kernel
    words = kernel.words if not slot else kernel.words[None]
    scale = kernel.scale if not slot else kernel.scale[None]
    for shard in range(2):
        own = np.split(np.asarray(words), 2, axis=2)[shard]
        part = mosaic.KernelBank(own, np.split(np.asarray(scale), 2, axis=2)[shard], None)
        bits = np.asarray(mosaic.from_kernel_order(part, small.hidden_size))
        np.testing.assert_array_equal(bits, fused[:, :, :, shard].reshape(bits.shape))
