"""The study: what is there is not run again, and the page's tables are made of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from zen_jax.merge import pool_report, pool_study
from zen_jax.merge.lora import Adapter, Factors
from zen_jax.merge.pool_change import Newcomer, Tasks

TASKS = b'{"metric": "exact", "examples": [[[1], [2]]]}'


def newcomer(seed: int) -> Newcomer:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 6)).astype(np.float32), rng.normal(size=(5, 2)).astype(np.float32)
    return Newcomer(f"a{seed}", {"w": Factors(a, b)}, TASKS)


def test_a_study_is_gone_on_with_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool_study, "PLACES", (2,))
    monkeypatch.setattr(pool_study, "ORDERS", 2)
    asked = 0

    def score(adapter: Adapter, tasks: Tasks) -> float:
        nonlocal asked
        asked += 1
        return 0.5

    out = tmp_path / "lines.jsonl"
    people = [newcomer(i) for i in range(4)]
    pool_study.run_study(people, score, out)
    lines = out.read_text().splitlines()
    assert len(lines) == 2 * (len(pool_study.POOLS) + len(pool_study.BASELINES))
    assert all(record["used"] <= record["limit"] for record in map(json.loads, lines[:9]))
    out.write_text("\n".join(lines[:-3]) + "\n")
    before = asked
    pool_study.run_study(people, score, out)
    assert [json.loads(line)["job"] for line in out.read_text().splitlines()] == [
        json.loads(line)["job"] for line in lines
    ]
    assert asked - before < before / 3
    page = tmp_path / "page.md"
    page.write_text(f"above\n{pool_report.BEGIN}\nstale\n{pool_report.END}\nbelow\n")
    assert pool_report.main([str(out), str(page)]) == 0
    text = page.read_text()
    assert text.startswith("above") and text.endswith("below\n") and "stale" not in text
    assert "| drop the oldest | - | 2.0 of 4 | 0.500 | 1.000 | 1.000 | 1.000 | - |" in text
    assert "| kmerge | opcm | 4.0 of 4 | 1.000 |" in text
    assert pool_report.main([str(out)]) == 2
    assert "expected LINES and a PAGE" in capsys.readouterr().err
