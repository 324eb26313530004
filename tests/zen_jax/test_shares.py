"""A variant onto a mesh: each device from its own files, each file read once, all checked first."""

import dataclasses
import json
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from zen_jax import staging
from zen_jax.checkpoint.load import bank_schema, read_base
from zen_jax.checkpoint.manifest import Manifest, VariantCorrupt
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.convert import convert_base, convert_variant
from zen_jax.delta.resident import ResidentBank
from zen_jax.engine import Engine, EngineConfig
from zen_jax.layout import tensor_shapes
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement, make_mesh
from zen_jax.staging import Staging
from zen_jax.training.bytes_tokenizer import write_tokenizer

PLACES = 4
# Biases are cut by kv head too, which no other family has.
MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position=64,
    tie_word_embeddings=True,
    family="qwen2",
)


@pytest.fixture(scope="module")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """(shards, options of the conversion) -> a store with the variant "one"."""
    rng = np.random.default_rng(5)
    kept: dict[str, Store] = {}

    def write(folder: Path, change: float, **settings: Any) -> Path:
        config = dataclasses.replace(MODEL, **settings)
        folder.mkdir()
        tensors = {}
        for name, shape in tensor_shapes(config).items():
            # The same base for all: a stream of its own for each tensor.
            own = np.random.default_rng([7, *name.encode()])
            rows = tensor_shapes(MODEL).get(name, shape)
            base = np.zeros(shape, np.float32)
            base[: rows[0]] = own.normal(1.0 if len(shape) == 1 else 0.0, 0.3, rows)
            tensors[name] = (base + change * rng.normal(0, 1, shape)).astype(ml_dtypes.bfloat16)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config.to_hf()))
        write_tokenizer(folder, config.max_position)
        return folder

    def make(shards: int, settings: dict[str, Any] | None = None, **options: Any) -> Store:
        key = str((shards, settings, options))
        if key not in kept:
            root = tmp_path_factory.mktemp("shares")
            convert_base(write(root / "base", 0.0), root / "store", shards=shards)
            tuned = write(root / "tuned", 0.05, **(settings or {}))
            convert_variant(tuned, root / "store", "one", force=True, **options)
            kept[key] = Store(root / "store")
        return kept[key]

    return make


