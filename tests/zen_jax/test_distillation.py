"""`zen distill`: a variant of a store becomes a better version of itself, or stays."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from server.cli import run
from zen_jax import distillation
from zen_jax.checkpoint.store import Store
from zen_jax.distillation import Distilling, distill

SMALL = Distilling(samples=24, length=32, rows=4, steps=6)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = np.random.default_rng(4).choice(["table", "river", "the", "a", "Ü\n", "of"], 400)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def store(tiny_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_store, tmp_path / "store"))


def test_a_better_version_is_published(
    store: Path, tiny_folders: dict[str, Path], text: Path
) -> None:
    heard: list[tuple[str, int, int]] = []
    tuned = tiny_folders["tiny-a"]
    done = distill(tuned, store, "tiny-a", [text], SMALL, lambda *what: heard.append(what))
    assert (done.began, done.version) == (1, 2)
    assert done.after < done.fitted < done.before
    assert {what for what, _, _ in heard} == {"layers", "logits"}
    found = Store(store)
    assert not found.verify()
    old, new = (found.manifest(found.variant("tiny-a", v)) for v in (1, 2))
    assert new.made["distilled"]["kl_before"] == done.before
    assert new.made["distilled"]["kl_after"] == done.after
    assert new.bytes_on_disk == done.bytes
    for name, entry in new.tensors.items():
        before = old.tensors[name]
        assert (entry.policy, entry.shape, entry.levels) == (
            before.policy,
            before.shape,
            before.levels,
        )
        assert {k: (p.shape, p.dtype) for k, p in entry.parts.items()} == {
            k: (p.shape, p.dtype) for k, p in before.parts.items()
        }
        changed = {k for k, p in entry.parts.items() if p.sha256 != before.parts[k].sha256}
        assert changed <= {"bits", "scale"}
        assert bool(changed) == (entry.policy == "bit")
    # What is published is what was measured: begun with again, its KL is the first one's last.
    again = distill(tuned, store, "tiny-a", [text], SMALL)
    assert again.before == pytest.approx(done.after, rel=1e-4)


def test_what_is_not_better_is_not_published(
    store: Path, tiny_folders: dict[str, Path], text: Path
) -> None:
    ruin = Distilling("none", "logits", 24, 32, rate=0.9, cosine=False, steps=2)
    done = distill(tiny_folders["tiny-b"], store, "tiny-b", [text], ruin)
    assert done.version is None and done.after == done.before
    assert Store(store).versions("tiny-b") == [1]
    assert not Store(store).verify()


def test_what_was_interrupted_is_gone_on_with(
    store: Path, tiny_folders: dict[str, Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = distill(tiny_folders["tiny-c"], store, "tiny-c", [text], SMALL)
    shutil.rmtree(store / "variants" / "tiny-c" / "2")
    walks, kept = [], distillation.distill_logits

    def killed(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(distillation, "distill_logits", killed)
    with pytest.raises(KeyboardInterrupt):
        distill(tiny_folders["tiny-c"], store, "tiny-c", [text], SMALL)
    monkeypatch.setattr(distillation, "distill_logits", kept)
    again = distill(
        tiny_folders["tiny-c"],
        store,
        "tiny-c",
        [text],
        SMALL,
        lambda what, done, total: walks.append(done) if what == "layers" else None,
    )
    assert walks == [1]  # the one layer was done
    assert (again.version, again.after, again.curve) == (2, whole.after, whole.curve)


def test_the_command(
    store: Path,
    tiny_folders: dict[str, Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot, tuned = tmp_path / "curve.png", str(tiny_folders["tiny-a"])
    given = ["distill", tuned, str(store), "tiny-a", "--text", str(text), "--train", "layers"]
    given += ["--samples", "24", "--length", "32", "--steps", "4", "--plot", str(plot), "--json"]
    assert run(given) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["version"] == 2 and figures["after"] < figures["before"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--samples", "8", "--length", "4000"], "expected at least 32001"),
        (["--fit", "none", "--train", "none"], "nothing to do"),
        (["--rate", "nan"], "rate is nan"),
        (["--text", "absent.txt"], "absent.txt"),
    ],
)
def test_what_will_not_do_is_one_line(
    change: list[str],
    said: str,
    store: Path,
    tiny_folders: dict[str, Path],
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["distill", str(tiny_folders["tiny-a"]), str(store), "tiny-a", "--text", str(text)]
    assert run([*given, *change]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert run(["distill", str(tiny_folders["tiny-a"]), str(store), "nobody", *given[4:]]) == 2
    assert "nobody" in capsys.readouterr().err
