"""A conversion that was killed is gone on with, not begun again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zen_jax import conversion
from zen_jax.checkpoint.hf import HuggingFaceFolder
from zen_jax.checkpoint.journal import Journal
from zen_jax.checkpoint.publish import PUBLISHING, Publisher
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant

KILLED = """
import os, signal, sys
from pathlib import Path
from zen_jax.checkpoint import publish
from zen_jax.convert import convert_base, convert_variant

kind, source, store, steps = sys.argv[1:]
left = int(steps)

def tick(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

publish._WRITERS = 1  # a leaf is on disk before the next one is made
if kind == "base":
    convert_base(Path(source), Path(store), progress=tick)
else:
    convert_variant(Path(source), Path(store), "v", progress=tick)
"""


def _kill(kind: str, source: Path, store: Path, steps: int) -> Path:
    """Converts in a process that is killed after some tensors; the folder that it leaves."""
    command = [sys.executable, "-c", KILLED, kind, str(source), str(store), str(steps)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == -9, ran.stderr
    return _left(store)


def _left(store: Path) -> Path:
    (folder,) = (store / PUBLISHING).glob("unfinished-*")
    return folder


@pytest.fixture(scope="session")
def dead(sources, ready: Path, tmp_path_factory) -> Path:
    """A store in which a conversion died when all tensors were done; not to be changed."""
    store = Path(shutil.copytree(ready, tmp_path_factory.mktemp("stores") / "dead"))
    _kill("variant", sources[1], store, 11)
    return store


@pytest.fixture
def killed(dead: Path, tmp_path: Path) -> Store:
    """A copy of `dead`."""
    return Store(Path(shutil.copytree(dead, tmp_path / "killed")))


@pytest.fixture
def compressed(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the matrices that are compressed from now on."""
    seen: list[tuple[int, ...]] = []
    compress = conversion.compress_tensor

    def count(base: np.ndarray, tuned: np.ndarray, **options):
        seen.append(base.shape)
        return compress(base, tuned, **options)

    monkeypatch.setattr(conversion, "compress_tensor", count)
    return seen


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The tensors that are read from folders from now on."""
    seen: list[str] = []
    once: Callable[..., np.ndarray] = HuggingFaceFolder.read

    def count(self: HuggingFaceFolder, name: str) -> np.ndarray:
        seen.append(name)
        return once(self, name)

    monkeypatch.setattr(HuggingFaceFolder, "read", count)
    return seen


def test_a_killed_variant_goes_on(sources, store: Store, compressed) -> None:
    _kill("variant", sources[1], store.path, 6)
    assert store.names() == ["one"] and store.verify() == []
    steps: list[int] = []
    summary = convert_variant(
        sources[1], store.path, "v", progress=lambda _, done, total: steps.append(total - done)
    )
    # Of 8 matrices and 3 vectors were done the embedding, the MLP and two vectors.
    assert compressed == [(8, 16), (16, 16), (16, 16), (8, 16)]
    assert len(steps) == 11 and steps[-1] == 0
    assert summary.digest == store.variant("one").digest
    assert store.verify() == []
    assert [p.name for p in (store.path / PUBLISHING).iterdir()] == ["lock"]


def test_killed_again_and_again(sources, store: Store, compressed) -> None:
    for steps in (3, 11):
        _kill("variant", sources[1], store.path, steps)
    summary = convert_variant(sources[1], store.path, "v")
    assert compressed == []
    assert summary.digest == store.variant("one").digest and summary.stats["distance"] < 0.2


def test_other_options_begin_anew(sources, killed: Store, compressed) -> None:
    convert_variant(sources[1], killed.path, "v", levels=2)
    assert len(compressed) == 8
    levels = {t.levels for t in killed.manifest(killed.variant("v")).tensors.values()}
    assert levels == {0, 2}


def test_another_source_begins_anew(sources, killed: Store, tmp_path, compressed) -> None:
    # The same names, shapes and sizes, but another time of change.
    folder = Path(shutil.copytree(sources[1], tmp_path / "tuned"))
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    convert_variant(folder, killed.path, "v")
    assert len(compressed) == 8


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "journal", "fields"])
def test_damaged_work_is_done_again(sources, killed: Store, compressed, damage: str) -> None:
    folder = _left(killed.path)
    part = folder / "scratch" / "model.embed_tokens.weight.bits"
    data = part.read_bytes()
    if damage == "flip":
        part.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "cut":
        part.write_bytes(data[:-1])
    elif damage == "remove":
        part.unlink()
    elif damage == "journal":
        journal = folder / "scratch" / "done.jsonl"
        journal.write_bytes(journal.read_bytes()[:-20])
    else:
        journal = Journal(folder / "scratch" / "done.jsonl")
        records = journal.read()
        del records[0]["entry"]  # as another version of the code might have it
        journal.start(records)
    summary = convert_variant(sources[1], killed.path, "v")
    assert len(compressed) == (0 if damage == "journal" else 1)  # its last line is a vector's
    assert summary.digest == killed.variant("one").digest


def test_a_killed_base_goes_on(family, sources, tmp_path: Path, read) -> None:
    (tmp_path / "s").mkdir()
    _kill("base", sources[0], tmp_path / "s", 8)
    whole = convert_base(sources[0], tmp_path / "whole")
    read.clear()
    steps: list[int] = []
    summary = convert_base(
        sources[0], tmp_path / "s", progress=lambda _, done, total: steps.append(total - done)
    )
    assert len(read) == 4 and len(steps) == 11 and steps[-1] == 0
    assert summary.digest == whole.digest
    store = Store(tmp_path / "s")
    assert store.verify() == []
    for name, values in store.base_tensors():
        np.testing.assert_array_equal(values, family.base[name])
    assert [p.name for p in (tmp_path / "s" / PUBLISHING).iterdir()] == ["lock"]


def test_a_base_killed_again_and_again(sources, tmp_path: Path, read) -> None:
    for steps in (5, 9):
        folder = _kill("base", sources[0], tmp_path / "s", steps)
    # One of the leaves that are kept is damaged meanwhile.
    leaf = Journal(folder / "written.jsonl").read()[0]["leaf"]
    (file,) = folder.glob(f"*/{leaf}/0*")
    file.write_bytes(bytes(file.stat().st_size))
    summary = convert_base(sources[0], tmp_path / "s")
    assert leaf in read and len(read) == 4
    assert summary.digest == convert_base(sources[0], tmp_path / "whole").digest
    assert Store(tmp_path / "s").verify() == []


def test_values_that_are_not_finite_are_found_after_an_interruption(family, tmp_path: Path) -> None:
    tensors = {name: w.copy() for name, w in family.base.items()}
    for name in sorted(tensors):
        tensors[name].reshape(-1)[0] = np.nan
    source = family.write(tmp_path / "bad", tensors)
    _kill("base", source, tmp_path / "s", 9)
    with pytest.raises(SourceError) as error:
        convert_base(source, tmp_path / "s")
    assert len(error.value.problems) == len(tensors)


def test_work_is_swept_when_it_is_a_week_old(killed: Store) -> None:
    folder = _left(killed.path)
    with Publisher(killed.path):
        assert folder.is_dir()
    old = (folder / "alive").stat().st_mtime - 7 * 24 * 3600 - 60
    os.utime(folder / "alive", (old, old))
    with Publisher(killed.path):
        assert not folder.exists()


def test_two_at_the_same_work_do_not_meet(store: Store) -> None:
    with Publisher(store.path, "k") as first:
        (first.scratch / "part").write_bytes(b"1")
        with Publisher(store.path, "k") as second:
            assert second.scratch != first.scratch and not list(second.scratch.iterdir())
        assert (first.scratch / "part").read_bytes() == b"1"


def test_a_journal_holds_whole_lines_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    assert journal.read() == []
    journal.append({"a": 1})
    journal.append({"b": [2]})
    assert journal.read() == [{"a": 1}, {"b": [2]}]
    for torn in (b'{"c": 3', b'{"c": 3\n{"d": 4}\n', b"[]\n", b"\xff\n"):
        with open(tmp_path / "j", "ab") as file:
            file.write(torn)
        assert journal.read() == [{"a": 1}, {"b": [2]}]
        journal.start(journal.read())
    journal.append({"e": 5})
    assert journal.read()[-1] == {"e": 5}
