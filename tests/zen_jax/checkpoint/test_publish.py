"""All of a checkpoint is published, or nothing: crashes, full disks, others at the same time."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zen_jax.checkpoint import publish
from zen_jax.checkpoint.publish import PUBLISHING, Publisher, StoreWriteFailed
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base, convert_variant


def _work(store: Store) -> list[str]:
    return sorted(p.name for p in (store.path / PUBLISHING).iterdir() if p.name != "lock")


def _nothing_new(store: Store) -> None:
    assert store.names() == ["one"] and store.versions("one") == [1]
    assert store.verify() == []


# ---- failures inside the process


class _Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


class _Fault(Exception):
    """Something that went wrong."""


@pytest.mark.parametrize("step", [1, 5, 10])
@pytest.mark.parametrize("kind", [_Stop, _Fault])
def test_an_exception_half_way_publishes_nothing(sources, store: Store, step: int, kind) -> None:
    seen: list[str] = []

    def stop(name: str, done: int, total: int) -> None:
        seen.append(name)
        if len(seen) == step:
            raise kind

    with pytest.raises(kind):
        convert_variant(sources[1], store.path, "v", progress=stop)
    _nothing_new(store)
    # An interruption leaves what was done; a fault leaves nothing.
    assert [name.startswith("unfinished-") for name in _work(store)] == [True] * (kind is _Stop)


@contextlib.contextmanager
def _no_file_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_base(sources, tmp_path: Path, capfd) -> None:
    with (
        _no_file_larger_than(1000),
        pytest.raises(StoreWriteFailed, match="the disk of .* is full"),
    ):
        convert_base(sources[0], tmp_path / "s")
    assert not (tmp_path / "s" / "base").exists()
    assert capfd.readouterr() == ("", "")
    convert_base(sources[0], tmp_path / "s")
    assert Store(tmp_path / "s").verify() == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/s/file"),
        ValueError("RESOURCE_EXHAUSTED: Error writing [OS error 28: No space left on device]"),
    ],
)
def test_a_full_disk_is_called_so(sources, store: Store, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise StoreWriteFailed("a leaf could not be written") from error

    with pytest.raises(StoreWriteFailed, match=f"the disk of {store.path} is full"):
        convert_variant(sources[1], store.path, "v", progress=fail)
    _nothing_new(store)


@pytest.mark.parametrize("size", [10, 1000, 8000])
def test_no_room_for_a_variant(sources, store: Store, size: int) -> None:
    with _no_file_larger_than(size), pytest.raises(OSError):
        convert_variant(sources[1], store.path, "v")
    _nothing_new(store)
    assert _work(store) == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_at_the_end(sources, store: Store, monkeypatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publish.os, call, fail)
    with pytest.raises(OSError, match="is full"):
        convert_variant(sources[1], store.path, "one")
    monkeypatch.undo()
    _nothing_new(store)


def test_what_does_not_come_back_is_not_published(sources, store: Store, monkeypatch) -> None:
    saved = Publisher._save

    def save_and_damage(self, tree, written) -> None:
        saved(self, tree, written)
        file = next(iter(self._content.glob("*.bits"))) / "0.0.0"
        file.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr(Publisher, "_save", save_and_damage)
    with pytest.raises(StoreWriteFailed, match="did not come back as it was written"):
        convert_variant(sources[1], store.path, "one")
    _nothing_new(store)


# ---- crashes

CRASH = """
import os, signal, sys, warnings
from pathlib import Path
from zen_jax.checkpoint import publish
from zen_jax.convert import convert_variant

warnings.simplefilter("ignore")  # Nothing runs yet when this forks.
source, store = Path(sys.argv[1]), Path(sys.argv[2])

def die_at(step):
    steps = iter(range(1, step + 1))
    def tick(*_):
        if next(steps, 0) == step:
            os.kill(os.getpid(), signal.SIGKILL)
    return tick

def converting(step):
    convert_variant(source, store, "one", progress=die_at(step))

def writing():
    make, tick = publish._Streaming._make, die_at(6)
    publish._Streaming._make = lambda *args: (tick(), make(*args))[1]
    converting(99)

def syncing():
    sync, tick = publish._sync, die_at(4)
    publish._sync = lambda path: (tick(), sync(path))
    converting(99)

def renaming():
    publish.os.rename = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)
    converting(99)

def renamed():
    rename = os.rename
    def then_die(a, b):
        rename(a, b)
        if Path(b).parent.name == "one":
            os.kill(os.getpid(), signal.SIGKILL)
    publish.os.rename = then_die
    converting(99)

for point in (lambda: converting(2), lambda: converting(9), writing, syncing, renaming, renamed):
    child = os.fork()
    if child == 0:
        point()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    left = len([p for p in (store / ".publishing").iterdir() if p.is_dir()])
    versions = sorted(p.name for p in (store / "variants" / "one").iterdir())
    print(os.WTERMSIG(status), left, *versions)
"""


def _run(script: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_point(sources, store: Store) -> None:
    process = _run(CRASH, sources[1], store.path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    # Each one died by SIGKILL and swept what the one before had left; only the last published.
    assert out.splitlines() == ["9 1 1"] * 5 + ["9 1 1 2"], err
    assert store.versions("one") == [1, 2]
    assert store.verify() == []
    convert_variant(sources[1], store.path, "one")
    assert _work(store) == []
    assert store.versions("one") == [1, 2, 3]


# ---- others at the same time

PUBLISH = """
import sys
from pathlib import Path
from zen_jax.convert import convert_variant
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2):
    print(convert_variant(Path(sys.argv[1]), Path(sys.argv[2]), "one").version, flush=True)
"""


def test_two_publishers_get_different_versions(sources, store: Store) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(sources[1]), str(store.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    # Both begin as soon as they read this.
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate()[0].split() for process in processes]
    assert sorted(int(v) for out in outputs for v in out) == [2, 3, 4, 5]
    assert store.versions("one") == [1, 2, 3, 4, 5]
    assert store.verify() == []
    assert len({store.variant("one", v).digest for v in store.versions("one")}) == 1


def test_only_dead_publishers_are_swept(store: Store) -> None:
    dead = store.path / PUBLISHING / "1-dead"
    dead.mkdir()
    (dead / "alive").touch()
    (dead / "data").write_bytes(b"x" * 100)
    early = store.path / PUBLISHING / "2-died-early"
    early.mkdir()
    with Publisher(store.path) as first:
        assert not dead.exists() and not early.exists()
        with Publisher(store.path) as second:
            assert first.scratch.is_dir() and second.scratch.is_dir()
            assert len(_work(store)) == 2
        assert first.scratch.is_dir() and not second.scratch.exists()
    assert _work(store) == []


def test_a_linked_publishing_folder_is_refused(sources, store: Store, tmp_path: Path) -> None:
    (store.path / PUBLISHING / "lock").unlink()
    (store.path / PUBLISHING).rmdir()
    (tmp_path / "elsewhere").mkdir()
    (store.path / PUBLISHING).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a symbolic link"):
        convert_variant(sources[1], store.path, "v")
    assert os.listdir(tmp_path / "elsewhere") == []
