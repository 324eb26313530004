"""The tables of docs/kmerge.md, from the lines of `zen_jax.merge.pool_study`.

python -m zen_jax.merge.pool_report docs/kmerge.jsonl docs/kmerge.md
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def tables(records: Sequence[dict[str, Any]]) -> str:
    """A table for each number of places, a row for each policy and operation, best mean first.

    Raises:
      ValueError: there is no record.
    """
    if not records:
        raise ValueError("there are no lines to report; run the study first")
    text = []
    for places in sorted({record["places"] for record in records}):
        own = [record for record in records if record["places"] == places]
        kinds = sorted({tuple(r["job"][:2]) for r in own})
        rows = sorted((_row(kind, own) for kind in kinds), key=lambda row: -row[0])
        limit = own[0]["limit"]
        text.append(f"### K = {places}, B = {limit:,} bytes\n")
        text.append(
            "| policy | merge | answered | mean of all | mean of answered | least | "
            "worst of the orders | bytes at most |\n|---|---|---|---|---|---|---|---|"
        )
        text += [line for _, line in rows]
        text.append("")
    return "\n".join(text)


def _row(kind: tuple[str, ...], records: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """(the mean to sort by, a line of the table), over the orders of arrival."""
    own = [record for record in records if tuple(record["job"][:2]) == kind]
    mean = sum(r["mean"] for r in own) / len(own)
    answered = sum(r["answered"] for r in own) / len(own)
    asked = own[0]["asked"]
    well = sum(sum(r["ratios"].values()) / len(r["ratios"]) for r in own) / len(own)
    least = sum(r["least"] for r in own) / len(own)
    worst = min(r["least"] for r in own)
    peak = max((r.get("peak", 0) for r in own), default=0)
    shown = f"{peak:,}" if peak else "-"
    line = (
        f"| {kind[0]} | {kind[1] or '-'} | {answered:.1f} of {asked} | {mean:.3f} | {well:.3f} | "
        f"{least:.3f} | {worst:.3f} | {shown} |"
    )
    return mean, line


def main(arguments: Sequence[str]) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    try:
        lines, page = map(Path, arguments)
        records = [json.loads(line) for line in lines.read_text().splitlines()]
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        page.write_text(f"{before}{BEGIN}\n\n{tables(records)}\n{END}{after}", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}; expected LINES and a PAGE with {BEGIN}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
