"""`zen merge`: what it prints and writes, and one line and status 2 for whatever it cannot do."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from server import cli
from zen_jax.checkpoint.hf import open_folder
from zen_jax.checkpoint.store import Store

WAYS = [("mean",), ("monosoup",), ("truncated-soup", "--rank", 4), ("opcm",)]


@pytest.fixture
def zen(capsys: pytest.CaptureFixture[str]):
    """Runs `zen merge`: (status, stdout, what it says on stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.run(["merge", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_help_has_an_example(zen, way) -> None:
    status, out, _ = zen(way[0], "--help")
    assert status == 0
    assert f"Example: zen merge {way[0]}" in re.sub(r"\s+", " ", out)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_each_way_writes_a_checkpoint_and_its_report(zen, tiny_folders, tmp_path, way) -> None:
    models = ["--model", tiny_folders["tiny-a"]]
    if way[0] != "monosoup":
        models += ["--model", tiny_folders["tiny-b"]]
    out = tmp_path / "out"
    status, text, err = zen(*way, "--base", tiny_folders["base"], *models, "--out", out)
    assert status == 0, err
    assert "q_proj 32x32" in text and "merge.json and merge.png" in text
    open_folder(out)
    assert json.loads((out / "merge.json").read_text())["method"] == way[0]
    assert (out / "merge.png").read_bytes()[:4] == b"\x89PNG"
    status, text, _ = zen(*way, "--base", tiny_folders["base"], *models, "--out", out, "--json")
    assert status == 0 and json.loads(text)["method"] == way[0]


def test_options_reach_the_methods(zen, tiny_folders, tmp_path) -> None:
    base = ("--base", tiny_folders["base"], "--model", tiny_folders["tiny-a"])
    two = (*base, "--model", tiny_folders["tiny-b"])
    for arguments, options in (
        (
            ("monosoup", *base, "--rank", "energy", "--energy", 0.5),
            {"rank": "energy", "energy": 0.5},
        ),
        (
            ("opcm", *two, "--alpha", 0.3, "--split", "doc", "--outside", "drop"),
            {"alpha": 0.3, "split": "doc", "outside": "drop"},
        ),
        (("truncated-soup", *two, "--rank", 5), {"rank": 5}),
    ):
        out = tmp_path / str(arguments[0])
        status, text, err = zen(*arguments, "--out", out, "--json", "--dtype", "F16")
        assert status == 0, err
        report = json.loads(text)
        assert report["options"] == options
        assert {tensor["dtype"] for tensor in report["tensors"].values()} == {"F16"}


def test_a_variant_of_a_store_is_merged_and_published(zen, tiny_store, tiny_folders, tmp_path):
    store = Path(shutil.copytree(tiny_store, tmp_path / "store"))
    command = ("mean", "--base", store, "--model", f"{store}:tiny-a", "--model", f"{store}:tiny-b")
    status, text, err = zen(*command, "--out", tmp_path / "out", "--publish", store, "both")
    assert status == 0, err
    assert "published as both version 1" in text
    assert Store(store).verify() == []
    status, text, err = zen(*command, "--out", tmp_path / "new", "--format", "store")
    assert status == 0, err
    assert Store(tmp_path / "new").verify() == []
    assert (tmp_path / "new.merge.png").is_file()


def test_what_cannot_be_done_is_one_line(zen, tiny_folders, tmp_path) -> None:
    base, one = tiny_folders["base"], tiny_folders["tiny-a"]
    (tmp_path / "empty").mkdir()
    lacking = Path(shutil.copytree(one, tmp_path / "lacking"))
    tensors = load_file(lacking / "model.safetensors")
    gone = tensors.pop("model.norm.weight")
    save_file(tensors, lacking / "model.safetensors")
    broken = Path(shutil.copytree(one, tmp_path / "broken"))
    save_file(tensors | {"model.norm.weight": gone * np.nan}, broken / "model.safetensors")
    short = Path(shutil.copytree(one, tmp_path / "short"))
    data = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(data[:-7])
    out = tmp_path / "out"
    cases = [
        (("mean", "--base", base, "--model", lacking, "--out", out), "lacks model.norm.weight"),
        (("mean", "--base", base, "--model", broken, "--out", out), "NaN or infinite"),
        (("mean", "--base", base, "--model", short, "--out", out), "cut short"),
        (("mean", "--base", base, "--model", one, "--model", one, "--out", out), "given twice"),
        (("monosoup", "--base", base, "--model", one, "--model", base, "--out", out), "one checkp"),
        (("mean", "--base", base, "--model", tmp_path / "empty", "--out", out), "config.json"),
        (("mean", "--base", tmp_path / "no", "--model", one, "--out", out), "does not exist"),
        (("truncated-soup", "--base", base, "--model", one, "--out", out), "--rank"),
        (("truncated-soup", "--base", base, "--model", one, "--out", out, "--rank", 0), "rank"),
        (("opcm", "--base", base, "--model", one, "--out", out, "--alpha", 1), "alpha is 1.0"),
        (("mean", "--base", base, "--model", one, "--out", lacking), "exists and is not"),
        (("mean", "--base", base, "--model", one, "--out", out, "--devices", 99), "devices is 99"),
    ]
    for arguments, told in cases:
        status, text, err = zen(*arguments)
        lines = [line for line in err.splitlines() if line.startswith("zen: ")]
        assert (status, text, len(lines)) == (2, "", 1), (arguments, err)
        assert told in lines[0], lines[0]
        assert not out.exists()
