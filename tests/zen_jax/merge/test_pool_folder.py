"""Pools on disk: whole before or after, within their budget at every write, of bounded memory."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from zen_jax.merge import lora, pool_folder
from zen_jax.merge.lora import Adapter, Factors
from zen_jax.merge.opcm_lora import Merge, Merger, Share
from zen_jax.merge.pool import PoolConfig, PoolRefusal
from zen_jax.merge.pool_change import Newcomer, Tasks
from zen_jax.merge.pool_folder import (
    OpenMember,
    PoolBusy,
    PoolDamaged,
    PoolFolder,
    PoolSettings,
    member_bytes,
    parse_member,
    render_member,
)

TASKS = b'{"metric": "exact", "examples": [[[1, 2], [3]]]}'
SHAPE, RANK = (24, 32), 4


def adapter(seed: int, shape: tuple[int, int] = SHAPE) -> Adapter:
    rng = np.random.default_rng(seed)
    return {
        name: Factors(
            rng.normal(size=(RANK, shape[1])).astype(np.float32),
            rng.normal(size=(shape[0], RANK)).astype(np.float32),
        )
        for name in ("q", "v")
    }


def newcomer(seed: int) -> Newcomer:
    return Newcomer(f"a{seed}", adapter(seed), TASKS)


def likes_all(found: Adapter, tasks: Tasks) -> float:
    return 1.0


def settings(adapters: int = 2, bytes: int | None = None, **more) -> PoolSettings:
    one = member_bytes(adapter(0), RANK)
    room = PoolSettings.new(PoolConfig(1, 2**30), Merger("opcm", RANK), "").config.table_bytes
    limit = room + (adapters + 1) * one + 20 * len(TASKS) if bytes is None else bytes
    config = PoolConfig(adapters, limit, more.pop("policy", "kmerge"), **more)
    return PoolSettings.new(config, Merger("opcm", RANK), "base")


def state(path: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def test_adapters_come_and_are_merged(tmp_path: Path) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings())
    first = [pool.add(newcomer(i), likes_all) for i in range(2)]
    assert [change.what for change in first] == ["kept", "kept"]
    assert pool.load(first[0].member).adapter["q"].dense() == pytest.approx(adapter(0)["q"].dense())
    alike = [lora.similarity(adapter(i), adapter(2)) for i in range(2)]
    change = pool.add(newcomer(2), likes_all)
    best = int(np.argmax(alike))
    assert (change.what, change.together) == ("merged", (f"a{best}",))
    assert change.similarity == pytest.approx(max(alike))
    read, table = pool.read()
    assert read == settings()
    assert sorted(table.names()) == ["a0", "a1", "a2"]
    assert pool.load(change.member).count == 2
    assert pool.load(change.member).adapter["q"].rank == RANK
    assert len(list((tmp_path / "pool" / "members").iterdir())) == 2
    assert pool.verify() == []
    # A damaged file of a member that comes again is written anew.
    path = pool.member_path(change.member)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    assert pool.put(pool_folder.parse_member(whole, change.member), "a2", TASKS)[0] == change.member
    assert path.read_bytes() == whole
    before = state(pool.path)
    assert pool.add(newcomer(2), likes_all).what == "there"
    assert state(pool.path) == before


def test_equal_members_have_equal_ids_and_old_ones_are_read(tmp_path: Path) -> None:
    merge = Merge(adapter(0), 3, {"q": Share(0.5, 2.0), "v": Share(0.25, 1.0)})
    made = {render_member(merge) for _ in range(20)}
    assert len(made) == 1
    ((id, data),) = made
    assert parse_member(data, id).shares == merge.shares
    shares = json.dumps({name: [s.factor, s.length] for name, s in merge.shares.items()})
    old = save(load(data), {"count": "3", "shares": shares})
    found = parse_member(old, hashlib.sha256(old).hexdigest())
    assert (found.count, found.shares) == (3, merge.shares)


def test_a_merge_that_fails_its_gate_leaves_every_byte(tmp_path: Path) -> None:
    own = {seed: adapter(seed)["q"].a.tobytes() for seed in range(3)}

    def likes_originals(found: Adapter, tasks: Tasks) -> float:
        return 1.0 if found["q"].a.tobytes() in own.values() else 0.5

    pool = PoolFolder.create(tmp_path / "pool", settings(policy="gated"))
    for i in range(2):
        assert pool.add(newcomer(i), likes_originals).what == "kept"
    before = state(pool.path)
    with pytest.raises(PoolRefusal, match="keeps 0.50 of a task"):
        pool.add(newcomer(2), likes_originals)
    assert state(pool.path) == before


def test_a_budget_that_is_too_small_for_a_merge(tmp_path: Path) -> None:
    wide = PoolFolder.create(tmp_path / "wide", settings())
    for i in range(2):
        wide.add(newcomer(i), likes_all)
    needed = wide.read()[1].used + member_bytes(adapter(0), RANK) + len(TASKS)
    for lacking in (1, 0):
        pool = PoolFolder.create(tmp_path / f"pool{lacking}", settings(2, needed - lacking))
        for i in range(2):
            pool.add(newcomer(i), likes_all)
        before = state(pool.path)
        if not lacking:
            assert pool.add(newcomer(2), likes_all).what == "merged"
            continue
        with pytest.raises(PoolRefusal, match="1 bytes are lacking"):
            pool.add(newcomer(2), likes_all)
        assert state(pool.path) == before
    with pytest.raises(ValueError, match="the table alone"):
        PoolFolder.create(tmp_path / "small", settings(2, 1000))


class _Crash(BaseException):
    """As if the process had ended here."""


def test_a_crash_at_any_call_leaves_before_or_after_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the disk, in turn, is the last one that is made; at each of them
    the folder's bytes are within the budget."""
    limits = settings()
    made = PoolFolder.create(tmp_path / "made", limits)
    for i in range(2):
        made.add(newcomer(i), likes_all)
    calls = ("fsync", "replace", "unlink")
    real = {name: getattr(os, name) for name in calls}

    def crash_at(path: Path, at: int) -> bool:
        """Adds, ending before call `at`; whether it got that far."""
        count = 0

        def counting(name: str):
            def call(*args, **kwargs):
                nonlocal count
                used = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
                assert used <= limits.config.bytes
                if count == at:
                    raise _Crash
                count += 1
                return real[name](*args, **kwargs)

            return call

        for name in calls:
            monkeypatch.setattr(os, name, counting(name))
        try:
            PoolFolder(path).add(newcomer(2), likes_all)
        except _Crash:
            return True
        finally:
            for name in calls:
                monkeypatch.setattr(os, name, real[name])
        return False

    seen = set()
    for at in range(100):
        path = tmp_path / f"crash-{at}"
        copy_of(made.path, path)
        before = PoolFolder(path).read()
        crashed = crash_at(path, at)
        pool = PoolFolder(path)
        settled, table = pool.read()
        assert pool.verify() == []
        names = sorted(table.names())
        assert names == ["a0", "a1"] and (settled, table) == before or names == ["a0", "a1", "a2"]
        seen.add(len(names))
        if len(names) == 2:
            assert pool.add(newcomer(2), likes_all).what == "merged"
        else:
            pool.add(newcomer(2), likes_all)  # sweeps what was left
        assert len(list((path / "members").iterdir())) == 2
        assert not list(path.rglob("*.part"))
        if not crashed:
            break
    assert seen == {2, 3}
    assert at > 6


