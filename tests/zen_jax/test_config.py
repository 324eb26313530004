"""Reading a Hugging Face configuration: what is used, ignored and refused."""

import json
from pathlib import Path

import pytest

from zen_jax.config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def test_defaults_follow_hugging_face() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (6, 8, 10000.0)
    assert not config.tie_word_embeddings


def test_rope_theta_is_read_in_both_places() -> None:
    assert ModelConfig.from_hf(LLAMA | {"rope_theta": 1e5}).rope_theta == 1e5
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert ModelConfig.from_hf(LLAMA | new).rope_theta == 5e5


def test_what_is_written_is_read_back(config: ModelConfig) -> None:
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_read_in_both_places(key: str) -> None:
    old = {"rope_scaling": {key: "linear", "factor": 4}}
    new = {"rope_parameters": {"rope_theta": 1e4, key: "linear", "factor": 4}}
    assert ModelConfig.from_hf(LLAMA | old).rope_scaling == 4.0
    assert ModelConfig.from_hf(LLAMA | new) == ModelConfig.from_hf(LLAMA | old)


def test_windows_follow_hugging_face() -> None:
    heads = {"num_key_value_heads": 2}
    mistral = LLAMA | heads | {"model_type": "mistral"}
    assert ModelConfig.from_hf(mistral).windows == (4096, 4096)
    assert ModelConfig.from_hf(mistral | {"sliding_window": None}).windows == ()
    qwen = LLAMA | heads | {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}
    assert ModelConfig.from_hf(qwen | {"max_window_layers": 1}).windows == (None, 16)
    assert ModelConfig.from_hf(qwen | {"use_sliding_window": False}).windows == ()
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    assert ModelConfig.from_hf(qwen | kinds).windows == (16, None)


@pytest.mark.parametrize(
    "folder", sorted(GOLDEN.glob("*/config.json")), ids=lambda p: p.parent.name
)
def test_every_family_is_written_and_read_back(folder: Path) -> None:
    config = ModelConfig.from_hf(json.loads(folder.read_text()))
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_settings_that_do_not_matter_are_ignored() -> None:
    more = {"initializer_range": 0.1, "use_cache": False, "transformers_version": "5"}
    assert ModelConfig.from_hf(LLAMA | more) == ModelConfig.from_hf(LLAMA)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias to True"),
        ({"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
        ({"model_type": "mamba"}, "model_type to 'mamba'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "odd": 1}}, "odd"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "four settings"),
        ({"sliding_window": 8}, "sliding_window to 8 in a Llama"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"]}, "no sliding window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"logit_softcap": 30}, "not known here: logit_softcap;"),
        ({"\x1b]0;pwn\x07": 30}, r"not known here: '.x1b\]0;pwn.x07';"),
        ({"num_key_value_heads": 4}, "num_kv_heads is 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"vocab_size": 0}, "vocab_size to 0; expected 1 to"),
        ({"vocab_size": True}, "vocab_size to True; expected int"),
        ({"vocab_size": 96.0}, "vocab_size to 96.0; expected int"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers to 1000000000; expected 1 to 1024"),
        ({"hidden_size": 2**40, "head_dim": 8}, "hidden_size to 1099511627776"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps to nan; expected a finite number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps to '1e-5'"),
        ({"rope_theta": -1}, "rope_theta -1"),
        ({"num_attention_heads": 0}, "num_attention_heads to 0"),
        ({"rope_scaling": "linear"}, "rope_scaling to 'linear'; expected dict"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "expected a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling is 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor to nan"),
        ({"rms_norm_eps": None}, "rms_norm_eps to None"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope scaling"),
        ({"layer_types": "full"}, "layer_types to 'full'"),
        ({"model_type": ["llama"]}, "model_type to"),
        ({"rope_theta": 10**400}, "rope_theta to 1000.* expected a finite number"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta to 1000"),
        ({"rope_scaling": LLAMA3 | {"factor": 10**400}}, "'llama3', factor to 1000"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": float("inf")}},
            "original_max_position_embeddings to inf",
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads to 0; expected 1 to"),
        ({"head_dim": 0}, "head_dim to 0; expected 1 to"),
        ({"model_type": "mistral", "num_hidden_layers": 2**31 - 1}, "expected 1 to 1024"),
        ({"model_type": "qwen2", "layer_types": [["x"]]}, "sliding layer_types"),
        (
            {
                "model_type": "qwen2",
                "layer_types": [{}] * 2,
                "use_sliding_window": True,
                "sliding_window": 8,
            },
            "layer_types",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings to 'yes'; expected bool"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_missing_settings_are_all_named() -> None:
    with pytest.raises(ValueError, match="vocab_size, rms_norm_eps"):
        ModelConfig.from_hf(
            {k: v for k, v in LLAMA.items() if k not in ("vocab_size", "rms_norm_eps")}
        )
