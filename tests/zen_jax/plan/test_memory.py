"""A plan's bytes against arrays that lie on devices, to the byte."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema
from zen_jax.delta.resident import ResidentBank
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.layout import map_specs
from zen_jax.plan import memory
from zen_jax.plan.memory import Layout
from zen_jax.plan.models import known_models, read_model
from zen_jax.sharding import Placement, make_mesh

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = ["llama_untied", "llama_tied", "qwen2_bias", "qwen3_norm", "mistral_window"]
# As the models' own cards say.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}


def on_first(tree: Any) -> int:
    """Bytes of arrays on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def configs() -> dict[str, ModelConfig]:
    """Golden ones, and one whose sizes are odd."""
    found = {
        case: ModelConfig.from_hf(json.loads((GOLDEN / case / "config.json").read_text()))
        for case in CASES
    }
    return found | {"odd": ModelConfig(51, 40, 72, 3, 6, 2, 8, 64)}


@pytest.mark.parametrize("devices_used", [1, 2, 8])
@pytest.mark.parametrize("case", [*CASES, "odd"])
def test_bytes_are_those_of_the_engine(case: str, devices_used: int, devices) -> None:
    config = configs()[case]
    sizes = EngineConfig(rows=3, max_length=32, chunk_tokens=16, page_size=16, kv_dtype="int8")
    mesh = None if devices_used == 1 else make_mesh(devices_used)
    place = None if mesh is None else Placement.of(config, mesh)
    params = map_specs(lambda spec: np.zeros(spec.shape, jnp.bfloat16), config)
    engine = Engine(
        place_params(config, params, place), sizes, BankSchema.covering(config, 3), mesh
    )
    state = engine.init_state()
    lay = Layout(config, 3, sizes, devices_used)
    assert memory.weight_bytes(lay.share) == on_first(engine.params)
    assert memory.bank_bytes(lay.share, 3, ordered=False) == on_first(engine.init_bank())
    assert memory.kv_bytes(lay) == on_first(state.cache)
    assert memory.state_bytes(lay) == on_first(dataclasses.replace(state, cache=[]))


@pytest.mark.parametrize("case", ["llama_untied", "odd"])
def test_bytes_of_signs_in_the_kernels_order(case: str, devices) -> None:
    config, mesh = configs()[case], make_mesh(2)
    shapes = map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), config)
    resident = ResidentBank.of(BankSchema.covering(config, 3), shapes, mesh, "hopper")
    held = jax.tree.map(
        lambda leaf, where: where.shard_shape(leaf.shape),
        resident.shapes(),
        resident.shardings(stacked=True),
    )
    each = jax.tree.map(lambda leaf, of: leaf.update(shape=of).size, resident.shapes(), held)
    size = jax.tree.map(lambda leaf, count: leaf.dtype.itemsize * count, resident.shapes(), each)
    lay = Layout(config, 3, EngineConfig(), 2, ordered=True)
    assert memory.bank_bytes(lay.share, 3, ordered=True) == sum(jax.tree.leaves(size))


@pytest.mark.parametrize("name", known_models())
def test_well_known_models_have_their_sizes(name: str) -> None:
    config = read_model(name)
    assert config.parameters == PARAMETERS[name]
    assert memory.weight_bytes(config) == 2 * config.parameters


def test_a_base_in_8_bits_has_half_the_bytes_and_a_scale_a_row() -> None:
    config = ModelConfig(64, 16, 32, 1, 2, 1, 8, 64)
    rows = 64 * 2 + 4 * 8 + 16 + 2 * 32 + 16
    vectors = 3 * 16
    want = (config.parameters - vectors) + 4 * rows + 2 * vectors
    assert memory.weight_bytes(config, "int8") == memory.weight_bytes(config, "fp8") == want


def test_no_variants_take_no_bank() -> None:
    assert memory.bank_bytes(read_model("smollm2-135m"), 0, ordered=False) == 0
