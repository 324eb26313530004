"""`zen pool`: a pool is made, filled, listed, simulated; bad input is one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from server import cli
from zen_jax.checkpoint.peft import write_adapter

TASKS = {"metric": "text", "examples": [[1, 5, 9, 7, 3], [1, 8, 8, 2, 4]]}


@pytest.fixture(scope="module")
def adapters(tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of the tiny base: b is almost a, c is another."""
    root = tmp_path_factory.mktemp("adapters")
    shapes = {n: t.shape for n, t in load_file(tiny_folders["base"] / "model.safetensors").items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, size = shapes[name]
    rng = np.random.default_rng(0)
    first = rng.normal(0, 0.05, (2, size)), rng.normal(0, 0.05, (rows, 2))
    other = rng.normal(0, 0.05, (2, size)), rng.normal(0, 0.05, (rows, 2))
    nearly = first[0] + rng.normal(0, 0.001, (2, size)), first[1]
    for key, (a, b) in {"a": first, "b": nearly, "c": other}.items():
        pair = a.astype(np.float32), b.astype(np.float32)
        more = {"tasks.json": json.dumps(TASKS).encode()}
        write_adapter(root / key, {name: pair}, rank=2, alpha=2.0, more=more)
    return root


@pytest.fixture
def zen(capsys: pytest.CaptureFixture[str]):
    """Runs `zen pool`: (status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.run(["pool", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_pool_from_first_to_last(zen, adapters, tiny_store, tmp_path):
    pool, store = tmp_path / "pool", ("--store", tiny_store)
    options = ("--budget-bytes", "1MiB", "--adapters", 2, "--policy", "kmerge++")
    status, out, _ = zen("add", pool, adapters / "a", *store, *options, "--threshold", 0.5)
    assert status == 0
    assert out.startswith("a is kept as ")
    status, out, _ = zen("add", pool, adapters / "b", *store, "--json")
    change = json.loads(out)
    assert (change["what"], change["together"]) == ("merged", ["a"])
    assert change["similarity"] > 0.99
    assert zen("add", pool, adapters / "c", *store, "--name", "see")[1].startswith("see is kept")
    listed = json.loads(zen("ls", pool, "--json")[1])
    assert [member["answers for"] for member in listed["members"]] == [["a", "b"], ["see"]]
    assert listed["limits"]["policy"] == "kmerge++"
    assert "2 of 2 members" in zen("ls", pool)[1]
    shown = json.loads(zen("show", pool, "b", "--json")[1])
    assert shown["together with"] == ["a"]
    assert "together with: nobody" in zen("show", pool, "see")[1]
    assert "b is there already" in zen("add", pool, adapters / "b", *store)[1]
    for wrong, said in (
        (("add", pool, adapters / "a", *store, "--adapters", 3), "leave out --adapters"),
        (("add", tmp_path / "new", adapters / "a", *store), "give --budget-bytes"),
        (("add", pool, tmp_path, *store), "has no adapter_config.json"),
        (("show", pool, "nobody"), "answers for 'nobody'"),
        (("ls", tmp_path / "no"), "is no pool"),
    ):
        status, _, err = zen(*wrong)
        assert (status, err.count("\n")) == (2, 1)
        assert said in err


def test_a_simulation(zen, adapters, tiny_store):
    options = ("--store", tiny_store, "--adapters", 2, "--policy", "kmerge", "--order", 1)
    status, out, _ = zen("simulate", adapters, *options, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["coverage"]["answered"] == 3
    assert len(found["members"]) == 2
    assert "3 of 3 are answered by 2 members" in zen("simulate", adapters, *options)[1]
