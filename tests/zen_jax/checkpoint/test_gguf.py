"""A GGUF file reads like the Hugging Face folder that it was made of, or is refused by name."""

import dataclasses
import json
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from zen_jax.checkpoint.gguf import open_gguf
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.config import Llama3Rope
from zen_jax.convert import convert_base, convert_variant
from zen_jax.layout import EMBED, HEAD

Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
NORM = "model.norm.weight"


def test_float32_is_the_folder_to_the_bit(
    small, weights, write_gguf, family, tmp_path: Path
) -> None:
    tensors = weights(small)
    folder = family.write(tmp_path / "folder", tensors, **small.to_hf())
    file = write_gguf(tmp_path / "m.gguf", small, tensors)
    source = open_gguf(file)
    assert (source.name, source.coding, source.config) == ("m.gguf", "F32", small)
    # Names, shapes, values and settings: all that a digest covers.
    one = convert_base(folder, tmp_path / "one")
    other = convert_base(file, tmp_path / "other")
    assert one.digest == other.digest
    assert Store(tmp_path / "other").base().made["coding"] == "F32"
    assert Store(tmp_path / "other").base().made["source"] == "m.gguf"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "BF16", "F16"])
def test_coded_matrices_come_out_decoded(small, weights, write_gguf, tmp_path, kind: str) -> None:
    tensors = weights(small)
    source = open_gguf(write_gguf(tmp_path / "m.gguf", small, tensors, kind=kind))
    assert source.coding == kind
    coded = gguf.GGMLQuantizationType[kind]
    dtype = np.float16 if kind == "F16" else ml_dtypes.bfloat16
    for name, values in tensors.items():
        found = source.read(name)
        assert found.shape == values.shape
        if values.ndim == 1:
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, values)
            continue
        decoded = gguf.dequantize(gguf.quantize(values, coded), coded)
        assert found.dtype == dtype == ml_dtypes.bfloat16 or kind == "F16"
        # Rows are coded one by one, so turning them and coding them commute.
        np.testing.assert_array_equal(found, decoded.astype(dtype), err_msg=name)
        assert source.tensors[name].size == found.nbytes


def test_large_tensors_are_decoded_in_blocks(
    small, weights, write_gguf, tmp_path, monkeypatch
) -> None:
    tensors = weights(small)
    source = open_gguf(write_gguf(tmp_path / "m.gguf", small, tensors, kind="Q8_0"))
    whole = source.read(EMBED)
    monkeypatch.setattr("zen_jax.checkpoint.gguf._BLOCK", 5 * 64)
    np.testing.assert_array_equal(source.read(EMBED), whole)


def test_matrices_of_several_types_become_one(small, weights, write_gguf, tmp_path) -> None:
    tensors = weights(small)
    embed = tensors.pop(EMBED)
    file = write_gguf(
        tmp_path / "m.gguf",
        small,
        tensors,
        kind="Q8_0",
        more={"token_embd.weight": embed.astype(np.float16)},
    )
    source = open_gguf(file)
    assert source.read(EMBED).dtype == source.read(Q).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_families_keep_their_rows(
    small, weights, write_gguf, tmp_path, architecture: str
) -> None:
    config = dataclasses.replace(small, family=architecture, tie_word_embeddings=False)
    tensors = weights(config)
    source = open_gguf(write_gguf(tmp_path / "m.gguf", config, tensors, architecture=architecture))
    assert source.config == config
    assert set(source.tensors) == set(tensors) and HEAD in tensors
    extra = "self_attn.q_proj.bias" if architecture == "qwen2" else "self_attn.q_norm.weight"
    assert f"model.layers.0.{extra}" in tensors
    for name, values in tensors.items():
        np.testing.assert_array_equal(source.read(name), values, err_msg=name)


def test_a_window_makes_it_mistral(small, weights, write_gguf, tmp_path) -> None:
    settings = {"llama.attention.sliding_window": 8}
    file = write_gguf(tmp_path / "m.gguf", small, weights(small), settings=settings)
    config = open_gguf(file).config
    assert config.family == "mistral" and config.windows == (8, 8)


