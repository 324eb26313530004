"""A GGUF file that is written: our own reader finds every tensor as it was."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest

from zen_jax.checkpoint.gguf import open_gguf
from zen_jax.checkpoint.gguf_write import write_gguf
from zen_jax.config import Llama3Rope
from zen_jax.layout import tensor_shapes


def test_what_is_written_is_read_back(family, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, family.config, family.base)
    file = open_gguf(path)
    assert file.config == family.config
    assert file.coding == "BF16"
    for name, values in family.base.items():
        read = file.read(name)
        assert np.array_equal(read.astype(np.float32), values.astype(np.float32)), name
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_rows_of_q_lie_in_pairs_and_the_vocabulary_is_counted(family, tmp_path: Path) -> None:
    """The library's own reader sees the order that llama.cpp rotates by, and no tokenizer."""
    path = tmp_path / "model.gguf"
    write_gguf(path, family.config, family.base)
    reader = gguf.GGUFReader(path)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    stored = by_name["blk.0.attn_q.weight"]
    assert stored.tensor_type == gguf.GGMLQuantizationType.BF16
    rows = gguf.quants.dequantize(stored.data, stored.tensor_type)
    own = family.base["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
    assert np.array_equal(rows[:4], own[[0, 2, 1, 3]])  # a head of 4: (0, 2), (1, 3)
    assert by_name["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert reader.fields["llama.vocab_size"].contents() == family.config.vocab_size
    assert reader.fields["tokenizer.ggml.model"].contents() == "none"


def test_a_head_of_its_own_is_written(family, tmp_path: Path) -> None:
    config = dataclasses.replace(family.config, tie_word_embeddings=False)
    tensors = {n: np.full(s, 0.5, np.float32) for n, s in tensor_shapes(config).items()}
    write_gguf(tmp_path / "model.gguf", config, tensors)
    assert open_gguf(tmp_path / "model.gguf").config == config


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "qwen3"},
        {"rope_scaling": 2.0},
        {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 8192)},
        {"windows": (4,)},
    ],
)
def test_what_the_file_has_no_place_for_is_refused(family, tmp_path: Path, settings) -> None:
    config = dataclasses.replace(family.config, **settings)
    with pytest.raises(ValueError, match="no GGUF file is written for"):
        write_gguf(tmp_path / "model.gguf", config, family.base)
    assert not list(tmp_path.iterdir())