def copy_of(source: Path, target: Path) -> None:
    for name, data in state(source).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)


KILLED = """
import sys
from pathlib import Path
from test_pool_folder import likes_all, newcomer
from zen_jax.merge.pool_folder import PoolFolder
pool = PoolFolder(Path(sys.argv[1]))
print("ready", flush=True)
for seed in range(int(sys.argv[2]), 10**6):
    pool.add(newcomer(seed), likes_all)
    print(seed, flush=True)
"""


def test_kill_9_leaves_before_or_after(tmp_path: Path, scale: int) -> None:
    """A process that adds one adapter after another is killed at random moments: 3 times, or 50
    under --soak."""
    pool = PoolFolder.create(tmp_path / "pool", settings(bytes=2**22))
    rng, begun = random.Random(7), 0
    for _ in range(3 if scale == 1 else 50):
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(pool.path), str(begun)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # Not a wait for something: the moment of the kill, anywhere in an addition.
        time.sleep(rng.uniform(0.005, 0.3))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.communicate()[0].split("\n") if line.isdigit()]
        _, table = pool.read()
        names = set(table.names())
        told = {f"a{i}" for i in range(begun)} | {f"a{i}" for i in said}
        assert names - told <= {f"a{len(told)}"}  # at most one more than it had said
        assert told <= names
        assert pool.verify() == []
        assert table.used <= table.config.bytes
        begun = len(names)
    pool.add(newcomer(10**7), likes_all)
    assert len(list((pool.path / "members").iterdir())) == 2
    assert not list(pool.path.rglob("*.part"))