def test_llama3_rope_is_known_by_its_factors(small, weights, write_gguf, tmp_path) -> None:
    config = dataclasses.replace(small, rope_theta=500000.0)
    # Llama 3.1's settings with a head of 16, worked out by its published rule.
    waves = 2 * np.pi * 500000.0 ** (np.arange(8) / 8)
    smooth = (8192 / waves - 1) / 3
    factors = np.where(waves < 2048, 1.0, 8.0)
    middle = (waves >= 2048) & (waves <= 8192)
    assert middle.any()
    factors[middle] = 1 / ((1 - smooth[middle]) / 8 + smooth[middle])
    more = {"rope_freqs.weight": factors.astype(np.float32)}
    file = write_gguf(tmp_path / "m.gguf", config, weights(config), more=more)
    assert open_gguf(file).config.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    more["rope_freqs.weight"][4] *= 1.1
    file = write_gguf(tmp_path / "n.gguf", config, weights(config), more=more)
    with pytest.raises(SourceError, match="rope_freqs.weight holds factors that are not Llama 3's"):
        open_gguf(file)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"llama.expert_gating_func": 2}, "not known here: 'expert_gating_func'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; implemented is 16"),
        ({"llama.attention.value_length": 8}, "attention.value_length is 8"),
        ({"llama.block_count": None}, "lacks the setting llama.block_count"),
        ({"llama.block_count": 2_000_000_000}, "block_count 2000000000, and 20 tensors"),
        ({"llama.attention.head_count": [4, 4]}, "head_count as [4, 4]; expected one positive"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base as nan; expected one positive"),
        ({"llama.vocab_size": 273}, "vocab_size is 273; implemented is 272"),
        ({"general.type": "adapter"}, "holds a 'adapter'"),
        ({"split.count": 3}, "is one of 3 files"),
        ({"general.alignment": 48}, "alignment"),
    ],
)
def test_settings_that_are_not_implemented(
    small, weights, write_gguf, tmp_path, settings, problem: str
) -> None:
    if "general.alignment" in settings:
        file = write_gguf(tmp_path / "m.gguf", small, weights(small), settings={"x": 32})
        data = file.read_bytes().replace(
            struct.pack("<Q", 1) + b"x" + struct.pack("<II", 4, 32),
            struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 48),
        )
        file.write_bytes(data)
    else:
        file = write_gguf(tmp_path / "m.gguf", small, weights(small), settings=settings)
    with pytest.raises(SourceError) as error:
        open_gguf(file)
    assert problem in str(error.value)


def test_another_architecture(small, weights, write_gguf, tmp_path) -> None:
    file = write_gguf(tmp_path / "m.gguf", small, weights(small), architecture="gemma3")
    with pytest.raises(SourceError, match="architecture 'gemma3'; read are llama, qwen2, qwen3"):
        open_gguf(file)


def test_tensors_are_matched_strictly(small, weights, write_gguf, tmp_path) -> None:
    tensors = weights(small)
    del tensors[NORM]
    tensors[GATE] = tensors[GATE][:64]
    more = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(SourceError) as error:
        open_gguf(write_gguf(tmp_path / "m.gguf", small, tensors, more=more))
    assert len(error.value.problems) == 3
    for problem in (
        "lacks 'output_norm.weight'",
        "has 'blk.0.attn_q.bias', which this architecture does not use",
        "'blk.0.ffn_gate.weight' has shape (64, 64); its settings say (96, 64)",
    ):
        assert problem in str(error.value)


def test_a_coding_that_is_not_read(small, weights, write_gguf, tmp_path) -> None:
    tensors = weights(small)
    embed = tensors.pop(EMBED)
    more = {"token_embd.weight": embed.astype(np.float64)}
    with pytest.raises(SourceError, match="'token_embd.weight' is coded in F64"):
        open_gguf(write_gguf(tmp_path / "m.gguf", small, tensors, more=more))


