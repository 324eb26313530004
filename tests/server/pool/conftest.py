"""Adapters of the tiny base, `zen pool`, and waiting for what a thread does."""

import json
import time
from collections.abc import Callable
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


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits for what a thread does of its own accord, 10 s at most."""

    def wait(holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < until
            time.sleep(0.01)  # what is waited for tells nobody: it has to be looked at

    return wait