def test_memory_does_not_grow_with_how_many_were_merged(tmp_path: Path) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings(1, 2**22))
    peaks = []
    for i in range(14):
        one = Newcomer(f"a{i}", adapter(i, (300, 400)), TASKS)
        tracemalloc.start()
        pool.add(one, likes_all)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert pool.load(pool.read()[1].find("a0").id).count == 14
    assert max(peaks[9:]) < 1.1 * max(peaks[2:6])


def test_one_process_changes_a_pool_at_a_time(tmp_path: Path) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings())
    with pool._changing(), pytest.raises(ValueError, match="by another process"):
        pool.add(newcomer(0), likes_all)


def test_another_process_is_waited_for(tmp_path: Path) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings())
    with pool._changing(), pytest.raises(PoolBusy):
        pool.add(newcomer(0), likes_all, wait_s=0.05)
    began = threading.Event()

    def change() -> None:
        with pool._changing():
            began.set()
            time.sleep(0.2)  # the addition below has to be waiting by then

    other = threading.Thread(target=change)
    other.start()
    assert began.wait(5)
    assert pool.add(newcomer(0), likes_all, wait_s=5).what == "kept"
    other.join()


def bytes_of(pool: PoolFolder) -> int:
    return sum(file.stat().st_size for file in (pool.path / "members").iterdir())


def test_a_member_that_is_held_stays_and_counts_until_it_is_let_go(tmp_path: Path) -> None:
    """Held by whom does not matter: the lock is the system's. With B one byte short of it, what
    would fit without it does not, and comes in after it."""
    one, task = member_bytes(adapter(0), RANK), len(TASKS)
    room = settings().config.table_bytes
    wide = PoolFolder.create(tmp_path / "wide", settings(2, 2**22))
    for i in range(3):
        replaced = {m.id: m.bytes for m in wide.read()[1].members.values()}
        wide.add(newcomer(i), likes_all)
    after = wide.read()[1]
    (lost,) = (size for id, size in replaced.items() if id not in after.members)
    limit = after.used + lost + one + task - 1
    pool = PoolFolder.create(tmp_path / "pool", settings(2, limit))
    for i in range(2):
        pool.add(newcomer(i), likes_all)
    held = {m.id: OpenMember(pool.member_path(m.id)) for m in pool.read()[1].members.values()}
    merged = pool.add(newcomer(2), likes_all)
    (gone,) = pool.read()[1].leaving
    table = pool.read()[1]
    assert merged.what == "merged" and len(table.members) == 2
    assert table.used == room + bytes_of(pool) + 3 * task
    assert parse_member(held[gone].read(), gone).count == 1
    before = state(pool.path)
    with pytest.raises(PoolRefusal, match="1 bytes are lacking.*their last requests") as caught:
        pool.add(newcomer(3), likes_all)
    assert caught.value.passing
    assert state(pool.path) == before
    pool.sweep(0)
    assert state(pool.path) == before  # it is held still
    held[gone].close()
    pool.sweep(0)
    assert not pool.read()[1].leaving
    assert bytes_of(pool) == sum(m.bytes for m in pool.read()[1].members.values())
    assert pool.add(newcomer(3), likes_all).what == "merged"
    with pytest.raises(FileNotFoundError):
        OpenMember(pool.member_path(gone))
    for id, member in held.items():
        if id != gone:
            member.close()