def stage(store: Store, data: int = 1, **options: Any) -> Staging:
    schema = bank_schema(store, slots=2)
    mesh = make_mesh(PLACES, data)
    return Staging(store, schema, Placement.of(schema.held.config, mesh), **options)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that any thread reads, by the path that they come from."""
    counted: Counter[str] = Counter()

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(handle: int, *args: Any) -> Any:
            found = read(handle, *args)
            path = os.readlink(f"/proc/self/fd/{handle}")
            counted[path] += found if isinstance(found, int) else len(found)
            return found

        return wrapped

    for name in ("read", "readv", "pread", "preadv"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    return counted


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[np.ndarray]]]:
    """(device, arrays) of all that is put."""
    noted: list[tuple[Any, list[np.ndarray]]] = []
    put = jax.device_put

    def noting(tree: Any, where: Any = None, **more: Any) -> Any:
        noted.append((where, jax.tree.leaves(tree)))
        return put(tree, where, **more)

    monkeypatch.setattr(jax, "device_put", noting)
    return noted


def chunk_files(manifest: Manifest) -> Iterator[tuple[str, int | None]]:
    """Chunk files, and the shard that each is; None for those of what is not cut."""
    for tensor in manifest.tensors.values():
        for part in tensor.parts.values():
            for i, file in enumerate(part.files()):
                yield file, None if part.shards == 1 else i


def below(folder: Path, counted: Counter[str]) -> dict[str, int]:
    """What was read of files below a folder, by their paths in it."""
    return {
        p.removeprefix(f"{folder}/"): n for p, n in counted.items() if p.startswith(f"{folder}/")
    }


def assert_the_same(loading: Staging, store: Store, staged: Any) -> None:
    """What lies on the devices is what one process would have given them whole."""
    schema, place = loading.schema, loading.placement
    whole = schema.fit(store.read_variant(store.variant("one")))
    where = ResidentBank(schema, {}, place, ordered=False).packed_shardings(stacked=False)
    leaves, wanted = jax.tree.leaves(staged), jax.tree.leaves(whole)
    for got, want, sharding in zip(leaves, wanted, jax.tree.leaves(where), strict=True):
        assert got.sharding.is_equivalent_to(sharding, got.ndim)
        assert got.dtype == want.dtype and got.shape == want.shape
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


@pytest.mark.parametrize(("shards", "data"), [(1, 1), (2, 1), (4, 2), (8, 1), (5, 1)])
def test_every_device_holds_its_part_bit_for_bit(
    make_store: Any, devices: Any, bytes_read: Counter[str], shards: int, data: int
) -> None:
    store = make_store(shards)
    loading, variant = stage(store, data), store.variant("one")
    bytes_read.clear()
    read = loading.read(variant)
    files = store.manifest(variant).files
    counted = below(variant.path, bytes_read)
    assert {f: counted.get(f, 0) for f in files} == {f: e.size for f, e in files.items()}
    assert_the_same(loading, store, loading.verify(read))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"vocab_size": 323}, {}),
        ({"tie_word_embeddings": False}, {}),
        ({"vocab_size": 321, "tie_word_embeddings": False}, {"embed": "whole"}),
        ({}, {"embed": "whole"}),
        ({}, {"embed": "shared", "scale": "matrix"}),
        ({}, {"levels": 2}),
    ],
)
def test_whatever_a_variant_is_made_of(
    make_store: Any, devices: Any, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    store = make_store(PLACES, settings, **options)
    loading = stage(store)
    staged = loading.verify(loading.read(store.variant("one")))
    assert_the_same(loading, store, staged)


def test_a_device_is_given_its_own_files_bytes_and_nothing_is_put_together(
    make_store: Any, devices: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(PLACES)
    loading = stage(store)
    read = loading.read(store.variant("one"))
    raw, manifest = read.raw, read.raw.manifest
    shard_of = dict(chunk_files(manifest))
    cut = sum(manifest.files[file].size for file, shard in shard_of.items() if shard is not None)
    assert cut > sum(manifest.files[file].size for file, shard in shard_of.items() if shard is None)

    given.clear()
    staged = loading.verify(read)
    places = {device: place for place, device in enumerate(loading.placement.mesh.devices.flat)}
    whole = jax.tree.leaves(staged)
    seen: set[int] = set()
    for where, arrays in given:
        place = places[next(iter(where.device_set))]
        seen.add(place)
        for array, leaf in zip(arrays, whole, strict=True):
            assert array.nbytes == leaf.addressable_shards[place].data.nbytes
            for file, shard in shard_of.items():
                if shard not in (None, place):
                    assert not np.shares_memory(array, raw.stored[file]), (file, place)
    assert seen == set(range(PLACES))
    largest = max(leaf.nbytes for leaf in whole)
    assert max(array.nbytes for array in raw.stored.values()) * PLACES <= largest


def test_where_files_are_cut_as_the_mesh_nothing_is_joined(
    make_store: Any, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("joined")

    monkeypatch.setattr("zen_jax.checkpoint.raw.join", refuse)
    monkeypatch.setattr("zen_jax.checkpoint.raw.concatenate", refuse)
    store = make_store(PLACES)
    loading = stage(store)
    loading.verify(loading.read(store.variant("one")))
    other = make_store(5)
    with pytest.raises(AssertionError, match="joined"):
        apart = stage(other)
        apart.verify(apart.read(other.variant("one")))


def test_who_has_one_place_reads_its_files_alone(
    make_store: Any, devices: Any, bytes_read: Counter[str]
) -> None:
    store = make_store(PLACES)
    variant = store.variant("one")
    bytes_read.clear()
    read = stage(store, places=(2,)).read(variant)
    shard_of = dict(chunk_files(store.manifest(variant)))
    counted = below(variant.path, bytes_read)
    for file, shard in shard_of.items():
        own = shard in (None, 2)
        assert counted.get(file, 0) == (read.raw.manifest.files[file].size if own else 0), file
    assert {key[1] for key in read.done} == {None, 2}


def test_no_damage_gets_to_a_device(make_store: Any, devices: Any, given: Any) -> None:
    store = make_store(PLACES)
    loading, variant = stage(store), store.variant("one")
    files = [file for file, _ in chunk_files(store.manifest(variant))]
    for file in files:
        path = variant.path / file
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 4
        path.write_bytes(damaged)
        given.clear()
        with pytest.raises(VariantCorrupt, match="does not match its checksum") as caught:
            loading.verify(loading.read(variant))
        assert caught.value.file == file and not given
        path.write_bytes(whole)
    path = variant.path / files[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(VariantCorrupt, match="bytes; expected"):
        loading.read(variant)
    path.unlink()
    with pytest.raises(VariantCorrupt):
        loading.read(variant)
    path.write_bytes(whole)
    loading.verify(loading.read(variant))


def test_the_tokens_of_one_device(make_store: Any, devices: Any, compiled: Path) -> None:
    store = make_store(PLACES)
    sizes = EngineConfig(rows=2, max_length=32, dtype="float32")
    schema = bank_schema(store, slots=2)
    answers: list[list[int]] = []
    for mesh in (None, make_mesh(PLACES)):
        placement = None if mesh is None else Placement.of(MODEL, mesh)
        params = read_base(store, schema.held, placement)
        params = jax.tree.map(lambda leaf: leaf.astype("float32"), params)
        engine = Engine(params, sizes, schema, mesh)
        loading = Staging(store, schema, placement)
        staged = engine.put(loading.verify(loading.read(store.variant("one"))))
        bank = engine.write_slot(engine.init_bank(), 1, staged)
        sampling = SamplingParams(max_tokens=20, temperature=0.0)
        state, token = engine.enter(bank, engine.init_state(), 0, 1, (5, 6, 7), sampling, 0)
        tokens = [token]
        for _ in range(8):
            state, sampled = engine.decode(bank, state)
            tokens.append(int(np.asarray(sampled.token)[0, 0]))
        answers.append(tokens)
    assert answers[0] == answers[1] and len(set(answers[0])) > 1


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 3, 9, 1024])
def test_however_many_files_a_process_may_hold_open(
    make_store: Any, devices: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    store = make_store(PLACES)
    loading, held = stage(store), len(os.listdir("/proc/self/fd"))
    assert_the_same(loading, store, loading.verify(loading.read(store.variant("one"))))
    assert len(os.listdir("/proc/self/fd")) == held


def test_beside_requests_a_load_works_a_tenth_of_the_time_and_rests_no_longer_than_it_may(
    make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked, step, slept = 0.0, 0.0, list[float]()
    busy = True

    def clock() -> float:
        nonlocal worked
        worked += step
        return worked

    def work(times: int) -> float:
        nonlocal worked
        before = sum(slept)
        for _ in range(times):
            worked += 0.0004
            rest.after_a_while()
        return sum(slept) - before

    monkeypatch.setattr(staging.time, "thread_time", clock)
    monkeypatch.setattr(staging.time, "sleep", slept.append)
    rest = staging.Rest(lambda: busy)
    rest.after_a_while()
    assert work(30) == pytest.approx(9 * 30 * 0.0004)
    busy = False
    assert work(30) == 0, "nobody needs the processor"
    busy = True
    work(5000)
    assert sum(slept) == pytest.approx(2.0)

    step = 0.0004
    store = make_store(PLACES)
    alone = stage(store)
    assert alone.busy() is False
    slept.clear()
    beside = dataclasses.replace(alone, busy=lambda: True)
    read = beside.read(store.variant("one"))
    reading = len(slept)
    assert reading > 5, "it rests between files"
    assert_the_same(beside, store, beside.verify(read))
    assert len(slept) > reading, "and while arrays are put"
