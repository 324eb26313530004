"""The bench of peers: who is asked when, what the figures are, and who is skipped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zen_jax.checkpoint.gguf import open_gguf
from zen_jax.checkpoint.hf import open_folder
from zen_jax.checkpoint.store import Store
from zen_jax.peers import bench, worker
from zen_jax.peers.bench import Peer, Plan, bench_peers, peers_in
from zen_jax.peers.process import WorkerFailed
from zen_jax.peers.weights import gguf_file, hugging_face_folder

PLAN = Plan(short=3, long=24, steps=2, rounds=3, threads=1, products="float32")


@pytest.fixture(scope="module")
def measured(demo_store: Path, fake_peer, tmp_path_factory) -> tuple[dict[str, Any], list[str]]:
    """Figures with a peer that answers, one that ends in the third round, one that is not there,
    and one whose weights cannot be written; and what the first two were asked."""
    log = tmp_path_factory.mktemp("log") / "log"

    def no_weights() -> Path:
        raise ValueError("no place for them")

    peers: dict[str, Peer | str] = {
        "llama.cpp": Peer(fake_peer("one", log, [1, 2, 3]), lambda: demo_store),
        "transformers": Peer(
            fake_peer("two", log, [1, 2, 3], "raise SystemExit('out of memory')", 4),
            lambda: demo_store,
        ),
        "third": "not installed",
        "fourth": Peer(["/no/such"], no_weights),
    }
    return bench_peers(demo_store, peers, PLAN), log.read_text().splitlines()


def test_each_case_has_its_speed_and_its_ratio(measured) -> None:
    cases = {(c["system"], c["phase"], c["context"]): c for c in measured[0]["cases"]}
    phases = [("prefill", 24), ("decode", 3), ("decode", 24)]
    systems = ("zen base", "zen variant", "llama.cpp")
    assert [*cases] == [(system, *phase) for phase in phases for system in systems]
    # The first request loads, the next two are not counted; then short and long take turns.
    peer = {"prefill": 24 / 6.5, "decode 3": 2 / 5.25, "decode 24": 2 / 6.25}
    for (_, phase, context), case in cases.items():
        name = phase if phase == "prefill" else f"{phase} {context}"
        assert case["tokens_per_s"] > 0
        assert case["over_llama_cpp"] == pytest.approx(case["tokens_per_s"] / peer[name])
    assert cases["llama.cpp", "decode", 24]["over_llama_cpp"] == 1.0
    figures = measured[0]
    assert (figures["threads"], figures["rounds"], figures["products"]) == (1, 3, "float32")
    assert set(figures["versions"]) == {"zen-jax", "jax", "one", "two"}
    assert figures["device"]


def test_systems_are_asked_in_turn(measured) -> None:
    """Both contexts of one system, then another system."""
    asked = [line.split() for line in measured[1]]
    assert asked[:2] == [["one", "load", "0"], ["two", "load", "0"]]
    order = [name for name, _, length in asked[2:] if length == "24"]
    assert [length for _, do, length in asked[2:6] if do == "run"] == ["3", "24", "3", "24"]
    assert order == ["one", "two", "one", "two", "one", "one"]
    assert len(asked) == 2 + 2 * len(order) + 1  # and the request at which the second peer ended


def test_who_fails_is_skipped_and_named(measured) -> None:
    skipped = {row["system"]: row["why"] for row in measured[0]["skipped"]}
    assert skipped.keys() == {"third", "fourth", "transformers"}
    assert skipped["third"] == "not installed" and skipped["fourth"] == "no place for them"
    assert skipped["transformers"] == (
        "transformers ended with status 1; the last it said: out of memory"
    )


def test_equal_tokens_are_counted(demo_store: Path, fake_peer, tmp_path: Path, measured) -> None:
    assert [(row["system"], row["context"], row["of"]) for row in measured[0]["greedy"]] == [
        ("llama.cpp", 3, 3),
        ("llama.cpp", 24, 3),
    ]
    assert [row["equal"] for row in measured[0]["greedy"]] == [0, 0]
    assert bench._equal([1, 2, 3], [1, 2, 3]) == 3
    assert bench._equal([1, 2, 3], [1, 4, 3]) == 1


def test_a_peer_that_chooses_too_few_tokens_is_skipped(
    demo_store: Path, fake_peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here ours is a stand-in too: without llama.cpp there is no ratio."""
    ours = fake_peer("ours", tmp_path / "log", [5, 6, 7])
    monkeypatch.setattr(bench.sys, "executable", ours[0])
    monkeypatch.setattr(bench, "_OURS", ours[1:])
    few = fake_peer("few", tmp_path / "log", [], runs=9)
    same = fake_peer("same", tmp_path / "log", [5, 6, 7])
    peers: dict[str, Peer | str] = {
        "few": Peer(few, lambda: demo_store),
        "same": Peer(same, lambda: demo_store),
    }
    figures = bench_peers(demo_store, peers, PLAN)
    assert figures["skipped"] == [{"system": "few", "why": "few chose 0 tokens, not 3"}]
    assert {case["over_llama_cpp"] for case in figures["cases"]} == {None}
    assert [row["equal"] for row in figures["greedy"]] == [3, 3]
    # Each round begins with another system: ours is asked for the base and for the variant.
    asked = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    order = [name for name, do, length in asked if (do, length) == ("run", "24")]
    assert order == [
        *("ours", "ours", "same"),
        *("ours", "same", "ours"),
        *("same", "ours", "ours"),
        *("ours", "ours", "same"),
    ]


