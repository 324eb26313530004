"""`zen bench kv`: its figures are what they are named, and its page has a place for each table."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from server.benchmark_kv import KvPlan, at_once, prefixes
from server.commands.bench_kv import draw, fill, tables
from zen_jax.checkpoint.store import Store

ROOT = Path(__file__).parents[2]


def figures() -> dict[str, Any]:
    step = {"step_ms": 10.0, "over_fixed": 1.02, "over_float32": 1.5, "bytes_per_token": 46080.0}
    kl = {"kv_dtype": "int8", "tokens": 512, "kl": 1.234e-4, "kl_99": 0.01, "same": 0.99}
    return {
        "plan": dataclasses.asdict(KvPlan()),
        "prefix": {
            "first_ms": 400.0,
            "second_ms": 40.0,
            "second_over_first": 0.1,
            "cached_tokens": 512,
            "prompt_tokens": 528,
        },
        "decode": [{"kv_dtype": "int8", "page_size": size} | step for size in (None, 32)],
        "at_once": {
            "fixed": 16.0,
            "paged": 57.0,
            "paged_over_fixed": 3.6,
            "most": 65,
            "rows_lost": 3,
        },
        "quality": {"base": [kl]},
    }


def test_within_the_bytes_of_fixed_rows_more_requests_run() -> None:
    found = at_once(KvPlan(requests=80, fixed_rows=4, paged_rows=40))
    assert found["fixed"] == 4.0, "fixed rows are all taken while somebody waits"
    assert found["paged_over_fixed"] == found["paged"] / 4 > 2
    assert 8 < found["most"] <= 40
    few = at_once(KvPlan(requests=80, fixed_rows=4, paged_rows=5))
    assert 4.5 < few["paged"] <= 5 and few["rows_lost"] == 0


def test_the_second_of_a_pair_reads_its_own_end(tiny_store: Path, compiled: Path) -> None:
    found = prefixes(Store(tiny_store), KvPlan(prefix=96, pairs=2), lambda *_: None)
    assert (found["cached_tokens"], found["prompt_tokens"]) == (96, 112)
    assert found["second_over_first"] == found["second_ms"] / found["first_ms"]
    with pytest.raises(ValueError, match="a prefix of 512 tokens does not fit"):
        prefixes(Store(tiny_store), KvPlan(), lambda *_: None)


def test_the_page_has_a_place_for_every_table(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kv-cache.md").read_text()
    written = fill(page, figures())
    assert "| int8 | fixed rows | 46,080 | 10.0 | 1.02 | 1.50 |" in written
    assert "| begins alike | 16 | 40 | 0.10 |" in written
    assert "| 96, in pages | 57.0 | 3.6 | 65 | 3 |" in written
    assert "| base | int8 | 512 | 0.00012 | 0.01 | 99.00% |" in written
    assert fill(written, figures()) == written
    for name in tables(figures()):
        with pytest.raises(ValueError, match=f"expected one place <!-- {name} -->"):
            fill(page.replace(f"<!-- {name} -->", ""), figures())
    draw(figures(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_bad_plans_are_named() -> None:
    with pytest.raises(ValueError, match="paged_rows is 0"):
        KvPlan(paged_rows=0)
