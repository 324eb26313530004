"""Merging as a process: memory that does not grow with checkpoints, and kill -9 at any moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS, SOAK_KILLS = 3, 40

# One process that forks children, so that what is slow to import is imported once.
PRELUDE = """
import hashlib, os, random, shutil, signal, sys, warnings
from pathlib import Path
import jax
from zen_jax.checkpoint.journal import Journal
from zen_jax.merge.checkpoints import Target, merge_checkpoints
from zen_jax.merge.folding import Mean
from zen_jax.merge.monosoup import TruncatedSoup
from zen_jax.merge.pairing import Policies
from zen_jax.merge.sources import open_member
from zen_jax.merge.tensors import Job

warnings.simplefilter("ignore")  # Nothing runs yet when this forks.
root = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", sys.argv[2] + "/compiled")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

def merge(names, out, method, **target):
    models = tuple(open_member(str(root / name)) for name in names)
    job = Job(open_member(str(root / "base")), models, method)
    merge_checkpoints(job, Policies(), Target(Path(out), **target))

def child(action):
    number = os.fork()
    if number == 0:
        action()
        os._exit(0)
    return number
"""

MEMORY = """
def peak(count):
    number = child(lambda: merge([f"m{i}" for i in range(count)], root / f"out{count}", Mean()))
    _, status, usage = os.wait4(number, 0)
    assert status == 0
    return usage.ru_maxrss

print(peak(2), peak(8))
"""

KILL = """
out, kills = Path(sys.argv[2]) / "out", int(sys.argv[3])
draw = random.Random(5)
out.mkdir()

def work(name, at=0):
    # Dies at the at-th write, record, sync or rename, in the middle of a write; at -1 after the
    # rename that gives the result its name.
    events = 0

    def dying(function):
        def run(*given):
            nonlocal events
            events += 1
            if events == at:
                if function is pwrite:
                    pwrite(given[0], given[1][: len(given[1]) // 2], given[2])
                die()
            found = function(*given)
            if at == -1 and function is rename and str(given[1]) == str(out / name):
                die()
            return found
        return run

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    pwrite, rename = os.pwrite, os.rename
    os.pwrite, os.rename, os.fsync = dying(os.pwrite), dying(os.rename), dying(os.fsync)
    Journal.append = dying(Journal.append)
    merge("abc", out / name, TruncatedSoup(3))
    (out.parent / "events").write_text(str(events))

def digest(folder):
    files = [folder / name for name in ("model.safetensors", "config.json", "tokenizer.json")]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

assert os.waitpid(child(lambda: work("whole")), 0)[1] == 0
total = int((out.parent / "events").read_text())
assert total > 40
died = 0
for i in range(kills):
    # What one has done the next has not to do, so later ones may come through.
    at = (5, 12, -1)[i] if i < 3 else draw.choice([-1, draw.randrange(1, total)])
    died += os.waitpid(child(lambda: work("killed", at)), 0)[1] == signal.SIGKILL
    if (out / "killed").exists():
        assert digest(out / "killed") == digest(out / "whole"), "half of it was taken for whole"
        shutil.rmtree(out / "killed")
assert os.waitpid(child(lambda: work("killed")), 0)[1] == 0
assert digest(out / "killed") == digest(out / "whole")
assert sorted(os.listdir(out)) == ["killed", "whole"], "nothing is left beside it"
print(died)
"""


def run(script: str, *arguments: object) -> str:
    # Whatever is freed goes back to the system at once, so that the peak is what was in use.
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_peak_memory_does_not_grow_with_checkpoints(write, make_base, config, tmp_path) -> None:
    import dataclasses

    wide = dataclasses.replace(config, vocab_size=120_000)
    base = make_base(wide)
    assert sum(value.nbytes for value in base.values()) > 15e6
    write(tmp_path / "base", base, wide)
    for i in range(8):
        write(tmp_path / f"m{i}", {name: w + i * 0.01 for name, w in base.items()}, wide)
    two, eight = map(int, run(MEMORY, tmp_path, tmp_path).split())
    assert eight <= 1.1 * two, f"{two:,} kB with two checkpoints, {eight:,} kB with eight"


def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(
    family: Path, tmp_path: Path, scale: int
) -> None:
    kills = KILLS if scale == 1 else SOAK_KILLS
    assert int(run(KILL, family, tmp_path, kills)) >= min(kills, 2)


def test_work_that_is_damaged_is_done_again(family, tmp_path, monkeypatch) -> None:
    """A run that stops half-way is gone on with, but for tensors that are not as they should be."""
    from zen_jax.merge import checkpoints
    from zen_jax.merge.checkpoints import Target, _held, merge_checkpoints
    from zen_jax.merge.folding import Mean
    from zen_jax.merge.pairing import Policies
    from zen_jax.merge.sources import open_member
    from zen_jax.merge.tensors import Job, merge_tensor

    class Killed(BaseException):
        pass

    done: list[str] = []

    def dies(job, item, time_svd=False):
        if len(done) == 6:
            raise Killed
        done.append(item.name)
        return merge_tensor(job, item, time_svd)

    job = Job(
        open_member(str(family / "base")),
        (open_member(str(family / "a")), open_member(str(family / "b"))),
        Mean(),
    )
    target = Target(tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "merge_tensor", dies)
        merge_checkpoints(job, Policies(), target)
    assert not target.out.exists()
    (work,) = tmp_path.glob(".out.merge-*")
    with open(work / "done.jsonl", "ab") as journal:
        journal.write(b'{"tensor": "torn')
    file = work / "out/model.safetensors"
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header] ^= 1  # in the first tensor, which is done
    file.write_bytes(data)
    # Another merge to the same place neither uses nor removes it.
    other = Job(job.base, job.models[:1], Mean())
    merge_checkpoints(other, Policies(), Target(tmp_path / "other"))
    stale, held = (tmp_path / f".out.merge-{name}" for name in ("stale", "held"))
    stale.mkdir()
    with _held(held):
        outcome = merge_checkpoints(job, Policies(), target)
    assert outcome.resumed == 5
    assert held.exists() and not stale.exists(), "what was to get a place that is taken"
    merge_checkpoints(job, Policies(), Target(tmp_path / "whole"))
    whole = (tmp_path / "whole/model.safetensors").read_bytes()
    assert (tmp_path / "out/model.safetensors").read_bytes() == whole
    assert not work.exists()
