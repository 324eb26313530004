"""The demonstration, on a family of random weights that knows nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server import cli, demo
from zen_jax.training.residual import encode, read_folder, save_residual, write_full

VARIANTS = ("tiny-a", "tiny-b")


@pytest.fixture(scope="module")
def family(tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-a as a residual and a full folder, tiny-b as a residual; tiny-b's score is of texts."""
    folder = tmp_path_factory.mktemp("family")
    (folder / "base").symlink_to(tiny_folders["base"])
    _, base = read_folder(folder / "base")
    for name in VARIANTS:
        _, tuned = read_folder(tiny_folders[name])
        path = folder / "residuals" / f"{name}.safetensors"
        save_residual(path, folder / "base", encode(base, tuned), {})
    write_full(folder, folder / "full", ["tiny-a"])
    scored = {"title": "nothing", "base": 0.25, "full": 0.75, "one_bit_per_row": 0.5}
    probes = [{"prompt": f"{i}\n", "answer": "never"} for i in range(5)]
    variants = {
        "tiny-a": scored | {"metric": "exact match", "prompt": "a\n", "probes": probes},
        "tiny-b": scored | {"metric": "bits per byte", "prompt": "b"},
    }
    (folder / "scores.json").write_text(json.dumps({"variants": variants}))
    return folder


@pytest.mark.usefixtures("compiled")
def test_all_of_it_as_figures(family, tmp_path, capsys):
    keep = tmp_path / "kept"
    arguments = ["demo", "--family", family, "--keep", keep, "--probes", 3, "--json"]
    status = cli.run([str(argument) for argument in arguments])
    shown = json.loads(capsys.readouterr().out)
    assert status == 0
    a, b = shown["variants"]
    assert (a["variant"], a["base"], a["full"], a["delta"]) == ("tiny-a", 0.25, 0.75, 0)
    assert (a["delta_measured_on"], b["delta_measured_on"], b["delta"]) == (3, None, 0.5)
    assert a["continuation"] != a["base_continuation"]
    assert a["ttft_ms"] > 0
    assert list(shown["same"]) == ["base", "tiny-a", "tiny-b"]
    resident = shown["bytes_resident"]
    assert resident["count"] == 2
    assert resident["ratio"] == pytest.approx(
        (resident["base"] + resident["variants"]) / resident["copies"]
    )
    assert cli.run(["verify", str(keep)]) == 0
    out = capsys.readouterr().out
    assert "variants: 2" in out


def test_left_running_until_a_signal(family, compiled):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "demo", "--family", str(family), "--serve"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stderr.readline()
    serving = re.match(r"serving on (\S+);", line)
    assert serving, line + process.stderr.read()
    assert cli.run(["client", "tiny-a", "Hi", "--address", serving[1], "--max-tokens", "2"]) == 0
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert "Serving base + 2 variants on" in out
    assert re.search(r"tiny-a +'a\\n' +['\"].* +0.25 +0.75 +0.00 +\d+ +\d+", out)
    assert re.search(r"tiny-b +'b' +['\"].* +0.25 b/B +0.75 b/B +0.50 b/B\* +\d+ +\d+", out)
    assert re.search(r"the ratio is 0\.\d{4}", out)
    assert f"zen client --list --address {serving[1]}" in out
    assert "from server.client import ZenClient" in out


@pytest.mark.parametrize(
    "scores", ["", "{}", "[]", '{"variants": {"x": {}}}', '{"variants": {"x": 3}}', None]
)
def test_a_family_that_is_none(tmp_path, capsys, scores):
    if scores is not None:
        (tmp_path / "scores.json").write_text(scores)
    assert cli.run(["demo", "--family", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_an_answer_counts_when_it_is_exact_and_ends():
    def answer(text: str, ended: bool = True) -> demo.Answer:
        return demo.Answer("m", text, ended, 0.1, 10.0)

    probes = [demo.Probe("a\n", "A")] * 4
    answers = [answer("A"), answer("A", ended=False), answer("AA"), answer("")]
    assert demo._count_right(answers, probes) == 1
