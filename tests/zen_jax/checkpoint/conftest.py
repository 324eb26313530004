"""Small Hugging Face folders and stores made of them."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.convert import convert_base, convert_variant
from zen_jax.layout import tensor_shapes

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Family:
    """A base, a fine-tune of it, and how to write folders like theirs.

    Attributes:
      config: of both.
      base: the base's tensors, bfloat16.
      tuned: the fine-tune's.
      write: (folder, tensors, config settings to change, shards) -> folder.
    """

    config: ModelConfig
    base: Tensors
    tuned: Tensors
    write: Callable[..., Path]


def _write(
    folder: Path, tensors: Mapping[str, np.ndarray], shards: int = 1, **settings: Any
) -> Path:
    folder.mkdir(parents=True)
    config = {**_config().to_hf(), "_name_or_path": "/home/somebody/secret", "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | settings))
    (folder / "tokenizer.json").write_text(json.dumps({"of": folder.name}))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _config() -> ModelConfig:
    return ModelConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position=32,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def family() -> Family:
    """One layer, tied; the fine-tune's last norm is the base's."""
    rng = np.random.default_rng(7)
    shapes = tensor_shapes(_config())
    base = {n: rng.normal(0, 0.1, s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    tuned = {
        n: (w.astype(np.float32) + rng.normal(0, 0.01, w.shape)).astype(ml_dtypes.bfloat16)
        for n, w in base.items()
    }
    tuned["model.norm.weight"] = base["model.norm.weight"]
    return Family(_config(), base, tuned, _write)


@pytest.fixture(scope="session")
def sources(family: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the base and the fine-tune; not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    return (
        family.write(root / "base", family.base),
        family.write(root / "tuned", family.tuned),
    )


@pytest.fixture(scope="session")
def ready(sources: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the base and version 1 of "one"; not to be changed."""
    path = tmp_path_factory.mktemp("stores") / "ready"
    convert_base(sources[0], path)
    convert_variant(sources[1], path, "one")
    return path


@pytest.fixture
def store(ready: Path, tmp_path: Path) -> Store:
    """A copy of `ready` to do damage to."""
    return Store(Path(shutil.copytree(ready, tmp_path / "store")))
