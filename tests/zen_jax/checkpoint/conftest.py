"""Small Hugging Face folders and stores made of them."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers
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
    (folder / "tokenizer.json").write_text(_letters(folder.name))
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


def _letters(name: str) -> str:
    """A tokenizer.json whose tokens are small letters, and a special one that bears a name."""
    letters = {chr(97 + i): i for i in range(26)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{name}|>"])
    return tokenizer.to_str()


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


def byte_tokens() -> list[str]:
    """The characters that stand for the bytes 0 to 255 in byte-level tokenizers since GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + moved.index(b)) for b in range(256)]


def _write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    kind: str = "F32",
    architecture: str = "llama",
    settings: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter makes it, through the library's writer.

    Args:
      kind: of all matrices; vectors are float32.
      settings: replace or, if None, remove what stands there otherwise.
      more: tensors by the file's names, besides.
    """
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_position,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|end|>", "<|im|>", *byte_tokens(), "th", "the", "Ġthe"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * 259,
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im|>{{ m.content }}{% endfor %}",
    }
    for key, value in (keys | dict(settings or {})).items():
        if value is not None:
            _add(writer, key, value)
    coded = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        stored = gguf_name(name)
        values = values.astype(np.float32)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            # llama.cpp's converter: the halves of a head are dealt out in pairs.
            halves = values.reshape(heads, 2, -1, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(stored, values)
        elif kind == "F16":
            writer.add_tensor(stored, values.astype(np.float16))
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, coded), raw_dtype=coded)
    for stored, values in (more or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives a Hugging Face tensor, from the library's own tables."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    if "q_norm" in name or "k_norm" in name:
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 4)
    stem, _, suffix = name.rpartition(".")
    return f"{names.get_name(stem)}.{suffix}"


@pytest.fixture(scope="session")
def small() -> ModelConfig:
    """An architecture whose rows are whole blocks of the quantised types."""
    return ModelConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def weights() -> Callable[..., Tensors]:
    """(config, seed) -> random tensors in float32 that bfloat16 holds exactly."""

    def make(config: ModelConfig, seed: int = 0) -> Tensors:
        rng = np.random.default_rng(seed)
        shapes = tensor_shapes(config)
        made = {n: rng.normal(0, 0.1, s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
        return {name: values.astype(np.float32) for name, values in made.items()}

    return make


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """See `_write_gguf`."""
    return _write_gguf