def test_ours_must_not_fail(demo_store: Path, fake_peer, tmp_path: Path, monkeypatch) -> None:
    ours = fake_peer("ours", tmp_path / "log", [5, 6, 7], "raise SystemExit('broken')", 1)
    monkeypatch.setattr(bench, "_OURS", ours[1:])
    with pytest.raises(WorkerFailed, match="zen base ended with status 1.*broken"):
        bench_peers(demo_store, {}, PLAN)


def test_peers_are_those_that_are_installed(demo_store: Path, tmp_path: Path) -> None:
    store = Store(demo_store)
    (tmp_path / "llama-cpp").mkdir()
    (tmp_path / "llama-cpp" / ".stamp").touch()
    found = peers_in(tmp_path, store)
    peer = found["llama.cpp"]
    assert isinstance(peer, Peer)
    assert peer.command == [
        str(tmp_path / "llama-cpp" / "bin" / "python"),
        *("-P", worker.__file__, "llama.cpp"),
    ]
    assert peer.path().parent.name == f"weights-{store.base().digest[:16]}"
    assert found["transformers"] == (
        f"not installed in {tmp_path / 'transformers'}: `make peers` installs it"
    )
    (tmp_path / "transformers.why").write_text("no compiler\n")
    assert str(peers_in(tmp_path, store)["transformers"]).endswith("transformers: no compiler")


def test_all_run_the_same_weights(demo_store: Path, tmp_path: Path) -> None:
    store = Store(demo_store)
    stored = dict(store.base_tensors())
    file, folder = gguf_file(store, tmp_path), hugging_face_folder(store, tmp_path)
    for source in (open_gguf(file), open_folder(folder)):
        assert source.config == store.base().config
        assert source.tensors.keys() == stored.keys()
        for name, values in stored.items():
            assert np.array_equal(
                source.read(name).astype(np.float32), values.astype(np.float32)
            ), name
    written = file.stat().st_mtime_ns, (folder / "model.safetensors").stat().st_mtime_ns
    gguf_file(store, tmp_path), hugging_face_folder(store, tmp_path)
    assert written == (file.stat().st_mtime_ns, (folder / "model.safetensors").stat().st_mtime_ns)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short": 0}, "expected 1 or more"),
        ({"steps": 0}, "expected 1 or more"),
        ({"rounds": 0}, "expected 1 or more"),
        ({"short": 9, "long": 9}, "long above short"),
        ({"threads": 0}, "threads is 0; expected 1 to"),
        ({"threads": 10**6}, "threads is 1000000; expected 1 to"),
        ({"products": "int8"}, "products is 'int8'; expected 'float32' or 'bfloat16'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**settings)
    assert Plan(short=3, long=24, steps=103).length == 128 and Plan().length == 640
