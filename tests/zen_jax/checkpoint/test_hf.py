"""A Hugging Face folder is read whole, or refused with every problem named."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from zen_jax.checkpoint.hf import INDEX, SINGLE, not_finite, open_folder
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.layout import EMBED, HEAD

Q = "model.layers.0.self_attn.q_proj.weight"


def test_reads_every_tensor_and_the_config(family, sources) -> None:
    folder = open_folder(sources[1])
    assert folder.config == family.config
    assert folder.name == "tuned"
    assert set(folder.tensors) == set(family.tuned)
    for name, expected in family.tuned.items():
        np.testing.assert_array_equal(folder.read(name), expected)


def test_shards_read_like_one_file(family, tmp_path: Path) -> None:
    folder = open_folder(family.write(tmp_path / "many", family.base, shards=3))
    assert len({t.file for t in folder.tensors.values()}) == 3
    for name, expected in family.base.items():
        np.testing.assert_array_equal(folder.read(name), expected)


def test_a_shard_that_the_index_names_is_missing_or_short(family, tmp_path: Path) -> None:
    folder = family.write(tmp_path / "many", family.base, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    last = folder / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(SourceError) as error:
        open_folder(folder)
    assert len(error.value.problems) == 2
    assert "model-00002-of-00003.safetensors: is missing" in str(error.value)
    assert "model-00003-of-00003.safetensors: is cut short" in str(error.value)


@pytest.mark.parametrize("place", ["../elsewhere.safetensors", "/etc/passwd", ".."])
def test_the_index_cannot_leave_the_folder(family, tmp_path: Path, place: str) -> None:
    folder = family.write(tmp_path / "many", family.base, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EMBED] = place
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(SourceError, match=re.escape(f"{place!r}, which is not in this folder")):
        open_folder(folder)


def test_index_and_shards_must_agree(family, tmp_path: Path) -> None:
    folder = family.write(tmp_path / "many", family.base, shards=2)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    old = index["weight_map"][EMBED]
    index["weight_map"][EMBED] = files[1] if old == files[0] else files[0]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(SourceError, match=f"lacks {EMBED}") as error:
        open_folder(folder)
    assert f"{old} holds {EMBED}, which {INDEX} does not place there" in str(error.value)


def test_all_problems_are_reported_together(family, tmp_path: Path) -> None:
    tensors = dict(family.base)
    tensors[Q] = np.zeros((8, 16), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    del tensors["model.norm.weight"]
    with pytest.raises(SourceError) as error:
        open_folder(family.write(tmp_path / "bad", tensors))
    text = str(error.value)
    assert text.startswith("bad: 3 problems: ")
    assert "lacks model.norm.weight" in text
    assert "has model.layers.0.self_attn.q_proj.bias, which this architecture does not use" in text
    assert f"{Q} has shape (8, 16); config.json says (16, 16)" in text


def test_a_dtype_without_a_reading(family, tmp_path: Path) -> None:
    tensors = {**family.base, Q: np.zeros((16, 16), np.int8)}
    with pytest.raises(SourceError, match=f"{Q} is I8"):
        open_folder(family.write(tmp_path / "bad", tensors))


def test_settings_that_change_the_arithmetic(family, tmp_path: Path) -> None:
    folder = family.write(tmp_path / "bad", family.base, hidden_act="gelu")
    with pytest.raises(SourceError, match="bad: config.json sets hidden_act"):
        open_folder(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(SourceError, match="has no config.json"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError, match="config.json: is not valid JSON"):
        open_folder(tmp_path)


def test_weights_in_another_format(family, tmp_path: Path) -> None:
    folder = family.write(tmp_path / "bin", family.base)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match="pytorch_model.bin is not read, save it as safetensors"):
        open_folder(folder)


def test_tied_weights_beside_a_head(family, tmp_path: Path) -> None:
    same = open_folder(family.write(tmp_path / "same", {**family.base, HEAD: family.base[EMBED]}))
    same.check_spare_head()
    assert HEAD not in same.tensors
    other = family.write(tmp_path / "other", {**family.base, HEAD: family.tuned[EMBED]})
    with pytest.raises(SourceError, match=f"{HEAD} differs from {EMBED} although"):
        open_folder(other).check_spare_head()


def test_an_untied_head_must_be_there(family, tmp_path: Path) -> None:
    folder = family.write(tmp_path / "untied", family.base, tie_word_embeddings=False)
    with pytest.raises(SourceError, match=f"lacks {HEAD}"):
        open_folder(folder)


def test_values_that_are_not_finite_are_counted() -> None:
    values = np.array([1, np.nan, -np.inf], np.float16)
    assert not_finite("w", values) == "w has 2 of 3 values that are NaN or infinite"
    assert not_finite("w", values[:1]) is None


def test_tokenizer_files_without_private_paths(sources) -> None:
    files = open_folder(sources[0]).tokenizer_files()
    assert files["tokenizer.json"] == (sources[0] / "tokenizer.json").read_bytes()
    config = json.loads(files["config.json"])
    assert config["eos_token_id"] == 2
    assert not any("secret" in data.decode() for data in files.values())
