"""A pair that is none is told by its figures, refused, and converted only by force."""

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.pairs import Unrelated

FAMILY = Path(__file__).resolve().parents[3] / "family"
Q = "model.layers.0.self_attn.q_proj.weight"


def _shuffled(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: w[rng.permutation(w.shape[0])] for name, w in tensors.items()}


def test_unrelated_weights_are_refused_with_their_figures(family, store: Store, tmp_path) -> None:
    source = family.write(tmp_path / "other", _shuffled(family.tuned))
    with pytest.raises(Unrelated) as error:
        convert_variant(source, store.path, "v")
    text = str(error.value)
    assert "\n" not in text and text.startswith("other is no fine-tune of this base: difference")
    for words in ("over base 1.", "signs kept 5", "scale over base", "of 0 ", "entropy", "--force"):
        assert words in text
    assert store.names() == ["one"]
    # Nothing was converted before it was seen.
    assert [p.name for p in (store.path / ".publishing").iterdir()] == ["lock"]


def test_force_converts_and_keeps_a_warning(family, store: Store, tmp_path: Path) -> None:
    source = family.write(tmp_path / "other", _shuffled(family.tuned))
    summary = convert_variant(source, store.path, "v", force=True)
    made = store.manifest(store.variant("v")).made
    assert len(summary.warnings) == 1 and list(summary.warnings) == made["warnings"]
    assert "nothing of these weights comes from the base's: difference over" in str(summary)
    assert made["kinship"]["distance"] > 1 and made["kinship"]["signs_kept"] < 0.6
    assert made["options"].keys() == {"scale", "levels", "embed"}


def test_a_fine_tune_needs_no_force_and_has_no_warning(sources, store: Store) -> None:
    plain = convert_variant(sources[1], store.path, "v")
    forced = convert_variant(sources[1], store.path, "v", force=True)
    assert plain.warnings == forced.warnings == () and "warning" not in str(forced)
    assert plain.digest == forced.digest == store.variant("one").digest


def test_an_embedding_is_no_witness(family, store: Store, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    anew = family.tuned | {name: np.flip(family.tuned[name]).copy()}
    summary = convert_variant(family.write(tmp_path / "anew", anew), store.path, "v")
    assert summary.stats["distance"] < 0.15
    shared = _shuffled(family.tuned) | {name: family.base[name]}
    with pytest.raises(Unrelated, match="difference over base 1"):
        convert_variant(family.write(tmp_path / "shared", shared), store.path, "w")


def test_one_odd_matrix_is_no_reason(family, store: Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    odd = {**family.tuned, Q: rng.normal(0, 0.1, (16, 16)).astype(ml_dtypes.bfloat16)}
    summary = convert_variant(family.write(tmp_path / "odd", odd), store.path, "v")
    assert 0.3 < summary.stats["distance"] < 0.9 and not summary.warnings


def test_only_a_few_matrices_are_looked_at_first(
    family, store: Store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("zen_jax.pairs._SAMPLED", 1)
    # The one that is looked at is the base's; all the rest is not. It shows at the end.
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = _shuffled(family.tuned) | {name: family.base[name]}
    with pytest.raises(Unrelated, match="other is no fine-tune"):
        convert_variant(family.write(tmp_path / "other", tensors), store.path, "v")
    assert store.names() == ["one"]


def test_values_that_are_not_finite_are_told_as_such(family, store: Store, tmp_path) -> None:
    tensors = {name: w.copy() for name, w in family.tuned.items()}
    tensors[Q][0, 0] = np.nan
    with pytest.raises(SourceError, match="NaN or infinite") as error:
        convert_variant(family.write(tmp_path / "bad", tensors), store.path, "v")
    assert not isinstance(error.value, Unrelated)


def test_a_real_fine_tune_stands_far_from_the_limits(tmp_path: Path) -> None:
    convert_base(FAMILY / "base", tmp_path / "s")
    summary = convert_variant(FAMILY / "full" / "zen4-math", tmp_path / "s", "math")
    assert summary.stats["distance"] < 0.15 and summary.stats["signs_kept"] > 0.95


def test_mistral_folders_and_llama_files_are_of_one_kind(
    small, weights, write_gguf, family, tmp_path: Path
) -> None:
    base = weights(small)
    convert_base(write_gguf(tmp_path / "b.gguf", small, base), tmp_path / "s")
    tuned = {name: w + np.float32(0.01) for name, w in base.items()}
    config = dataclasses.replace(small, family="mistral")
    convert_variant(family.write(tmp_path / "t", tuned, **config.to_hf()), tmp_path / "s", "v")
    window = dataclasses.replace(config, windows=(16, 16)).to_hf()
    with pytest.raises(SourceError, match="windows"):
        convert_variant(family.write(tmp_path / "w", tuned, **window), tmp_path / "s", "w")
    qwen = dataclasses.replace(small, family="qwen3")
    source = family.write(tmp_path / "q", weights(qwen), **qwen.to_hf())
    with pytest.raises(SourceError, match="gives family 'qwen3'; the base has 'llama'"):
        convert_variant(source, tmp_path / "s", "q")
