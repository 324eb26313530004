"""Whole checkpoints on disk: what comes out, what is refused, what is left as it was."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from zen_jax.checkpoint.hf import open_folder
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.layout import EMBED, HEAD
from zen_jax.merge.checkpoints import Outcome, Target, merge_checkpoints
from zen_jax.merge.folding import Mean, Method
from zen_jax.merge.monosoup import MonoSoup, TruncatedSoup, monosoup, truncated_soup
from zen_jax.merge.opcm import Opcm, opcm
from zen_jax.merge.pairing import Policies
from zen_jax.merge.plot import draw
from zen_jax.merge.sources import open_member
from zen_jax.merge.tensors import Job

Tensors = dict[str, np.ndarray]
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def merge(
    root: Path,
    out: Path,
    method: Method,
    names: str = "abc",
    policies: Policies | None = None,
    target: dict[str, Any] | None = None,
    **job: Any,
) -> Outcome:
    """Merges folders of a family."""
    models = tuple(open_member(str(root / name)) for name in names)
    made = Job(open_member(str(root / "base")), models, method, **job)
    return merge_checkpoints(made, policies or Policies(), Target(out, **target or {}))


def read(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return {name: value.astype(np.float32) for name, value in found.items()}


def bf16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# ---- what comes out


@pytest.mark.parametrize(
    ("method", "names", "alone"),
    [
        (Mean(), "abc", lambda base, tuned, name: np.mean(tuned, axis=0)),
        (MonoSoup(), "a", lambda base, tuned, name: monosoup(base, tuned[0])),
        (
            MonoSoup("energy", 0.6),
            "b",
            lambda base, tuned, name: monosoup(base, tuned[0], "energy", 0.6),
        ),
        (TruncatedSoup(3), "abc", lambda base, tuned, name: truncated_soup(base, tuned, 3, name)),
        (Opcm(), "abc", lambda base, tuned, name: opcm(base, tuned)),
        (Opcm(0.3, "doc"), "cb", lambda base, tuned, name: opcm(base, tuned, 0.3, "doc")),
    ],
    ids=lambda value: getattr(value, "name", value) if not callable(value) else "",
)
def test_every_tensor_is_what_one_matrix_gives(family, tmp_path, method, names, alone) -> None:
    out = merge(family, tmp_path / "out", method, names)
    found, base = read(tmp_path / "out"), read(family / "base")
    tuned = [read(family / name) for name in names]
    assert set(found) == set(base)
    for name, start in base.items():
        expected = bf16(alone(start, [t[name] for t in tuned], name))
        np.testing.assert_allclose(found[name], expected, atol=2e-3, rtol=8e-3, err_msg=name)
        assert np.mean(found[name] == expected) > 0.98, name
    assert set(out.report["tensors"]) == set(base)


def test_what_is_written_is_a_checkpoint_like_any_other(family, tmp_path) -> None:
    merge(family, tmp_path / "out", Mean(), "ab")
    source = open_folder(tmp_path / "out")
    assert source.config == open_folder(family / "base").config
    assert source.coding == "BF16"
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        family / "base/tokenizer.json"
    ).read_bytes()
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["torch_dtype"] == "bfloat16"
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


def test_large_results_are_cut_and_indexed(family, tmp_path) -> None:
    whole = merge(family, tmp_path / "whole", Mean(), "ab")
    merge(family, tmp_path / "cut", Mean(), "ab", target={"shard_bytes": 8000})
    assert len(list((tmp_path / "cut").glob("model-0*-of-0*.safetensors"))) > 3
    assert open_folder(tmp_path / "cut").tensors.keys() == whole.report["tensors"].keys()
    one, other = read(tmp_path / "whole"), read(tmp_path / "cut")
    assert all((one[name] == other[name]).all() for name in one)


def test_several_devices_give_the_same(family, tmp_path, devices) -> None:
    merge(family, tmp_path / "1", Opcm(), "ab", dtype="F32")
    merge(family, tmp_path / "3", Opcm(), "ab", dtype="F32", devices=tuple(devices[:3]))
    one, many = (read(tmp_path / n) for n in "13")
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, atol=2e-6, err_msg=name)


def test_the_report_says_what_was_kept(family, tmp_path) -> None:
    out = merge(family, tmp_path / "m", MonoSoup(), "a", time_svd=True)
    report = json.loads((tmp_path / "m/merge.json").read_text())
    assert report == json.loads(json.dumps(out.report))
    assert (report["method"], report["base"], report["models"]) == ("monosoup", "base", ["a"])
    (one,) = report["tensors"][Q]["models"]
    delta = read(family / "a")[Q] - read(family / "base")[Q]
    values = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
    share = np.cumsum(values**2) / (values**2).sum()
    assert one["energy"] == pytest.approx(share[one["rank"] - 1], rel=1e-6)
    assert 1 < one["rank"] < 32 and 0 < one["low"] < 1
    assert report["tensors"][NORM]["models"] == [
        {"delta_over_base": pytest.approx(0.1, abs=0.1), "kept": "vector"}
    ]
    assert sum("svd_seconds" in t for t in report["tensors"].values()) == len(
        {tuple(t["shape"]) for t in report["tensors"].values() if len(t["shape"]) == 2}
    )
    opcm_report = merge(family, tmp_path / "o", Opcm(), "abc").report["tensors"][Q]["models"]
    assert [m["lambda"] for m in opcm_report][0] == 1.0 and opcm_report[2]["lambda"] > 0
    soup = merge(family, tmp_path / "t", TruncatedSoup(3), "ab").report["tensors"][Q]["models"]
    assert [m["rank"] for m in soup] == [3, 3] and all(0 < m["energy"] < 1 for m in soup)
    draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


# ---- reports of systems like this one


def test_inputs_are_never_changed(family, tmp_path) -> None:
    before = digests(family)
    for method, names in ((Mean(), "abc"), (MonoSoup(), "a"), (TruncatedSoup(2), "ab")):
        merge(family, tmp_path / method.name, method, names)
    assert digests(family) == before


def test_sums_are_float32_and_cast_once(write, make_base, config, tmp_path) -> None:
    """In bfloat16 1 + 2^-9 is 1: a sum that is rounded on the way loses what a mean has to keep."""
    base = {name: np.ones_like(value) for name, value in make_base().items()}
    write(tmp_path / "base", base, dtype=np.float32)
    steps = np.float32(2.0**-9)
    for i, name in enumerate("abcd"):
        moved = {n: w + steps * (i + 1) for n, w in base.items()}
        write(tmp_path / name, moved, dtype=np.float32)
    merge(tmp_path, tmp_path / "f32", Mean(), "abcd")
    assert (read(tmp_path / "f32")[Q] == 1 + steps * 2.5).all()
    merge(tmp_path, tmp_path / "bf16", Mean(), "abcd", dtype="BF16")
    assert (read(tmp_path / "bf16")[Q] == bf16(1 + steps * 2.5)).all()
    assert bf16(1 + steps * 2.5)[()] == 1 + 2.0**-7  # 1.0049 is nearer to it than to 1
    naive = np.float32(0)
    for i in range(4):
        naive = bf16(naive + bf16(bf16(1 + steps * (i + 1)) - 1))
    assert bf16(1 + naive / 4) != bf16(1 + steps * 2.5)


# ---- vocabulary, heads and shapes


@pytest.fixture
def larger(family, write, make_tuned, config, tmp_path) -> Path:
    """The family with "w", which has three tokens more, and "h", which has a head of its own."""
    root = Path(shutil.copytree(family, tmp_path / "larger"))
    wide = dataclasses.replace(config, vocab_size=config.vocab_size + 3)
    tensors = make_tuned(read(family / "base"), 9)
    extra = np.full((3, 32), 0.5, np.float32)
    write(root / "w", tensors | {EMBED: np.concatenate([tensors[EMBED], extra])}, wide)
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    write(root / "h", tensors | {HEAD: bf16(np.float32(0.25) + tensors[EMBED])}, untied)
    return root


def test_a_larger_vocabulary_needs_a_policy(larger, tmp_path) -> None:
    with pytest.raises(SourceError, match=r"embed_tokens.*w has shape \(267, 32\).*\(264, 32\)"):
        merge(larger, tmp_path / "out", Mean(), "aw")
    assert not (tmp_path / "out").exists()


def test_policies_of_vocabulary(larger, tmp_path) -> None:
    merge(larger, tmp_path / "base", Mean(), "aw", Policies("base"))
    merge(larger, tmp_path / "extra", Mean(), "aw", Policies("extra"))
    base, extra = read(tmp_path / "base")[EMBED], read(tmp_path / "extra")[EMBED]
    assert base.shape == (264, 32) and extra.shape == (267, 32)
    assert (extra[:264] == base).all() and (extra[264:] == 0.5).all()
    assert open_folder(tmp_path / "extra").config.vocab_size == 267
    assert open_folder(tmp_path / "base").config.vocab_size == 264
    report = merge(larger, tmp_path / "m", MonoSoup(), "w", Policies("extra")).report
    assert report["tensors"][EMBED]["extra_rows"] == 3
    assert (read(tmp_path / "m")[EMBED][264:] == 0.5).all()


def test_a_smaller_vocabulary_is_an_error_under_every_policy(larger, tmp_path) -> None:
    shutil.move(larger / "base", larger / "x")
    shutil.copytree(larger / "w", larger / "base")
    for vocabulary in ("refuse", "base", "extra"):
        with pytest.raises(SourceError, match="smaller vocabulary is not supported"):
            merge(larger, tmp_path / "out", Mean(), "a", Policies(vocabulary))


def test_a_head_that_the_base_lacks_is_kept(larger, tmp_path) -> None:
    out = merge(larger, tmp_path / "m", MonoSoup(), "h")
    assert (read(tmp_path / "m")[HEAD] == read(larger / "h")[HEAD]).all()
    assert out.report["tensors"][HEAD]["models"] == [{"base_lacks_it": True}]
    assert not open_folder(tmp_path / "m").config.tie_word_embeddings
    # Of two, one tied: its head is its embedding.
    merge(larger, tmp_path / "two", Mean(), "ha")
    expected = (read(larger / "h")[HEAD] + read(larger / "a")[EMBED]) / 2
    np.testing.assert_allclose(read(tmp_path / "two")[HEAD], bf16(expected), atol=1e-3)


def test_a_tied_checkpoint_of_an_untied_base(larger, tmp_path) -> None:
    shutil.move(larger / "base", larger / "b")
    shutil.copytree(larger / "h", larger / "base")
    merge(larger, tmp_path / "out", Mean(), "a")
    found = read(tmp_path / "out")
    np.testing.assert_allclose(found[HEAD], read(larger / "a")[EMBED], atol=1e-3)


def test_another_architecture_is_refused_by_name(
    family, write, make_base, config, tmp_path
) -> None:
    root = Path(shutil.copytree(family, tmp_path / "f"))
    deep = dataclasses.replace(config, num_layers=3)
    write(root / "d", make_base(deep), deep)
    flat = dataclasses.replace(config, intermediate_size=40)
    write(root / "e", make_base(flat), flat)
    with pytest.raises(SourceError) as error:
        merge(root, tmp_path / "out", Mean(), "ade")
    told = "; ".join(error.value.problems)
    for part in (
        "d has model.layers.2",
        "num_layers 3",
        "gate_proj.weight of e has shape (40, 32)",
    ):
        assert part in told
    out = merge(root, tmp_path / "out", Mean(), "ade", Policies(shapes="base"))
    found = read(tmp_path / "out")
    gate = "model.layers.0.mlp.gate_proj.weight"
    pair = [read(root / name)[gate] for name in "ad"]
    np.testing.assert_allclose(found[gate], bf16(np.mean(pair, axis=0)), atol=1e-3)
    assert out.report["tensors"][gate]["models"][2] == {"left_out": True}
    assert any("intermediate_size 40" in note for note in out.report["notes"])


# ---- bad input loses nothing


def test_nan_is_named_with_its_tensor_and_checkpoint(family, tmp_path) -> None:
    root = Path(shutil.copytree(family, tmp_path / "f"))
    for name, key in (("b", Q), ("c", NORM)):
        tensors = load_file(root / name / "model.safetensors")
        tensors[key].flat[3] = np.nan
        save_file(tensors, root / name / "model.safetensors")
    with pytest.raises(SourceError) as error:
        merge(root, tmp_path / "out", Mean())
    told = "; ".join(error.value.problems)
    assert f"{Q} of b has 1 of" in told and f"{NORM} of c has 1 of" in told
    assert len(error.value.problems) == 2
    assert not (tmp_path / "out").exists()


def test_what_float16_cannot_hold_is_named(write, make_base, tmp_path) -> None:
    base = make_base()
    write(tmp_path / "base", base, dtype=np.float32)
    write(tmp_path / "a", base | {Q: base[Q] + 70000}, dtype=np.float32)
    with pytest.raises(SourceError, match=f"{Q}.*cast to F16; choose --dtype F32 or BF16"):
        merge(tmp_path, tmp_path / "out", Mean(), "a", dtype="F16")
    merge(tmp_path, tmp_path / "out", Mean(), "a", dtype="BF16")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_every_float_type_comes_out_as_the_base_has_it(
    write, make_base, make_tuned, tmp_path, dtype
) -> None:
    base = make_base()
    write(tmp_path / "base", base, dtype=dtype)
    write(tmp_path / "a", make_tuned(base, 1), dtype=np.float32)
    merge(tmp_path, tmp_path / "out", MonoSoup(), "a")
    assert load_file(tmp_path / "out/model.safetensors")[Q].dtype == dtype


def test_a_place_that_is_taken_is_left_alone(family, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not the result of this merge"):
        merge(family, tmp_path / "out", Mean(), "ab")
    assert (tmp_path / "out/mine").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_same_merge_again_finds_its_result(family, tmp_path) -> None:
    merge(family, tmp_path / "out", Mean(), "ab")
    before = digests(tmp_path)
    again = merge(family, tmp_path / "out", Mean(), "ab")
    assert again.already and digests(tmp_path) == before
    with pytest.raises(ValueError, match="not the result of this merge"):
        merge(family, tmp_path / "out", Mean(), "abc")


def test_a_checkpoint_given_twice_is_refused(family, tmp_path) -> None:
    (tmp_path / "link").symlink_to(family / "a")
    models = tuple(open_member(str(path)) for path in (family / "a", tmp_path / "link"))
    job = Job(open_member(str(family / "base")), models, Mean())
    with pytest.raises(ValueError, match="given twice, and would count twice"):
        merge_checkpoints(job, Policies(), Target(tmp_path / "out"))


def test_a_checkpoint_that_is_the_base_is_told(family, tmp_path) -> None:
    shutil.copytree(family / "base", tmp_path / "copy")
    models = (open_member(str(tmp_path / "copy")), open_member(str(family / "a")))
    job = Job(open_member(str(family / "base")), models, Mean())
    out = merge_checkpoints(job, Policies(), Target(tmp_path / "out"))
    assert out.report["notes"] == ["copy does not differ from the base anywhere"]


def test_methods_say_how_many_they_take(family, tmp_path) -> None:
    with pytest.raises(ValueError, match="cleans one checkpoint; 2 were given"):
        merge(family, tmp_path / "out", MonoSoup(), "ab")
    with pytest.raises(ValueError, match="nothing to merge"):
        merge(family, tmp_path / "out", Mean(), "")


def test_what_is_no_checkpoint_is_refused(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for text, told in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty", "has no config.json"),
        (f"{tmp_path}/empty:x", "not a store"),
    ):
        with pytest.raises(ValueError, match=told):
            open_member(str(text))


# ---- stores


@pytest.fixture(scope="module")
def store(family, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "store"
    convert_base(family / "base", path)
    for name in "ab":
        convert_variant(family / name, path, name)
    return path


def test_members_of_a_store_are_merged_like_folders(family, store, tmp_path) -> None:
    base, one = open_member(str(store)), open_member(f"{store}:a")
    for name, value in read(family / "base").items():
        assert (base.read(name).astype(np.float32) == value).all()
        delta = one.read(name) - value
        # A bit and a scale a row.
        if value.ndim == 2:
            size = np.abs(delta)
            np.testing.assert_allclose(size, np.broadcast_to(size[:, :1], size.shape), atol=1e-6)
    job = Job(base, (one, open_member(f"{store}:b:1")), Mean(), dtype="F32")
    merge_checkpoints(job, Policies(), Target(tmp_path / "out"))
    expected = (one.read(Q) + open_member(f"{store}:b").read(Q)) / 2
    np.testing.assert_allclose(read(tmp_path / "out")[Q], expected, atol=1e-6)
    with pytest.raises(ValueError, match="no version 7"):
        open_member(f"{store}:a:7")


def test_a_variant_with_more_tokens_is_read_with_its_own(larger, store, tmp_path) -> None:
    path = Path(shutil.copytree(store, tmp_path / "s"))
    convert_variant(larger / "w", path, "w")
    convert_variant(larger / "h", path, "h")
    wide = open_member(f"{path}:w").read(EMBED)
    assert wide.shape == (267, 32) and (wide[264:] == 0.5).all()
    head = open_member(f"{path}:h").read(HEAD)
    assert np.abs(head - read(larger / "h")[HEAD]).mean() < 0.05


def test_a_result_can_be_a_store(family, tmp_path) -> None:
    out = merge(family, tmp_path / "out", Mean(), "ab", target={"form": "store"})
    assert Store(tmp_path / "out").verify() == []
    merge(family, tmp_path / "folder", Mean(), "ab")
    base = Store(tmp_path / "out").base_tensor(Q)
    assert (base.astype(np.float32) == read(tmp_path / "folder")[Q]).all()
    assert Store(tmp_path / "out").base().made["source"] == "out"
    assert json.loads((tmp_path / "out.merge.json").read_text())["key"] == out.report["key"]
    assert merge(family, tmp_path / "out", Mean(), "ab", target={"form": "store"}).already


def test_a_result_can_be_published_at_once(family, store, tmp_path) -> None:
    path = Path(shutil.copytree(store, tmp_path / "s"))
    out = merge(family, tmp_path / "out", Mean(), "ab", target={"publish": (path, "both")})
    assert out.report["published"] == {"store": str(path), "name": "both", "version": 1}
    assert Store(path).verify() == []
    assert Store(path).manifest(Store(path).variant("both")).made["source"] == "out"
    with pytest.raises(ValueError, match="reserved"):
        merge(family, tmp_path / "x", Mean(), "ab", target={"publish": (path, "base")})
    with pytest.raises(ValueError, match="not a store"):
        merge(family, tmp_path / "x", Mean(), "ab", target={"publish": (tmp_path / "no", "x")})
    assert not (tmp_path / "x").exists()
