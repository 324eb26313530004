"""The check for a card, as far as it goes without one."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

SCRIPT = Path(__file__).resolve().parents[2] / "tools/gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_card_it_is_skipped() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("skipped")


def test_without_jax_it_is_skipped() -> None:
    done = subprocess.run(
        [sys.executable, "-S", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("skipped")


@pytest.mark.soak
def test_every_form_is_checked(gpu_check: ModuleType) -> None:
    """In the interpreter, at a size that it can do."""
    found = gpu_check.numbers(64, 128, 1, interpret=plgpu.InterpretGPUParams(), prompt=90)
    assert [row["form"] for row in found] == [
        "one variant, 8 rows",
        "one variant, 64 rows",
        "mixed, 16 rows",
        "mixed, 64 rows",
        "prefill, two products",
        "prefill, reconstructed",
        "segments",
    ]
    assert all(row["good"] for row in found), found


def test_an_error_in_the_variants_part_is_seen(gpu_check: ModuleType) -> None:
    """One variant's scales off by a hundredth; the base's rows tell nothing."""
    problem = gpu_check.Problem(32, 64, 2, 0)
    x, slots = problem.rows(4), np.array([1, -1, 1, 0])
    wide = np.asarray(x, np.float64)
    y = wide @ np.asarray(problem.w, np.float64).T
    for row, slot in enumerate(slots):
        if slot >= 0:
            y[row] += wide[row] @ (problem.scale[slot, 0][:, None] * problem.signs[slot, 0]).T
    assert problem.error(y, x, slots) < 1e-6
    problem.scale[1] *= 1.01
    assert 0.003 < problem.error(y, x, slots) < 0.02
