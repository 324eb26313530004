"""`zen plan` as it is typed."""

import json
from pathlib import Path

import pytest

from server import cli

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests/golden/qwen2_bias"


def test_figures_a_picture_and_words(tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert cli.run(["plan", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert {"weights", "bank", "kv", "temp", "peak"} <= set(figures["per_device"])
    assert {"total_bytes", "collectives", "ttft_ms", "tpot_ms", "compile_s"} <= set(figures)
    assert figures["per_device"]["weights"] == 17_640_734_720
    assert "predictions" in figures["assumptions"][0]
    picture = out.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    said = capsys.readouterr().out
    kept = json.loads((ROOT / "docs/plan.json").read_text())
    assert figures == kept, "run zen plan --json docs/plan.json, and look at docs/claims.md"
    assert "It fits." in said and f"{figures['per_device']['peak']:,}" in said


def test_what_does_not_fit_says_what_would(capsys) -> None:
    assert cli.run(["plan", "--chips", "4xH100", "--variants", "30"]) == 1
    said = capsys.readouterr().out
    assert "It does not fit" in said and "variants would fit" in said
    assert cli.run(["plan", "--chips", "H100", "--variants", "0"]) == 1
    assert "not even the base fits" in capsys.readouterr().out


def test_more_cards_than_a_node_has_are_said_to_be_one(capsys) -> None:
    cli.run(["plan", "--chips", "16xH100"])
    said = capsys.readouterr().out
    assert "16 cards are taken to be one node" in said
    assert "lies on every card: heads, kv_heads" in said


@pytest.mark.parametrize("given", [CONFIG, CONFIG / "config.json"])
def test_a_model_of_ones_own(given: Path, capsys) -> None:
    own = ["--context", "32", "--prompt", "16", "--rows", "2", "--chips", "2xL40S"]
    assert cli.run(["plan", "--model", str(given), *own, "--base-dtype", "int8"]) == 0
    said = capsys.readouterr().out
    assert "no kernel here is made for L40S" in said and "arithmetic only" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-9"], "llama-3.1-70b"),
        (["--chips", "8xTPU"], "--chips is '8xTPU'"),
        (["--context", "200000"], "131072 positions"),
        (["--prompt", "9000"], "the prompt is 9000 tokens"),
        (["--variants", "-1"], "variants"),
        (["--variants", "1" + "0" * 20], "--variants is 1000"),
        (["--rows", "1000000000"], "--rows is 1000000000; expected 1 to 65,536"),
        (["--json", "/nowhere/plan.json"], "/nowhere/plan.json"),
        (["--json", "/"], "s a directory"),
        (["--json", "plan.png"], "the name of its picture"),
        (["--pool", "8", "--chips", "8xFOO"], "--chips says nothing beside --pool"),
        (["--pool", "8", "--memory", "nan"], "--memory is nan"),
        (["--pool", "8", "--memory", "1e300"], "--memory is 1e+300"),
        (["--pool", "8", "--rank", "100000000"], "--rank 100000000"),
        (["--pool", "8", "--context", "1000000"], "131072 positions"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys) -> None:
    assert cli.run(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"model_type": "llama"}', "\x00\xff"])
def test_a_file_that_is_no_configuration(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    assert cli.run(["plan", "--model", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_pool_on_a_small_device(tmp_path: Path, capsys) -> None:
    """All parts add up; 16 GB hold an 8B base and 8 profiles in 8 bits, and not in 16."""
    out = tmp_path / "pool.json"
    small = ["--model", str(CONFIG), "--context", "32", "--memory", "0.001", "--json", str(out)]
    assert cli.run(["plan", "--pool", "1", "--rank", "2", *small]) == 0
    figures = json.loads(out.read_text())
    parts = figures["base"] + figures["kv"] + figures["pool"] + figures["left"]
    assert parts == figures["memory"] == 1_000_000
    most = figures["most_members"]
    assert cli.run(["plan", "--pool", str(most), "--rank", "2", *small]) == 0
    assert cli.run(["plan", "--pool", str(most + 1), "--rank", "2", *small]) == 1
    assert "It does not fit" in capsys.readouterr().out
    eight = ["--model", "llama-3.1-8b", "--pool", "8"]
    assert cli.run(["plan", *eight]) == 1
    assert cli.run(["plan", *eight, "--base-dtype", "int8"]) == 0
    assert cli.run(["plan", "--pool", "0"]) == 2
    assert "--pool is 0" in capsys.readouterr().err
