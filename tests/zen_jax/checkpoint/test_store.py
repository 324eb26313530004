"""What a store gives back, and that no damage to it goes unseen."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from zen_jax.checkpoint.chunks import list_files
from zen_jax.checkpoint.manifest import (
    MANIFEST,
    BaseCorrupt,
    Manifest,
    NameRefused,
    NotAStore,
    NotServedYet,
    Variant,
    VariantCorrupt,
    VariantNotFound,
)
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant
from zen_jax.layout import EMBED

Q = "model.layers.0.self_attn.q_proj.weight"
BITS = f"{Q}.bits/0.0.0"


def _files(store: Store) -> tuple[Variant, list[str]]:
    variant = store.variant("one")
    return variant, sorted(list_files(variant.path))


# ---- orbax can read it


@pytest.mark.parametrize("shards", [1, 2])
def test_orbax_restores_what_was_stored(family, sources, tmp_path: Path, shards: int) -> None:
    convert_base(sources[0], tmp_path / "s", shards=shards)
    convert_variant(sources[1], tmp_path / "s", "v", levels=2)
    store = Store(tmp_path / "s")
    for manifest, folder in [
        (store.base(), store.path / "base"),
        (store.manifest(store.variant("v")), store.variant("v").path),
    ]:
        target: dict = {}
        for name, tensor in manifest.tensors.items():
            for kind, part in tensor.parts.items():
                shape = list(part.shape)
                if part.shards > 1:
                    shape[part.axis] //= part.shards
                    shape.insert(0, part.shards)
                dtype = ml_dtypes.bfloat16 if part.dtype == "bfloat16" else part.dtype
                leaf = jax.ShapeDtypeStruct(shape, dtype)
                if kind == "weight":
                    target[name] = leaf
                else:
                    target.setdefault(name, {})[kind] = leaf
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder, target)
        if manifest.is_base:
            for name, expected in family.base.items():
                part = manifest.tensors[name].parts["weight"]
                found = np.asarray(restored[name])
                if part.shards > 1:
                    found = np.concatenate(list(found), part.axis)
                np.testing.assert_array_equal(found, expected)
        else:
            read = store.read_variant(store.variant("v"))
            for name, kinds in restored.items():
                for kind, values in kinds.items():
                    if manifest.tensors[name].parts[kind].shards > 1:
                        values = np.concatenate(
                            list(values), manifest.tensors[name].parts[kind].axis
                        )
                    np.testing.assert_array_equal(values, getattr(read[name], kind))


def test_one_chunk_file_for_each_array(ready: Path) -> None:
    store = Store(ready)
    variant = store.variant("one")
    for tensor in store.manifest(variant).tensors.values():
        for part in tensor.parts.values():
            assert len(part.files()) == 1
            assert sorted(os.listdir(variant.path / part.leaf)) == sorted(
                [".zarray", Path(part.files()[0]).name]
            )


# ---- damage


def _flip(store: Store, rng: random.Random) -> str:
    variant, files = _files(store)
    file = rng.choice(files)
    data = bytearray((variant.path / file).read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (variant.path / file).write_bytes(data)
    return file


def test_random_flips_are_all_refused(ready: Path, store: Store, scale: int) -> None:
    whole = Store(ready)
    rng = random.Random(11)
    seen = set()
    variant = store.variant("one")
    for _ in range(80 * scale):
        file = _flip(store, rng)
        seen.add(file)
        with pytest.raises(VariantCorrupt) as error:
            store.read_variant(variant)
        assert error.value.file == file and file in str(error.value)
        shutil.copyfile(whole.variant("one").path / file, variant.path / file)
    assert len(seen) > 20
    store.read_variant(variant)


def test_random_flips_of_the_manifest_are_all_refused(store: Store, scale: int) -> None:
    variant = store.variant("one")
    path, rng = variant.path / MANIFEST, random.Random(13)
    whole = path.read_bytes()
    for _ in range(60 * scale):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(VariantCorrupt, match=f"one/1: {MANIFEST} "):
            store.variant("one")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _link(path: Path) -> None:
    copy = path.parent.parent.parent / "copy"
    path.rename(copy)
    path.symlink_to(copy)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [_truncate, _grow, Path.unlink, _link, _pipe])
@pytest.mark.parametrize(
    "file", [BITS, f"{Q}.bits/.zarray", "_METADATA", "tokenizer/tokenizer.json", MANIFEST]
)
def test_damaged_files_are_named(store: Store, damage: Callable[[Path], None], file: str) -> None:
    variant = store.variant("one")
    damage(variant.path / file)
    with pytest.raises(VariantCorrupt) as error:
        store.read_variant(variant)
    assert error.value.file == file
    assert ("one/1", file) in [(f.where, f.file) for f in store.verify()]


def test_files_that_do_not_belong(store: Store) -> None:
    variant = store.variant("one")
    (variant.path / "notes.txt").write_text("mine")
    with pytest.raises(VariantCorrupt, match="notes.txt does not belong here"):
        store.read_variant(variant)
    assert [str(f) for f in store.verify()] == ["one/1: notes.txt does not belong here"]


def test_exchanged_files(store: Store) -> None:
    variant = store.variant("one")
    other = BITS.replace("q_proj", "o_proj")
    a, b = variant.path / BITS, variant.path / other
    assert a.stat().st_size == b.stat().st_size
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    with pytest.raises(VariantCorrupt, match="does not match its checksum") as error:
        store.read_variant(variant)
    assert error.value.file in (BITS, other)
    assert {f.file for f in store.verify()} == {BITS, other}


def test_exchanged_versions(sources, store: Store) -> None:
    convert_variant(sources[1], store.path, "one", levels=2)
    variant = store.variant("one", 1)
    folder = store.path / "variants" / "one"
    (folder / "1").rename(folder / "x")
    (folder / "2").rename(folder / "1")
    (folder / "x").rename(folder / "2")
    with pytest.raises(VariantCorrupt, match="manifest.json is that of one/2"):
        store.read_variant(variant)
    assert len(store.verify()) == 2


def _rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """Changes a manifest and gives it a right checksum, as damage never would."""
    import hashlib

    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    change(fields)
    body = json.dumps(fields, sort_keys=True, indent=1).removesuffix("\n}").encode() + b",\n"
    seal = hashlib.sha256(body).hexdigest()
    path.write_bytes(body + b' "checksum": "' + seal.encode() + b'"\n}\n')


def _set(path: list[str], value: object) -> Callable[[dict], None]:
    def change(fields: dict) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change


PART = ["tensors", Q, "parts", "bits"]
ENTRY = {"size": 1, "xxh3": "", "sha256": ""}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set(["format_version"], 2), "format version 2; expected 1"),
        (_set(["tensors"], []), "cannot be read"),
        (_set(["files", "../../secret"], ENTRY), "outside its folder"),
        (_set(["files", "/etc/passwd"], ENTRY), "outside its folder"),
        (_set([*PART, "leaf"], "../base"), "does not list"),
        (_set([*PART, "shape"], [1, 16, 10**12]), "do not fit"),
        (_set([*PART, "shape"], [1, -16, -2]), "malformed array"),
        (_set([*PART, "dtype"], "object"), "malformed array"),
        (_set([*PART, "shards"], 3), "does not divide"),
        (_set(["tensors", Q, "parts"], {}), "digest"),
        (_set(["config", "hidden_act"], "gelu"), "cannot be read"),
        (_set(["kind"], "base"), "whether it is a base or a variant"),
        (_set(["surprise"], 1), None),
    ],
)
def test_manifests_that_make_no_sense(store: Store, change, problem: str | None) -> None:
    path = store.variant("one").path / MANIFEST
    _rewrite(path, change)
    if problem is None:  # Written by a later version of the same format.
        store.read_variant(store.variant("one"))
    elif problem == "digest":
        assert any("digest that does not fit" in f.problem for f in store.verify())
    else:
        with pytest.raises(VariantCorrupt, match=f"one/1: manifest.json .*{problem}"):
            store.variant("one")


def test_parts_of_a_later_version(store: Store) -> None:
    variant = store.variant("one")

    def rename(fields: dict) -> None:
        parts = fields["tensors"]["model.layers.0.input_layernorm.weight"]["parts"]
        parts["low_rank"] = parts.pop("dense")

    _rewrite(variant.path / MANIFEST, rename)
    with pytest.raises(NotServedYet, match="does not know: low_rank"):
        store.read_variant(variant)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", b'{"format_version": 1}', b"[" * 9**5]
)
def test_manifests_that_are_none(store: Store, data: bytes) -> None:
    variant = store.variant("one")
    (variant.path / MANIFEST).write_bytes(data)
    with pytest.raises(VariantCorrupt, match="manifest.json"):
        store.read_variant(variant)


def test_the_bases_damage_is_told_apart(store: Store) -> None:
    path = store.path / "base" / EMBED / "0.0"
    data = bytearray(path.read_bytes())
    data[5] ^= 4
    path.write_bytes(data)
    with pytest.raises(BaseCorrupt, match="0.0 does not match its checksum"):
        dict(store.base_tensors())
    assert [str(f) for f in store.verify()] == [f"base: {EMBED}/0.0 does not match its SHA-256"]
    store.read_variant(store.variant("one"))
    (store.path / "base" / MANIFEST).write_bytes(b"{}")
    with pytest.raises(BaseCorrupt, match="base: manifest.json"):
        store.read_variant(store.variant("one"))


@pytest.mark.parametrize("lost", ["manifest", "folder"])
def test_a_store_that_lost_its_base(store: Store, lost: str) -> None:
    if lost == "manifest":
        (store.path / "base" / MANIFEST).unlink()
    else:
        shutil.rmtree(store.path / "base")
    store = Store(store.path)
    with pytest.raises(BaseCorrupt, match="base: "):
        store.base()
    with pytest.raises(BaseCorrupt, match="base: "):
        store.read_variant(store.variant("one"))
    assert [f.where for f in store.verify()] == ["base"]


def test_verify_reports_every_damaged_file(store: Store) -> None:
    assert store.verify() == []
    rng = random.Random(5)
    damaged = {_flip(store, rng) for _ in range(12)} - {MANIFEST}
    steps: list[tuple[str, int, int]] = []
    findings = store.verify(lambda *step: steps.append(step))
    assert {f.file for f in findings} >= damaged
    assert {f.where for f in findings} == {"one/1"}
    assert steps[-1][1] == steps[-1][2] > 0


# ---- names and places


def test_names_versions_and_what_is_not_there(sources, store: Store) -> None:
    convert_variant(sources[1], store.path, "Two.x_y-z")
    assert store.names() == ["Two.x_y-z", "one"]
    assert store.versions("nobody") == []
    with pytest.raises(VariantNotFound, match="no variant 'nobody'"):
        store.variant("nobody")
    with pytest.raises(VariantNotFound, match="'one' has no version 2; it has 1"):
        store.variant("one", 2)
    for name in ("base", "../base", "one/1", ""):
        with pytest.raises(NameRefused):
            store.variant(name)
    with pytest.raises(NotAStore):
        Store(store.path / "variants")


def test_no_path_leaves_the_store(ready: Path, store: Store, tmp_path: Path) -> None:
    outside = shutil.copytree(ready / "variants" / "one", tmp_path / "outside")
    (store.path / "variants" / "link").symlink_to(outside)
    (store.path / "variants" / "one" / "2").symlink_to(outside / "1")
    assert store.names() == ["one"] and store.versions("one") == [1]
    with pytest.raises(VariantNotFound):
        store.variant("link")
    forged = Variant("link", 1, store.variant("one").digest, outside / "1")
    with pytest.raises(VariantCorrupt, match="is missing, or is no folder of the store"):
        store.read_variant(forged)
    with pytest.raises(NameRefused):
        store.read_variant(Variant("../../outside", 1, "", outside))
    assert [f.file for f in store.verify()] == ["variants/link", "variants/one/2"]


def test_a_linked_tokenizer_folder(ready: Path, store: Store, tmp_path: Path) -> None:
    variant = store.variant("one")
    (variant.path / "tokenizer").rename(tmp_path / "elsewhere")
    (variant.path / "tokenizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VariantCorrupt):
        store.tokenizer_folder(variant)
    with pytest.raises(VariantCorrupt):
        store.read_variant(variant)


def test_a_variant_that_was_replaced_under_its_name(sources, store: Store) -> None:
    old = store.variant("one")
    shutil.rmtree(old.path)
    convert_variant(sources[1], store.path, "one", levels=2)
    assert store.variant("one").version == 1
    with pytest.raises(VariantCorrupt, match="has another digest than when it was found"):
        store.read_variant(old)


def test_quality_is_recorded_without_touching_the_content(store: Store) -> None:
    before = store.variant("one")
    store.record_quality(before, {"nll": 1.5})
    store.record_quality(before, {"score": 0.9})
    store.record_quality(None, {"score": 0.1})
    after = store.variant("one")
    assert after == before
    assert store.manifest(after).quality == {"nll": 1.5, "score": 0.9}
    assert store.base().quality == {"score": 0.1}
    assert store.verify() == []
    store.read_variant(after)


def test_a_manifest_survives_its_own_writing(ready: Path) -> None:
    data = (Store(ready).variant("one").path / MANIFEST).read_bytes()
    manifest = Manifest.parse(data)
    assert manifest.render() == data
    assert manifest.bytes_on_disk > sum(f.size for f in manifest.files.values())
