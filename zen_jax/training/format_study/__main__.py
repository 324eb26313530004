"""Measures what each format of a delta costs and writes docs/format.json, its tables and plot.

    python -m zen_jax.training.format_study family [--only NAME ...]
    python -m zen_jax.training.format_study smollm2 [--base FOLDER] [--steps N]
    python -m zen_jax.training.format_study report

Resumable: what is measured already, and has not changed, is not measured again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zen_jax.training.family import FAMILY, remember_compilations
from zen_jax.training.format_study import family, report, served, smollm2
from zen_jax.training.format_study.study import Results, publish, run

ROOT = FAMILY.parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zen_jax.training.format_study",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="format.{json,md,png}")
    commands = parser.add_subparsers(dest="command", required=True)
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "format-study",
        help="results so far, and what is trained",
    )
    own.add_argument(
        "--texts",
        type=Path,
        default=ROOT / "build" / "family" / "work" / "texts",
        help="texts; what is missing is fetched by package name",
    )
    own.add_argument("--quiet", action="store_true", help="no progress bar")
    tiny = commands.add_parser("family", parents=[own], help="all variants of the demo family")
    tiny.add_argument("--family", type=Path, default=FAMILY)
    tiny.add_argument("--only", nargs="+", metavar="NAME", help="these variants; not published")
    real = commands.add_parser(
        "smollm2", parents=[own], help="fine-tune SmolLM2-135M on German manual pages, and measure"
    )
    real.add_argument("--base", type=Path, default=ROOT / smollm2.BASE, help="its folder")
    real.add_argument("--steps", type=int, default=smollm2.STEPS, help="of the fine-tuning")
    commands.add_parser("report", help="write tables and plot again from format.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "report":
            report.write(given.docs)
            return 0
        began = time.monotonic()
        given.work.mkdir(parents=True, exist_ok=True)
        remember_compilations(given.work / "compiled")
        results = Results(given.work / f"{given.command}.json")
        if given.command == "family":
            subjects = family.subjects(given.family, given.texts, given.only)
            about, rows = family.ABOUT, family.SERVED_ROWS
        else:
            subjects = smollm2.subjects(
                given.base, given.work / "smollm2", given.texts, given.steps, not given.quiet
            )
            about, rows = smollm2.about(given.steps), smollm2.SERVED_ROWS
            smollm2.write_delta(given.work / "smollm2", given.steps, given.docs / smollm2.DELTA)
        run(subjects, results, not given.quiet)
        served.run(subjects, results, rows, not given.quiet)
        if given.command == "smollm2" or not given.only:
            report.write(given.docs, given.command, publish(results, about))
        print(f"{results.path}: done in {(time.monotonic() - began) / 60:.1f} minutes")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
