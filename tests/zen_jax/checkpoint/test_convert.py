"""Conversion, from folders to what the store gives back."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from zen_jax.checkpoint.manifest import (
    BaseExists,
    NameRefused,
    NotAStore,
    WrongBase,
)
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.delta.compress import compress_tensor
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import EMBED, HEAD, fuse_delta, tensor_shapes

DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
FINAL = "model.norm.weight"


def _same(left: dict[str, WeightDelta], right: dict[str, WeightDelta]) -> None:
    assert set(left) == set(right)
    for name in left:
        for kind in ("bits", "scale", "dense"):
            a, b = getattr(left[name], kind), getattr(right[name], kind)
            assert (a is None) == (b is None), (name, kind)
            if a is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


def test_the_base_comes_back_bit_for_bit(family, ready: Path) -> None:
    found = dict(Store(ready).base_tensors())
    assert set(found) == set(family.base)
    for name, expected in family.base.items():
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)


def test_a_variant_comes_back_as_it_was_compressed(family, ready: Path) -> None:
    store = Store(ready)
    found = store.read_variant(store.variant("one"))
    assert set(found) == set(family.base)
    for name, w in family.base.items():
        if w.ndim == 2:
            expected, _ = compress_tensor(w, family.tuned[name])
            np.testing.assert_array_equal(found[name].bits, expected.bits)
            np.testing.assert_array_equal(found[name].scale, expected.scale)
    np.testing.assert_array_equal(
        found[NORM].dense, family.tuned[NORM].astype(np.float32) - family.base[NORM]
    )
    assert found[FINAL] == WeightDelta()
    fuse_delta(family.config, found)


def test_known_bits_and_scale_through_the_store(family, tmp_path: Path) -> None:
    base = {name: np.zeros(w.shape, np.float32) for name, w in family.base.items()}
    tuned = {name: w.copy() for name, w in base.items()}
    tuned[Q][0, :9] = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9]
    tuned[Q][0, 9:] = -0.5
    convert_base(family.write(tmp_path / "b", base), tmp_path / "s")
    convert_variant(family.write(tmp_path / "t", tuned), tmp_path / "s", "v")
    store = Store(tmp_path / "s")
    found = store.read_variant(store.variant("v"))
    bits, scale = found[Q].bits, found[Q].scale
    assert bits.shape == (1, 16, 2) and bits.dtype == np.uint8
    assert bits[0, 0].tolist() == [85, 1]
    assert scale[0, 0] == pytest.approx(0.5)
    assert scale[0, 1:].tolist() == [0] * 15
    # Nothing else was changed, so nothing else is kept.
    assert all(found[name] == WeightDelta() for name in found if name != Q)


@pytest.mark.parametrize(("scale", "levels"), [("row", 3), ("matrix", 1), ("matrix", 2)])
def test_scales_and_levels(family, sources, ready: Path, store: Store, scale, levels) -> None:
    summary = convert_variant(sources[1], store.path, "v", scale=scale, levels=levels)
    variant = store.variant("v")
    found = store.read_variant(variant)[DOWN]
    assert found.bits.shape == (levels, 16, 3)
    assert found.scale.shape == (levels, 16 if scale == "row" else 1)
    entry = store.manifest(variant).tensors[DOWN]
    assert (entry.policy, entry.shape, entry.levels, entry.scale) == (
        "bit",
        (16, 24),
        levels,
        scale,
    )
    assert entry.stats["relative_error"] < 0.7 and entry.stats["base_rms"] > 0
    assert summary.stats["bit"] == 8 and summary.stats["shared"] == 1


def test_embedding_whole_or_shared(family, sources, store: Store) -> None:
    convert_variant(sources[1], store.path, "whole", embed="whole")
    convert_variant(sources[1], store.path, "shared", embed="shared")
    whole = store.read_variant(store.variant("whole"))[EMBED]
    assert whole.bits is None and whole.dense.dtype == np.float32
    rebuilt = family.base[EMBED].astype(np.float32) + whole.dense
    np.testing.assert_array_equal(rebuilt.astype(ml_dtypes.bfloat16), family.tuned[EMBED])
    entry = store.manifest(store.variant("whole")).tensors[EMBED]
    assert entry.policy == "dense" and entry.parts["whole"].dtype == "bfloat16"
    assert store.read_variant(store.variant("shared"))[EMBED] == WeightDelta()
    assert store.manifest(store.variant("shared")).tensors[EMBED].policy == "shared"


def test_sharded_sources_convert_like_single_ones(family, sources, ready: Path, tmp_path) -> None:
    base = convert_base(family.write(tmp_path / "b", family.base, shards=3), tmp_path / "s")
    # The folder's name is in its tokenizer, which is part of a variant's identity.
    tuned = family.write(tmp_path / "x" / "tuned", family.tuned, shards=4)
    variant = convert_variant(tuned, tmp_path / "s", "one")
    one = Store(ready)
    assert base.digest == one.base().digest
    assert variant.digest == one.variant("one").digest
    many = Store(tmp_path / "s")
    _same(many.read_variant(many.variant("one")), one.read_variant(one.variant("one")))


def test_a_store_of_several_shards_reads_the_same(family, sources, ready: Path, tmp_path) -> None:
    base = convert_base(sources[0], tmp_path / "s", shards=2)
    variant = convert_variant(sources[1], tmp_path / "s", "one")
    one, two = Store(ready), Store(tmp_path / "s")
    assert (base.digest, variant.digest) == (one.base().digest, one.variant("one").digest)
    for name, values in two.base_tensors():
        np.testing.assert_array_equal(values, family.base[name])
    _same(two.read_variant(two.variant("one")), one.read_variant(one.variant("one")))
    tensors = two.manifest(two.variant("one")).tensors
    # Rows where outputs are sharded; inputs where those are, if a shard is whole bytes.
    assert (tensors[Q].parts["bits"].shards, tensors[Q].parts["bits"].axis) == (2, 1)
    assert (tensors[Q].parts["scale"].shards, tensors[Q].parts["scale"].axis) == (2, 1)
    assert tensors[DOWN].parts["bits"].shards == 1
    assert two.base().tensors[DOWN].parts["weight"].axis == 1
    assert two.base().tensors[DOWN].parts["weight"].shards == 2
    assert not two.verify()


@pytest.mark.parametrize("base_tied", [True, False])
@pytest.mark.parametrize("tuned_tied", [True, False])
def test_tied_and_untied_heads(family, tmp_path: Path, base_tied: bool, tuned_tied: bool) -> None:
    # Heads that were the embedding once, as those of fine-tunes are.
    rng = np.random.default_rng(3)
    head = family.base[EMBED].astype(np.float32) + rng.normal(0, 0.02, family.base[EMBED].shape)
    head = head.astype(ml_dtypes.bfloat16)
    tuned_head = (head.astype(np.float32) + 0.01).astype(ml_dtypes.bfloat16)
    base = family.base if base_tied else {**family.base, HEAD: head}
    tuned = family.tuned if tuned_tied else {**family.tuned, HEAD: tuned_head}
    convert_base(family.write(tmp_path / "b", base, tie_word_embeddings=base_tied), tmp_path / "s")
    convert_variant(
        family.write(tmp_path / "t", tuned, tie_word_embeddings=tuned_tied), tmp_path / "s", "v"
    )
    store = Store(tmp_path / "s")
    variant = store.variant("v")
    manifest, found = store.manifest(variant), store.read_variant(variant)
    assert store.base().config.tie_word_embeddings == base_tied
    assert manifest.config.tie_word_embeddings == tuned_tied
    if base_tied and tuned_tied:
        assert HEAD not in found
        return
    expected, _ = compress_tensor(
        family.base[EMBED] if base_tied else head, family.tuned[EMBED] if tuned_tied else tuned_head
    )
    np.testing.assert_array_equal(found[HEAD].bits, expected.bits)
    np.testing.assert_array_equal(found[HEAD].scale, expected.scale)
    assert manifest.tensors[HEAD].against == (EMBED if base_tied else None)
    fuse_delta(dataclasses.replace(family.config, tie_word_embeddings=False), found)


def test_a_head_unlike_the_embedding_is_kept_whole(family, store: Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    head = rng.normal(0, 0.1, family.base[EMBED].shape).astype(ml_dtypes.bfloat16)
    source = family.write(tmp_path / "t", {**family.tuned, HEAD: head}, tie_word_embeddings=False)
    summary = convert_variant(source, store.path, "v")
    variant = store.variant("v")
    assert store.manifest(variant).tensors[HEAD].policy == "dense"
    found = store.read_variant(variant)[HEAD]
    rebuilt = family.base[EMBED].astype(np.float32) + found.dense
    np.testing.assert_allclose(rebuilt, head.astype(np.float32), atol=1e-6)
    # It tells nothing of whether the two models belong together.
    assert summary.stats["distance"] < 0.2


def test_more_vocabulary_rows_are_kept_whole(family, store: Store, tmp_path: Path) -> None:
    extra = np.full((1, 16), 0.5, ml_dtypes.bfloat16)
    tuned = {**family.tuned, EMBED: np.concatenate([family.tuned[EMBED], extra])}
    source = family.write(tmp_path / "t", tuned, vocab_size=41)
    expected, _ = compress_tensor(family.base[EMBED], family.tuned[EMBED])
    for embed in ("bit", "whole", "shared"):
        convert_variant(source, store.path, embed, embed=embed)
        variant = store.variant(embed)
        manifest, found = store.manifest(variant), store.read_variant(variant)[EMBED]
        assert manifest.config.vocab_size == 41
        assert manifest.tensors[EMBED].shape == (41, 16)
        assert found.tail.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found.tail, extra)
        if embed == "bit":
            np.testing.assert_array_equal(found.bits, expected.bits)
            np.testing.assert_array_equal(found.scale, expected.scale)
        elif embed == "whole":
            rebuilt = family.base[EMBED].astype(np.float32) + found.dense
            np.testing.assert_array_equal(rebuilt, family.tuned[EMBED].astype(np.float32))
        else:
            assert found.bits is None and found.dense is None
            assert manifest.tensors[EMBED].policy == "shared"
    assert not store.verify()


def test_a_smaller_vocabulary_is_refused(family, store: Store, tmp_path: Path) -> None:
    tuned = {**family.tuned, EMBED: family.tuned[EMBED][:-1]}
    source = family.write(tmp_path / "t", tuned, vocab_size=39)
    with pytest.raises(SourceError) as error:
        convert_variant(source, store.path, "narrow")
    assert f"{EMBED} has shape (39, 16); the base's is (40, 16)" in str(error.value)
    assert store.names() == ["one"]


def test_another_architecture_is_refused_with_every_difference(family, store, tmp_path) -> None:
    config = dataclasses.replace(family.config, intermediate_size=32, num_layers=2)
    tuned = {n: np.zeros(s, np.float32) for n, s in tensor_shapes(config).items()}
    settings = {"intermediate_size": 32, "num_hidden_layers": 2, "rope_theta": 5e5}
    with pytest.raises(SourceError) as error:
        convert_variant(family.write(tmp_path / "t", tuned, **settings), store.path, "v")
    text = "; ".join(error.value.problems)
    assert "t is no fine-tune of this base" in str(error.value)
    assert f"{DOWN} has shape (16, 32); the base's is (16, 24)" in text
    assert "model.layers.1.mlp.up_proj.weight has no counterpart in the base" in text
    assert "rope_theta 500000.0; the base has 10000.0" in text


def test_a_head_that_tying_would_lose_is_refused(family, store: Store, tmp_path: Path) -> None:
    source = family.write(tmp_path / "t", {**family.tuned, HEAD: family.base[EMBED]})
    for convert in (
        lambda: convert_base(source, tmp_path / "s"),
        lambda: convert_variant(source, store.path, "v"),
    ):
        with pytest.raises(SourceError, match=f"{HEAD} differs from {EMBED}"):
            convert()
    assert store.names() == ["one"] and not (tmp_path / "s").exists()


def test_the_base_itself_is_no_variant(sources, store: Store) -> None:
    with pytest.raises(SourceError, match="base: no tensor differs from the base's"):
        convert_variant(sources[0], store.path, "v")
    assert store.names() == ["one"]


@pytest.mark.parametrize("kind", ["base", "variant"])
def test_values_that_are_not_finite_are_all_named(family, store, tmp_path, kind: str) -> None:
    tensors = {name: w.copy() for name, w in family.tuned.items()}
    tensors[Q][1, 2] = np.nan
    tensors[NORM][:2] = np.inf
    source = family.write(tmp_path / "t", tensors)
    with pytest.raises(SourceError) as error:
        if kind == "base":
            convert_base(source, tmp_path / "new")
        else:
            convert_variant(source, store.path, "v")
    assert set(error.value.problems) == {
        f"{Q} has 1 of 256 values that are NaN or infinite",
        f"{NORM} has 2 of 16 values that are NaN or infinite",
    }
    if kind == "base":
        with pytest.raises(NotAStore):
            Store(tmp_path / "new")
        assert [p.name for p in (tmp_path / "new" / ".publishing").iterdir()] == ["lock"]
    else:
        assert store.names() == ["one"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_dtypes(family, tmp_path: Path, dtype) -> None:
    base = {name: w.astype(dtype) for name, w in family.base.items()}
    convert_base(family.write(tmp_path / "b", base), tmp_path / "s")
    convert_variant(family.write(tmp_path / "t", family.tuned), tmp_path / "s", "v", embed="whole")
    store = Store(tmp_path / "s")
    assert {values.dtype for _, values in store.base_tensors()} == {np.dtype(dtype)}
    found = store.read_variant(store.variant("v"))
    expected, _ = compress_tensor(base[Q], family.tuned[Q])
    np.testing.assert_array_equal(found[Q].scale, expected.scale)


def test_each_variant_has_its_own_tokenizer(family, sources, store: Store, tmp_path) -> None:
    base, tuned = [(source / "tokenizer.json").read_bytes() for source in sources]
    assert b"<|tuned|>" in tuned and b"<|base|>" in base
    one = store.tokenizer_folder(store.variant("one"))
    assert (one / "tokenizer.json").read_bytes() == tuned
    assert (store.tokenizer_folder(None) / "tokenizer.json").read_bytes() == base
    source = family.write(tmp_path / "bare", family.tuned, eos_token_id=9)
    (source / "tokenizer.json").unlink()
    convert_variant(source, store.path, "bare")
    bare = store.variant("bare")
    folder = store.tokenizer_folder(bare)
    assert (folder / "tokenizer.json").read_bytes() == base
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 9
    assert store.manifest(bare).made["tokenizer_from_base"] == ["tokenizer.json"]
    # The same weights under another tokenizer answer otherwise, so they are another variant.
    assert bare.digest != store.variant("one").digest
    assert store.tokenizer_files(bare)["tokenizer.json"] == base


def test_no_private_path_gets_into_the_store(sources, ready: Path) -> None:
    private = [b"/home/somebody", str(sources[0].parent).encode(), str(ready.parent).encode()]
    for file in ready.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert not [text for text in private if text in data], file
    made = Store(ready).base().made
    assert made["source"] == "base" and made["options"] == {"shards": 1}
    assert made["packages"]["orbax-checkpoint"]


def test_summary_and_progress(family, sources, store: Store) -> None:
    seen: list[tuple[str, int, int]] = []
    summary = convert_variant(sources[1], store.path, "v", progress=lambda *step: seen.append(step))
    total = sum(w.nbytes for w in family.tuned.values())
    assert [name for name, _, _ in seen] == sorted(family.tuned)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1:] == (total, total)
    files = [p for p in store.variant("v").path.rglob("*") if p.is_file()]
    assert summary.bytes == sum(p.stat().st_size for p in files)
    assert summary.full_copy_bytes == total
    assert summary.ratio == summary.bytes / total
    text = str(summary)
    assert f"v version 1, {summary.digest[:12]}" in text
    assert f"{summary.bytes:,} bytes" in text and "8 bit, 1 dense" not in text
    assert "8 bit, 2 dense, 1 shared" in text
    assert "GB" not in text and "GiB" not in text and len(text.splitlines()) == 5
    assert f"v version 1, {summary.digest[:12]}, from BF16, in" in text
    assert "signs kept: 9" in text and "entropy of signs: " in text and "energy left: 0." in text


def test_the_same_content_has_the_same_digest(sources, store: Store) -> None:
    first = store.variant("one")
    again = convert_variant(sources[1], store.path, "one")
    other = convert_variant(sources[1], store.path, "one", levels=2)
    assert (again.version, other.version) == (2, 3)
    assert again.digest == first.digest != other.digest
    assert store.variant("one").version == 3
    assert store.versions("one") == [1, 2, 3]


def test_a_variant_of_another_base_is_refused(family, sources, ready, tmp_path) -> None:
    convert_base(sources[1], tmp_path / "s")
    other = Store(tmp_path / "s")
    (other.path / "variants").mkdir()
    shutil.copytree(ready / "variants" / "one", other.path / "variants" / "one")
    with pytest.raises(WrongBase, match="one/1 was made against another base"):
        other.read_variant(other.variant("one"))
    assert [str(f) for f in other.verify()] == ["one/1: manifest.json belongs to another base"]


def test_options_that_cannot_be(sources, ready: Path, tmp_path: Path) -> None:
    levels = [{"levels": wrong} for wrong in (0, 5, True)]
    for options in ({"scale": "column"}, {"embed": "none"}, *levels):
        with pytest.raises(ValueError, match="expected"):
            convert_variant(sources[1], ready, "v", **options)
    for shards in (0, 1.5, True):
        with pytest.raises(ValueError, match="shards is"):
            convert_base(sources[0], tmp_path / "s", shards=shards)
    for name in ("base", "", ".x", "a/b", "../a", "a" * 129, "a\n", "ä"):
        with pytest.raises(NameRefused):
            convert_variant(sources[1], ready, name)
    assert not (tmp_path / "s").exists()


def test_where_a_store_can_be(sources, ready: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseExists, match="has a base already"):
        convert_base(sources[0], ready)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(NotAStore, match="holds 'thesis.txt'"):
        convert_base(sources[0], tmp_path / "full")
    with pytest.raises(NotAStore, match="is a file"):
        convert_base(sources[0], tmp_path / "full" / "thesis.txt")
    with pytest.raises(NotAStore, match="is not a store; make one with `zen convert base"):
        convert_variant(sources[1], tmp_path / "full", "v")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]


MEASURE = """
import json, sys
from pathlib import Path
from zen_jax.convert import convert_base, convert_variant

def peak():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

root = Path(sys.argv[1])
for layers in (2, 8):
    folder = root / str(layers)
    store = root / f"store-{layers}"
    convert_base(folder / "base", store)
    convert_variant(folder / "tuned", store, "v")
    print(peak())
"""


def test_peak_memory_does_not_grow_with_layers(family, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    for layers in (2, 8):
        config = dataclasses.replace(family.config, num_layers=layers, head_dim=128, **sizes)
        base = {n: rng.random(s, np.float32) for n, s in tensor_shapes(config).items()}
        settings = {**config.to_hf()}
        family.write(tmp_path / str(layers) / "base", base, shards=8, **settings)
        tuned = {n: w + np.float32(0.01) for n, w in base.items()}
        family.write(tmp_path / str(layers) / "tuned", tuned, shards=8, **settings)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    few, many = map(int, ran.stdout.split())
    # Six layers more are 57 MB of weights in each source; the largest tensor has 2 MB.
    assert many - few < 20 * 2**20, (few, many)
