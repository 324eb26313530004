"""The Hopper kernels as they are compiled for an H100: at the models' shapes, and bad ones caught.

The compiler's plugin is in the environment .aot, so that is where it runs; see `make setup`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".aot/bin/python"
pytestmark = pytest.mark.timeout(900)


def run(*arguments: str | Path) -> str:
    """Runs Python in .aot; returns what it printed."""
    if not PYTHON.exists():
        pytest.fail("there is no .aot, which compiles for an H100: run make setup")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every weight's kernels of most rows, and one weight's others."""
    out = tmp_path_factory.mktemp("aot") / "kernels.json"
    run("-m", "pallas_kernels.aot.table", out)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    """What `compiled_cases` found."""
    return json.loads(run(Path(__file__).with_name("compiled_cases.py")))


def test_every_kernel_is_as_planned(table: list[dict[str, Any]]) -> None:
    """wgmma and TMA, nothing spilled, room for the program, integer operations within limits."""
    wrong = {
        (row["model"], row["weight"], row["form"]): row["complaints"]
        for row in table
        if row["complaints"]
    }
    assert not wrong
    assert len({(row["outputs"], row["inputs"]) for row in table}) == 13
    assert {row["form"] for row in table} == {
        "one variant",
        "mixed",
        "prefill",
        "prefill, two products",
    }


def test_signs_cost_about_half_an_operation(table: list[dict[str, Any]]) -> None:
    """Where a chunk has several turns of the loop; where it has one, its sums are in the loop."""
    mixed = [row["per_weight"] for row in table if row["form"] == "mixed"]
    assert max(mixed) <= 1.0 and sorted(mixed)[len(mixed) // 2] <= 0.6
    assert max(row["per_weight"] for row in table if row["form"] == "prefill") <= 1.25


def test_predictions_of_a_layer(table: list[dict[str, Any]]) -> None:
    """14 variants at least 5 times as fast as one by one; the others within 15 % of the base."""
    for model in {row["model"] for row in table}:
        for form, enough in (("mixed", 5 / 14), ("prefill", 1 / 1.15)):
            of = [r for r in table if (r["model"], r["form"]) == (model, form)]
            of = [r for r in of if r["weight"] != "head"]
            time, base = (sum(r[e]["time"]["H100"] for r in of) for e in ("estimate", "base"))
            assert base / time >= enough, (model, form, time, base)
    (one,) = (row for row in table if row["form"] == "one variant")
    assert one["estimate"]["time"]["H100"] <= 1.15 * one["base"]["time"]["H100"]


def test_the_page_is_of_these_kernels(table: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs/kernels.md").read_text().splitlines()
    stale = [row["line"] for row in table if row["line"] not in page]
    assert not stale, "run make kernels"


def test_a_slow_unpacking_is_caught(cases: dict[str, Any]) -> None:
    (complaint,) = cases["slow"]
    assert "integer instructions for a weight, at most 1.0" in complaint


def test_spilled_registers_are_caught(cases: dict[str, Any]) -> None:
    found = " ".join(cases["spilling"])
    assert "LDL" in found and "STL" in found and "bytes of registers are spilled" in found


@pytest.mark.parametrize("of, reduces", [("outputs", False), ("inputs", True)])
def test_nothing_is_gathered(of: str, reduces: bool, cases: dict[str, Any]) -> None:
    """Over eight cards a card holds its eighth, and only sums are exchanged."""
    made = cases["sharded"][of]
    assert made["gathers"] == 0 and bool(made["reduces"]) == reduces
    outputs, inputs = (57344, 8192) if of == "outputs" else (8192, 28672)
    eighth = outputs * inputs // 8 * (2 + 4 / 8)
    assert made["argument_bytes"] < 1.01 * eighth
    assert made["temporary_bytes"] < 0.02 * eighth


def test_an_embedding_is_not_unpacked_whole(cases: dict[str, Any]) -> None:
    assert cases["embedding"]["temporary_bytes"] < 1 << 20


@pytest.mark.parametrize("of", ["auto", "xla"])
def test_attention_to_pages_holds_what_it_gathers(of: str, cases: dict[str, Any]) -> None:
    """And no whole cache beside it, in float32 or as it lies."""
    made = cases["paged"][of]
    assert made["temporary_bytes"] < 2.2 * made["gathered_bytes"], made
