"""Measures what one bit costs and writes docs/quality.json, its tables and plot.

    python -m zen_jax.training.quality family [--only NAME ...]
    python -m zen_jax.training.quality smollm2 [--only NAME ...]
    python -m zen_jax.training.quality asides [--only NAME ...]
    python -m zen_jax.training.quality budget [--only NAME ...]
    python -m zen_jax.training.quality report

Resumable: what is measured already, and has not changed, is not measured again.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zen_jax.checkpoint.source import open_source
from zen_jax.training.family import FAMILY, remember_compilations
from zen_jax.training.format_study import smollm2
from zen_jax.training.format_study.study import Results
from zen_jax.training.quality import asides, budget, report
from zen_jax.training.quality.methods import METHODS
from zen_jax.training.quality.study import family_cases, measure, smollm2_cases
from zen_jax.training.quality.tunes import TUNES
from zen_jax.training.recipe import VARIANTS

ROOT = FAMILY.parent
# A text and two skills.
ASIDES = ["zen4-german", "zen4-ultra", "zen4-morse"]
BUDGET = ["zen4-german", "zen4-morse"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zen_jax.training.quality", description=(__doc__ or "").partition("\n")[0]
    )
    build = ROOT / "build"
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="quality.{json,md,png}")
    parser.add_argument("--work", type=Path, default=build / "quality", help="results so far")
    parser.add_argument("--formats", type=Path, default=build / "format-study", help="its results")
    texts = build / "family" / "work" / "texts"
    parser.add_argument("--texts", type=Path, default=texts, help="fetched if not there")
    commands = parser.add_subparsers(dest="command", required=True)

    def study(name: str, what: str, known: Iterable[str], only: list[str] | None = None) -> Any:
        made = commands.add_parser(name, help=what)
        names = list(known)
        made.add_argument("--only", nargs="+", choices=names, default=only, metavar="NAME")
        made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
        return made

    study("family", "the demo family", VARIANTS)
    study("asides", "8-bit bases, and prompts alone", VARIANTS, ASIDES)
    study("budget", "ways to spend more bytes", VARIANTS, BUDGET)
    real = study("smollm2", "fine-tunes of SmolLM2-135M", TUNES)
    base = build / "format-study" / "smollm2" / "base"
    real.add_argument("--base", type=Path, default=base, help="in bfloat16; its folder")
    real.add_argument("--steps", type=int, default=60, help="of fine-tuning; 60 is all")
    commands.add_parser("report", help="write tables and plot again")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    given = _parser().parse_args(arguments)
    try:
        if given.command != "report":
            given.work.mkdir(parents=True, exist_ok=True)
            remember_compilations(given.work / "compiled")
            known = Results(given.formats / f"{given.command}.json")
            results = Results(given.work / f"{given.command}.json")
            under_way = given.work / "under-way"
            if given.command != "smollm2":
                cases = family_cases(FAMILY, given.texts, under_way, given.only)
            else:
                tunes = given.work / "smollm2"
                if not given.base.exists():
                    smollm2.write_base(open_source(ROOT / smollm2.BASE), given.base)
                cases = smollm2_cases(
                    given.base, tunes, given.texts, under_way, given.steps, given.only
                )
            for name, make in cases:
                began = time.process_time()
                if given.command in ("asides", "budget"):
                    beside = asides.measure if given.command == "asides" else budget.measure
                    beside(make(), results, lambda what, name=name: _say(name, what))
                    continue
                measure(
                    make(), given.methods, results, known, lambda what, name=name: _say(name, what)
                )
                print(f"{name}: {time.process_time() - began:.0f} s of processor", flush=True)
        report.write(given.docs, given.work)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _say(name: str, what: str) -> None:
    print(f"{name}: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
