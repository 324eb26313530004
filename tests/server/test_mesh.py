"""A whole server over eight devices answers as one over a single device does."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from server.app import ServeOptions, running
from server.client import AsyncZenClient
from zen_jax.checkpoint.peft import write_adapter
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.convert import convert_base, convert_variant
from zen_jax.convert_lora import convert_lora
from zen_jax.layout import tensor_shapes
from zen_jax.training.bytes_tokenizer import VOCAB_SIZE, write_tokenizer

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.timeout(300)]

VARIANTS = {"signs": {}, "two-levels": {"levels": 2}, "by-matrix": {"scale": "matrix"}}
LORA = "adapter"
# Fewer kv heads than devices, so that attention is on each and all else is shared out.
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=128,
    family="qwen2",
)


FAMILIES = [
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "mistral", "qwen3")),
]


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32: over a base in bfloat16 each shard rounds activations in its own steps."""
    model = dataclasses.replace(MODEL, family=request.param)
    rng = np.random.default_rng(5)
    root = tmp_path_factory.mktemp("mesh")
    base = {
        name: np.ones(shape) if "norm" in name else rng.normal(0, 0.3, shape)
        for name, shape in tensor_shapes(model).items()
    }
    made = root / "store"
    for name in ("base", *VARIANTS):
        folder = root / name
        folder.mkdir()
        size = 0.0 if name == "base" else 0.1
        tensors = {
            n: (w + rng.normal(0, size, w.shape)).astype(np.float32) for n, w in base.items()
        }
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(model.to_hf()))
        write_tokenizer(folder, model.max_position)
        if name == "base":
            convert_base(folder, made, shards=8)
        else:
            convert_variant(folder, made, name, **VARIANTS[name])
    factors = {}
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        rows, size = base[name := f"model.layers.0.{module}.weight"].shape
        pair = rng.normal(0, 0.3, (2, size)), rng.normal(0, 0.3, (rows, 2))
        factors[name] = pair[0].astype(np.float32), pair[1].astype(np.float32)
    write_adapter(root / LORA, factors, rank=2, alpha=4.0)
    convert_lora(root / LORA, made, LORA)
    return made


def answers(store: Path, devices: int) -> list[list[int]]:
    """Of the base and all variants at once, greedy and drawn."""
    options = ServeOptions(port=0, rows=2, max_length=32, slots=4, devices=devices)
    with running(Store(store), options) as server:

        async def ask() -> list[list[int]]:
            async with AsyncZenClient(server.address) as client:
                asked = [
                    client.generate(model, prompt, max_tokens=10, ignore_eos=True, **sampling)
                    for model in ("base", *VARIANTS, LORA)
                    for prompt, sampling in (
                        ("a table of", {"temperature": 0.0}),
                        ("b", {"temperature": 0.9, "top_k": 20, "seed": 3}),
                    )
                ]
                return [answer.token_ids for answer in await asyncio.gather(*asked)]

        return asyncio.run(ask())


@pytest.mark.parametrize("store", FAMILIES, indirect=True)
def test_eight_devices_answer_as_one(store: Path, devices) -> None:
    one = answers(store, 1)
    assert len({tuple(tokens) for tokens in one}) == len(one), "else nothing is compared"
    assert answers(store, 8) == one