def test_one_that_is_opened_just_before_it_is_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the new table and the deletion of what it replaces."""
    pool = PoolFolder.create(tmp_path / "pool", settings(1, 2**22))
    old = pool.add(newcomer(0), likes_all).member
    opened: list[OpenMember] = []
    write = PoolFolder._write_table

    def then_open(*given) -> None:
        write(*given)
        opened.append(OpenMember(pool.member_path(old)))

    monkeypatch.setattr(PoolFolder, "_write_table", then_open)
    pool.add(newcomer(1), likes_all)
    assert list(pool.read()[1].leaving) == [old]
    assert opened[0].read()
    opened[0].close()
    pool.sweep(0)
    assert not pool.read()[1].leaving
    assert not pool.member_path(old).exists()


def test_content_that_comes_again_while_it_answers_is_the_same_file(tmp_path: Path) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings(2, 2**22, policy="kmerge"))
    first = pool.add(newcomer(0), likes_all).member
    pool.add(newcomer(1), likes_all)
    held = OpenMember(pool.member_path(first))
    near = {n: Factors(f.a * np.float32(1.001), f.b) for n, f in adapter(0).items()}
    pool.add(Newcomer("near", near, TASKS), likes_all)
    assert list(pool.read()[1].leaving) == [first]
    settled, table = pool.read()
    wide = dataclasses.replace(settled.config, adapters=3)
    pool._write_table(dataclasses.replace(settled, config=wide), table)
    inode = pool.member_path(first).stat().st_ino
    again = pool.add(dataclasses.replace(newcomer(0), name="again"), likes_all)
    assert (again.what, again.member) == ("kept", first)
    assert pool.member_path(first).stat().st_ino == inode
    held.close()
    pool.sweep(0)
    assert pool.verify() == []
    assert pool.read()[1].find("again").id == first


@pytest.mark.parametrize("what", ["table", "member", "cut", "none"])
def test_damage_is_named(tmp_path: Path, what: str) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings())
    member = pool.member_path(pool.add(newcomer(0), likes_all).member)
    table = pool.path / "pool.json"
    if what == "table":
        table.write_text(table.read_text().replace('"gate": 0.9', '"gate": 0.1'))
    elif what == "member":
        data = bytearray(member.read_bytes())
        data[-5] ^= 4
        member.write_bytes(data)
    elif what == "cut":
        table.write_bytes(table.read_bytes()[:-40])
    else:
        table.unlink()
    if what == "member":
        assert len(pool.verify()) == 1
        with pytest.raises(PoolDamaged, match="does not match its checksum"):
            pool.add(newcomer(1), likes_all)
    else:
        with pytest.raises(PoolDamaged):
            pool.add(newcomer(1), likes_all)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings(1))
    with pytest.raises(ValueError, match="tasks cannot be read"):
        pool.add(dataclasses.replace(newcomer(0), tasks=b"[]"), likes_all)
    with pytest.raises(ValueError, match="is not a variant's name"):
        pool.add(dataclasses.replace(newcomer(0), name="../a"), likes_all)
    pool.add(newcomer(0), likes_all)
    other = {"q": Factors(np.ones((1, 5), np.float32), np.ones((3, 1), np.float32))}
    with pytest.raises(ValueError, match="task vectors"):
        pool.add(Newcomer("b", other, TASKS), likes_all)
    with pytest.raises(ValueError, match="not empty"):
        PoolFolder.create(pool.path, settings())
    assert pool.read()[1].names() == ["a0"]


def test_a_table_that_grows_too_large_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolFolder.create(tmp_path / "pool", settings())
    before = state(pool.path)
    monkeypatch.setattr(pool_folder, "_TABLE_BYTES", 600)
    with pytest.raises(PoolRefusal, match="the table of the pool would have"):
        pool.add(newcomer(0), likes_all)
    assert state(pool.path) == before
