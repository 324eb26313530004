"""The page on what is in memory."""

from pathlib import Path

from server.commands.bench_cache import loads_section

PAGE = Path(__file__).parents[2] / "docs" / "cache.md"


def test_what_is_said_of_loads_outlasts_the_rest_of_the_page() -> None:
    page = PAGE.read_text()
    kept = loads_section(page)
    assert "## What a load takes" in kept and "load_over_raw" in kept
    assert page.endswith(kept) and "## Hit rates" not in kept
    assert loads_section("# Which variants are in memory\n") == ""