def test_a_file_cut_short_anywhere(small, weights, write_gguf, tmp_path) -> None:
    data = write_gguf(tmp_path / "m.gguf", small, weights(small)).read_bytes()
    short = tmp_path / "short.gguf"
    for size in (0, 3, 12, 23, 24, 100, 5000, 9000, len(data) // 2, len(data) - 33):
        short.write_bytes(data[:size])
        with pytest.raises(SourceError, match=r"short.gguf: is (cut short|no GGUF file)"):
            open_gguf(short)
    short.write_bytes(data + b"\0" * 64)
    with pytest.raises(SourceError, match="has 64 bytes that belong to no tensor"):
        open_gguf(short)


def test_no_byte_of_a_header_does_harm(small, weights, write_gguf, tmp_path) -> None:
    file = write_gguf(tmp_path / "m.gguf", small, weights(small), settings=_NO_TOKENS)
    data = bytearray(file.read_bytes())
    end = data.index(b"output_norm.weight") + 40
    rng = np.random.default_rng(0)
    refused = 0
    for at in range(end):
        changed = bytearray(data)
        changed[at] = rng.choice([0, 255, rng.integers(256)])
        file.write_bytes(changed)
        try:
            open_gguf(file)
        except SourceError:
            refused += 1
    assert refused > end / 2  # some changes make another file that is as good


_NO_TOKENS = {
    f"tokenizer.{name}": None
    for name in (
        "ggml.tokens",
        "ggml.token_type",
        "ggml.merges",
        "chat_template",
        "ggml.model",
        "ggml.pre",
    )
}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _file(settings: bytes = b"", count: int = 0, tensors: bytes = b"", n: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n, count) + settings + tensors


ONE = _text("w") + struct.pack("<IQIQ", 1, 8, 0, 0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (_file(n=2**40), "has 1099511627776 tensors"),
        (_file(count=2**40), "1099511627776 settings"),
        (_file(struct.pack("<Q", 2**60), 1), "a text of 1152921504606846976 bytes"),
        (_file(_text("k") + struct.pack("<IQ", 8, 2**60), 1), "a text of"),
        (_file(_text("k") + struct.pack("<IIQ", 9, 0, 2**50), 1), "'k' 1125899906842624 values"),
        (_file(_text("k") + struct.pack("<IIQ", 9, 9, 1), 1), "array of the unknown type 9"),
        (_file(_text("k") + struct.pack("<I", 77), 1), "unknown type 77"),
        (_file(_text("k") + struct.pack("<IB", 0, 1) + _text("k") + b"\0\0\0\0\1", 2), "'k' twice"),
        (_file(struct.pack("<Q", 2) + b"\xff\xfe", 1), "not UTF-8"),
        (_file(n=1, tensors=_text("w") + struct.pack("<I", 99)), "99 dimensions"),
        (_file(n=1, tensors=_text("w") + struct.pack("<IQIQ", 1, 8, 777, 0)), "unknown type 777"),
        (_file(n=1, tensors=_text("w") + struct.pack("<IQIQ", 1, 8, 3, 0)), "blocks of 32"),
        (_file(n=1, tensors=_text("w") + struct.pack("<IQIQ", 1, 0, 0, 0)), "shape (0,)"),
        (_file(n=1, tensors=_text("w") + struct.pack("<IQIQ", 1, 2**60, 0, 0)), "is cut short"),
        (_file(n=2, tensors=ONE + ONE) + b"\0" * 99, "the tensor 'w' twice"),
        (_file(n=2, tensors=ONE + ONE.replace(b"w", b"v")) + b"\0" * 99, "overlaps another"),
        (_file(n=1, tensors=ONE[:-8] + struct.pack("<Q", 64)) + b"\0" * 199, "leaves a hole"),
    ],
)
def test_headers_made_to_harm(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(SourceError) as error:
        open_gguf(tmp_path / "bad.gguf")
    assert problem in str(error.value)


def test_a_file_that_shrinks_meanwhile(small, weights, write_gguf, tmp_path) -> None:
    file = write_gguf(tmp_path / "m.gguf", small, weights(small))
    source = open_gguf(file)
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(SourceError, match="ended inside 'token_embd.weight'"):
        source.read(EMBED)


def test_a_fine_tune_from_a_file(small, weights, write_gguf, family, tmp_path: Path) -> None:
    tensors = weights(small)
    rng = np.random.default_rng(1)
    tuned = {n: w + rng.normal(0, 0.01, w.shape).astype(np.float32) for n, w in tensors.items()}
    convert_base(write_gguf(tmp_path / "b.gguf", small, tensors), tmp_path / "s")
    template = {"tokenizer.chat_template": "own", "tokenizer.ggml.eos_token_id": 1}
    file = write_gguf(tmp_path / "t.gguf", small, tuned, settings=template)
    convert_variant(file, tmp_path / "s", "from-file")
    folder = family.write(tmp_path / "t", tuned, **small.to_hf())
    convert_variant(folder, tmp_path / "s", "from-folder")
    store = Store(tmp_path / "s")
    one = store.read_variant(store.variant("from-file"))
    other = store.read_variant(store.variant("from-folder"))
    for name, delta in one.items():
        np.testing.assert_array_equal(delta.bits, other[name].bits)
        np.testing.assert_array_equal(delta.scale, other[name].scale)
        np.testing.assert_array_equal(delta.dense, other[name].dense)
    config = json.loads(store.tokenizer_files(store.variant("from-file"))["tokenizer_config.json"])
    assert config["chat_template"] == "own" and config["eos_token"] == "<|im|>"
