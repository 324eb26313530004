"""`zen bench peers`: what it hands on, prints and writes, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from server import cli
from server.commands import bench_peers
from zen_jax.peers.bench import Plan

FIGURES = {
    "cases": [
        {
            "system": system,
            "phase": phase,
            "context": 512,
            "tokens_per_s": 10.0 * number,
            "over_llama_cpp": ratio,
        }
        for number, (system, phase, ratio) in enumerate(
            [("zen variant", "decode", 0.875), ("llama.cpp", "decode", None)], 1
        )
    ],
    "greedy": [{"system": "llama.cpp", "context": 512, "equal": 30, "of": 33}],
    "skipped": [{"system": "transformers", "why": "not installed in .peers: no wheel"}],
    "products": "bfloat16",
    "threads": 2,
    "rounds": 7,
    "device": "Some CPU, x86_64",
    "versions": {"zen-jax": "0.1.0", "llama-cpp-python": "0.3.36"},
}


def test_figures_are_printed_and_written(
    tiny_store: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    asked = []

    def measure(store: Path, peers: dict, plan: Plan, progress) -> dict:
        progress("loading", 0, 1)
        asked.append((store, peers, plan))
        return FIGURES

    monkeypatch.setattr(bench_peers, "bench_peers", measure)
    file = tmp_path / "peers.json"
    options = ("--context", "64", "--steps", "3", "--rounds", "2", "--threads", "1")
    command = ["bench", "peers", "--store", str(tiny_store), "--peers", str(tmp_path), *options]
    assert cli.run([*command, "--products", "float32", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == FIGURES
    [(store, peers, plan)] = asked
    assert store == tiny_store
    assert plan == Plan(long=64, steps=3, rounds=2, threads=1, products="float32")
    assert peers.keys() == {"llama.cpp", "transformers"}
    assert all(str(tmp_path) in why for why in peers.values())
    out = capsys.readouterr().out
    assert re.search(r"decode +512 +zen variant +10\.0 +0\.88 *\n", out)
    assert re.search(r"decode +512 +llama\.cpp +20\.0 *\n", out)
    assert "After 512 tokens llama.cpp chooses 30 of 33 tokens as our base does" in out
    assert "Skipped: transformers: not installed in .peers: no wheel" in out
    assert "2 threads each" in out and "llama-cpp-python 0.3.36" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--store", "{missing}"), "there is no store {missing}; `make models`"),
        (("--store", "{peers}"), "is not a store"),
        (("--store", "{store}", "--threads", "100000"), "threads is 100000"),
        (
            ("--store", "{store}", "--products", "int8"),
            "'int8' is not one of 'float32', 'bfloat16'",
        ),
        (("--store", "{store}", "--json", "{missing}/f"), "No such file"),
        (("--rounds", "0"), "greater than or equal to 1"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    tiny_store: Path, tmp_path: Path, capsys, options, message
) -> None:
    places = {"missing": tmp_path / "missing", "peers": tmp_path, "store": tiny_store}
    status = cli.run(["bench", "peers", *(option.format(**places) for option in options)])
    err = capsys.readouterr().err
    assert (status, err.count("\n")) == (2, 1)
    assert message.format(**places) in err


def test_help_has_an_example(capsys) -> None:
    assert cli.run(["bench", "peers", "--help"]) == 0
    assert "Example: zen bench peers --json peers.json" in re.sub(
        r"\s+", " ", capsys.readouterr().out
    )
