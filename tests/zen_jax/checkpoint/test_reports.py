"""What people report of converters, from folders to what the served model computes.

Each fine-tune here differs from its base by signs with one scale a row, so that one bit holds it
exactly: what a member computes has to be what its own folder's weights compute.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zen_jax
from zen_jax.checkpoint.gguf_tokenizer import tokenizer_files
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.convert import convert_base, convert_variant
from zen_jax.generate import Family, Member
from zen_jax.layout import EMBED, fuse, tensor_shapes
from zen_jax.model import make_forward
from zen_jax.sampling import SamplingParams

Tensors = dict[str, np.ndarray]
TOKENS = np.array([[3, 70, 115, 9, 260], [0, 1, 2, 200, 44]])


def _tuned(base: Tensors, config: ModelConfig, seed: int) -> Tensors:
    """A fine-tune of a base that one bit a weight holds; rows that the base lacks are its own."""
    rng = np.random.default_rng(seed)
    tuned = {}
    for name, shape in tensor_shapes(config).items():
        start = base[name] if name in base else base[EMBED]  # a head that the base ties
        scale = rng.uniform(0.01, 0.05, (len(start), *[1] * (start.ndim - 1)))
        new = start + (scale * rng.choice([-1, 1], start.shape)).astype(np.float32)
        more = rng.normal(0, 0.3, (shape[0] - len(start), *shape[1:])).astype(np.float32)
        tuned[name] = np.concatenate([new, more])
    return tuned


@pytest.fixture(scope="session")
def folder(small: ModelConfig, family) -> Callable[..., Path]:
    """(path, config, tensors, tokenizer settings by GGUF's names) -> a folder like published ones,
    with a tokenizer that works."""

    def write(path: Path, config: ModelConfig, tensors: Tensors, **settings: Any) -> Path:
        family.write(path, tensors, **config.to_hf(), shards=2)
        characters = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(256, 256 + 160)]
        spelled = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": ["<|end|>", "<|im|>", *characters, "he"],
            "token_type": [3, 3] + [1] * 255,
            "merges": ["h e"],
            "eos_token_id": 0,
            **settings,
        }
        own = {f"tokenizer.ggml.{name}": value for name, value in spelled.items()}
        own["tokenizer.chat_template"] = spelled.pop("template", "{{ messages[0].content }}")
        for name, data in tokenizer_files("test", own, config).items():
            (path / name).write_bytes(data)
        return path

    return write


@functools.cache
def _forward(config: ModelConfig) -> Callable[..., Any]:
    return jax.jit(make_forward(config))


def _expected(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], tokens: np.ndarray = TOKENS
) -> np.ndarray:
    return np.asarray(_forward(config)(fuse(config, tensors), tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_heads_and_vocabularies_of_their_own(small, weights, folder, tmp_path, tied: bool) -> None:
    base_config = dataclasses.replace(small, num_layers=1, tie_word_embeddings=tied)
    base = weights(base_config)
    members = {
        "same": base_config,
        "other-tying": dataclasses.replace(base_config, tie_word_embeddings=not tied),
        "one-row-more": dataclasses.replace(base_config, vocab_size=small.vocab_size + 1),
    }
    store = tmp_path / "store"
    convert_base(folder(tmp_path / "base", base_config, base), store)
    tensors = {}
    for seed, (name, config) in enumerate(members.items()):
        tensors[name] = _tuned(base, config, seed)
        convert_variant(folder(tmp_path / name, config, tensors[name]), store, name)
    loaded = zen_jax.load(store)
    np.testing.assert_allclose(
        loaded["base"].logits(TOKENS), _expected(base_config, base), atol=2e-4
    )
    for name, config in members.items():
        expected = _expected(config, tensors[name])
        found = loaded[name].logits(TOKENS)
        assert found.shape == expected.shape and found.shape[-1] == config.vocab_size
        np.testing.assert_allclose(found, expected, atol=2e-4, err_msg=name)
        # The base's answer would not do.
        assert np.abs(expected[..., :272] - _expected(base_config, base)).max() > 0.1


@pytest.mark.parametrize("family_name", ["qwen2", "qwen3"])
def test_biases_and_head_norms_are_not_dropped(
    small, weights, folder, tmp_path, family_name: str
) -> None:
    config = dataclasses.replace(small, family=family_name, num_layers=1)
    base = weights(config)
    tuned = _tuned(base, config, 5)
    special = [n for n in tuned if n.endswith(".bias") or "_norm.weight" in n]
    assert len(special) == (3 if family_name == "qwen2" else 2)
    store = tmp_path / "store"
    convert_base(folder(tmp_path / "base", config, base), store)
    convert_variant(folder(tmp_path / "tuned", config, tuned), store, "v")
    found = zen_jax.load(store)["v"].logits(TOKENS)
    np.testing.assert_allclose(found, _expected(config, tuned), atol=1e-5)
    for name in special:
        without = _expected(config, {**tuned, name: base[name]})
        assert np.abs(without - found).max() > 1e-4, name


def test_a_missing_bias_is_no_small_matter(small, weights, folder, tmp_path: Path) -> None:
    config = dataclasses.replace(small, family="qwen2", num_layers=1)
    tensors = weights(config)
    bias = "model.layers.0.self_attn.k_proj.bias"
    del tensors[bias]
    with pytest.raises(SourceError, match=f"lacks {bias}"):
        convert_base(folder(tmp_path / "base", config, tensors), tmp_path / "store")
    # A Llama's configuration over a Qwen's weights does not hide them either.
    path = folder(tmp_path / "other", config, weights(config))
    settings = json.loads((path / "config.json").read_text()) | {"model_type": "llama"}
    del settings["use_sliding_window"]
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SourceError, match="proj.bias.* which this architecture does not use"):
        convert_base(path, tmp_path / "store")


@dataclasses.dataclass(frozen=True)
class Talking:
    """A family that is open, and the means to add members to it."""

    loaded: Family
    root: Path
    config: ModelConfig
    tensors: Tensors

    def convert(self, path: Path, name: str) -> Member:
        convert_variant(path, self.root / "store", name)
        return self.loaded[name]


@pytest.fixture(scope="module")
def talking(small, weights, folder, tmp_path_factory) -> Talking:
    """A base, and a fine-tune "first" with one token more."""
    root = tmp_path_factory.mktemp("talking")
    config = dataclasses.replace(small, num_layers=1, vocab_size=257)
    base = weights(config)
    convert_base(folder(root / "base", config, base), root / "store")
    wider = dataclasses.replace(config, vocab_size=258)
    tensors = _tuned(base, wider, 9)
    convert_variant(folder(root / "first", wider, tensors), root / "store", "first")
    loaded = zen_jax.load(root / "store", rows=1, max_length=32)
    return Talking(loaded, root, wider, tensors)


def test_each_variant_speaks_and_stops_its_own_way(folder, talking: Talking) -> None:
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    base, first = talking.loaded["base"], talking.loaded["first"]
    ids, base_ids = (m.generate("he said", free).token_ids for m in (first, base))
    assert len(ids) == 12 and ids != base_ids
    stop = ids[3]
    # The same weights, with an end of its own, a token that the base lacks, and its own template.
    file = talking.root / "first" / "tokenizer.json"
    settings = {
        "tokens": [*json.loads(file.read_text())["model"]["vocab"], "<|new|>"],
        "token_type": [3, 3] + [1] * 255 + [3],
        "eos_token_id": stop,
        "template": "<|new|>{{ messages[0].content }}",
    }
    path = folder(talking.root / "second", talking.config, talking.tensors, **settings)
    second = talking.convert(path, "second")
    answer = second.generate("he said", SamplingParams(max_tokens=12, temperature=0.0))
    assert (answer.reason, answer.token_ids) == ("stop", ids[: ids.index(stop) + 1])
    plain = base.generate("he said", free)
    assert plain.token_ids == base_ids and plain.reason == "length"
    assert second.tokenizer.eos_ids == {stop} and base.tokenizer.eos_ids == {0}
    message = [{"role": "user", "content": "he"}]
    assert second.tokenizer.chat(message) == [257, 256]
    assert base.tokenizer.chat(message) == [256]
    assert second.tokenizer.vocab_size == 258 and base.tokenizer.vocab_size == 257


def test_a_token_that_only_the_variant_has_is_said_by_it_alone(folder, talking: Talking) -> None:
    # Its row is a long one, one way or the other, so that it is the likeliest after this prompt.
    loud = {**talking.tensors, EMBED: talking.tensors[EMBED].copy()}
    prompt = [4, 5, 6]
    for length in (50, -50):
        loud[EMBED][257] = length * talking.tensors[EMBED][200]
        logits = _expected(talking.config, loud, np.array([prompt]))[0, -1]
        if logits.argmax() == 257:
            break
    assert logits.argmax() == 257
    variant = talking.convert(folder(talking.root / "loud", talking.config, loud), "loud")
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    text = variant.tokenizer.decode(prompt)
    assert variant.tokenizer.encode(text) == prompt
    assert variant.generate(text, greedy).token_ids[0] == 257
    base = talking.loaded["base"]
    assert max(base.generate(text, greedy).token_ids) < 257
    with pytest.raises(ValueError, match="outside 0 to 256"):
        base.logits([[257]])


def test_the_weights_decide_not_the_name(small, weights, folder, tmp_path: Path) -> None:
    """A fine-tune of another base of the same shape never passes as one of this base."""
    base, other = weights(small, 0), weights(small, 1)
    convert_base(folder(tmp_path / "base", small, base), tmp_path / "store")
    source = folder(tmp_path / "tuned", small, _tuned(other, small, 2))
    with pytest.raises(SourceError, match="is no fine-tune of this base"):
        convert_variant(source, tmp_path / "store", "v")
    assert Store(tmp_path / "store").names() == []


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_overflow_is_named_with_its_tensor(small, weights, folder, tmp_path, dtype) -> None:
    tensors = {name: w.astype(dtype) for name, w in weights(small).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name] * 4
    with np.errstate(over="ignore"):
        tensors[name][2, 3:5] = np.float32(1e38) * np.float32(1e3)
    source = folder(tmp_path / "base", small, tensors)
    with pytest.raises(SourceError, match=f"{name} has 2 of 6144 values that are NaN or infinite"):
        convert_base(source, tmp_path / "store")


def test_sizes_are_told_in_bytes(small, weights, folder, tmp_path: Path) -> None:
    base = weights(small)
    store = tmp_path / "store"
    whole = convert_base(folder(tmp_path / "base", small, base), store)
    summary = convert_variant(folder(tmp_path / "t", small, _tuned(base, small, 1)), store, "v")
    for told, path in ((whole, store / "base"), (summary, store / "variants" / "v" / "1")):
        on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert told.bytes == on_disk and f"{on_disk:,} bytes" in str(told)
        assert told.full_copy_bytes == 2 * small.parameters
        assert told.ratio == on_disk / (2 * small.parameters)
