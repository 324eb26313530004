"""The command that fine-tunes with merges, and the study's tables."""

import json
from pathlib import Path

import numpy as np
import pytest

from zen_jax.layout import unfuse
from zen_jax.training import residual, smooth, smoothing_report, smoothing_study
from zen_jax.training.batches import Batch
from zen_jax.training.bytes_tokenizer import write_tokenizer
from zen_jax.training.finetune import TrainConfig
from zen_jax.training.smoothing import SmoothingConfig

pytestmark = pytest.mark.usefixtures("compiled")
PAGE = "# Page\n\n<!-- runs -->\n<!-- end -->\n\n<!-- losses -->\nold\n<!-- end -->\n"


def batches(step: int) -> tuple[Batch, ...]:
    tokens = np.random.default_rng((1, step)).integers(0, 9, (2, 17)).astype(np.int32)
    return (Batch(tokens, np.ones((2, 16), np.float32)),)


@pytest.fixture(scope="module")
def subject(tiny, tiny_params, tmp_path_factory) -> smoothing_study.Subject:
    root = tmp_path_factory.mktemp("subject")
    (root / "files").mkdir()
    (root / "files/config.json").write_text(json.dumps(tiny.to_hf()))
    write_tokenizer(root / "files", tiny.max_position)
    tensors = {name: np.asarray(value) for name, value in unfuse(tiny, tiny_params).items()}
    residual.write_folder(root / "base", residual.round_tensors(tensors), root / "files")
    return smoothing_study.Subject(
        "tiny-1",
        root / "base",
        batches,
        TrainConfig(steps=4, learning_rate=1e-3, warmup=1, checkpoint_every=2),
        batches(10**6),
        SmoothingConfig(("none", "mean"), every=2, rank=4),
    )


def test_tuning_writes_raw_and_merged_checkpoints(subject, tmp_path) -> None:
    smooth.tune(subject, SmoothingConfig(("mean",), every=2), tmp_path, progress=False)
    _, raw = residual.read_folder(tmp_path / "raw")
    _, merged = residual.read_folder(tmp_path / "merged")
    assert set(raw) == set(merged)
    curves = json.loads((tmp_path / "smoothing.json").read_text())
    assert [step for step, _ in curves["mean"]["curve"]] == [2, 4]


def test_a_study_is_done_once_and_published(subject, tmp_path) -> None:
    work, docs = tmp_path / "work", tmp_path / "docs"
    work.mkdir()
    docs.mkdir()
    (docs / "smoothing.md").write_text(PAGE)
    assert smoothing_study.so_far([lambda: subject], work) == {}
    found = smoothing_study.run([lambda: subject], work, progress=False)
    before = (work / "tiny-1.json").stat().st_mtime_ns
    assert smoothing_study.run([lambda: subject], work, progress=False) == found
    assert smoothing_study.so_far([lambda: subject], work) == found
    assert (work / "tiny-1.json").stat().st_mtime_ns == before
    smoothing_study.publish(docs, {"tiny": found})
    page = (docs / "smoothing.md").read_text()
    assert "| tiny | 4 | 32 | 2 | 4 | 32 |" in page and "| tiny, 1 | nothing (raw) |" in page
    assert "old" not in page
    assert (docs / "smoothing.png").read_bytes()[:4] == b"\x89PNG"
    # A run under way is told as far as it is.
    (work / "tiny-1.json").unlink()
    partly = smoothing_study.so_far([lambda: subject], work)
    assert partly["tiny-1"]["reached"] == 4
    assert partly["tiny-1"]["curves"] == found["tiny-1"]["curves"]


def test_a_study_of_other_settings_is_refused(subject, tmp_path) -> None:
    (tmp_path / "tiny-1.json").write_text('{"identity": "another"}')
    with pytest.raises(ValueError, match="of a run with other settings; remove it"):
        smoothing_study.run([lambda: subject], tmp_path, progress=False)


def test_roughness_and_rises() -> None:
    straight = [(1, 3.0), (2, 2.0), (3, 1.0)]
    bent = [(1, 3.0), (2, 1.0), (3, 2.0), (4, 1.5)]
    assert smoothing_report.roughness(straight) == 0 and smoothing_report.rises(straight) == 0
    assert smoothing_report.roughness(bent) == pytest.approx((3 + 1.5) / 2)
    assert smoothing_report.rises(bent) == 1
    assert smoothing_report.roughness(straight[:2]) == 0


def test_a_page_without_a_place_is_named(tmp_path) -> None:
    (tmp_path / "smoothing.md").write_text("# Nothing")
    with pytest.raises(ValueError, match="needs one place <!-- runs -->"):
        smoothing_study.publish(tmp_path, {})


def test_what_the_command_cannot_do_is_one_line(
    subject, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(smooth, "family_subject", lambda *given: subject)
    for more, told in (
        ((), "every is 1000, and there are 4 steps"),
        (("--every", "0"), "every is 0"),
        (("--every", "2", "--rank", "0"), "rank is 0"),
    ):
        status = smooth.main(["tune", "x", "--out", str(tmp_path), "--quiet", *more])
        assert status == 2 and told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
