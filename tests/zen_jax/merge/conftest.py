"""Matrices with spectra that are well defined, and a small family of checkpoints on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from zen_jax.config import ModelConfig
from zen_jax.layout import tensor_shapes
from zen_jax.training.bytes_tokenizer import write_tokenizer

Tensors = dict[str, np.ndarray]


def _matrix(seed: int, shape: tuple[int, int], rank: int | None = None) -> np.ndarray:
    """float64[O, I] whose singular values each are at most 0.9 of the one before."""
    rng = np.random.default_rng(seed)
    n = min(shape)
    values = np.cumprod(rng.uniform(0.3, 0.9, n)) * rng.uniform(0.1, 10)
    values[n if rank is None else rank :] = 0
    left = np.linalg.qr(rng.normal(size=(shape[0], n)))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], n)))[0]
    return (left * values) @ right.T


@pytest.fixture(scope="session")
def matrix() -> Callable[..., np.ndarray]:
    """See `_matrix`."""
    return _matrix


@pytest.fixture(scope="session")
def rotation() -> Callable[[int, int], np.ndarray]:
    """(seed, n) -> an orthogonal matrix."""
    return lambda seed, n: np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]


CONFIG = ModelConfig(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    """Two layers, tied."""
    return CONFIG


def _write(
    folder: Path,
    tensors: Tensors,
    config: ModelConfig = CONFIG,
    dtype: Any = ml_dtypes.bfloat16,
) -> Path:
    folder.mkdir(parents=True)
    save_file({n: v.astype(dtype) for n, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_hf() | {"torch_dtype": "bfloat16"}))
    write_tokenizer(folder, config.max_position)
    return folder


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    """(folder, tensors, config, dtype) -> a Hugging Face folder."""
    return _write


def _base(config: ModelConfig = CONFIG, seed: int = 5) -> Tensors:
    """Random weights in float32 that bfloat16 holds."""
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(config)
    made = {n: rng.normal(0, 0.2, s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    return {name: value.astype(np.float32) for name, value in made.items()}


def _tuned(base: Tensors, seed: int, size: float = 0.02) -> Tensors:
    rng = np.random.default_rng((11, seed))
    made = {n: w + rng.normal(0, size, w.shape) for n, w in base.items()}
    return {n: v.astype(ml_dtypes.bfloat16).astype(np.float32) for n, v in made.items()}


@pytest.fixture(scope="session")
def make_base() -> Callable[..., Tensors]:
    """See `_base`."""
    return _base


@pytest.fixture(scope="session")
def make_tuned() -> Callable[..., Tensors]:
    """See `_tuned`."""
    return _tuned


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base, a, b and c, in bfloat16; not to be changed."""
    root = tmp_path_factory.mktemp("family")
    base = _base()
    _write(root / "base", base)
    for seed, name in enumerate("abc"):
        _write(root / name, _tuned(base, seed))
    return root
