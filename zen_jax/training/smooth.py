"""Fine-tunes with merges along the way, and measures what each way of merging does to the loss.

    python -m zen_jax.training.smooth tune NAME --out DIR [--method truncated-soup] [--every N]
    python -m zen_jax.training.smooth study family|smollm2 [--work DIR]
    python -m zen_jax.training.smooth report

`tune` fine-tunes the demo family's base for one of its variants and writes DIR/raw and DIR/merged
as Hugging Face folders. `study` writes docs/smoothing.json, .md and .png. Both go on where they
were.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from zen_jax.training import residual, smoothing_study
from zen_jax.training.family import FAMILY, remember_compilations
from zen_jax.training.smoothing import (
    MethodName,
    OptimizerPolicy,
    Pairing,
    SmoothingConfig,
    train_smoothed,
)
from zen_jax.training.smoothing_study import Subject, family_subject

ROOT = FAMILY.parent
_CURVES = "smoothing.json"


def tune(subject: Subject, smoothing: SmoothingConfig, out: Path, progress: bool = True) -> None:
    """Fine-tunes and writes OUT/raw, OUT/merged and OUT/smoothing.json; the run lies in OUT/run.

    Args:
      subject: what is trained.
      smoothing: what is merged; its first method's merge is written.
      out: made if need be.
      progress: whether to show a bar.

    Raises:
      ValueError: OUT/run is of another run, or OUT/raw something else.
    """
    config, base = residual.read_folder(subject.base)
    done = train_smoothed(
        config,
        residual.float32_params(config, base),
        subject.batches,
        subject.settings,
        smoothing,
        subject.held_out,
        out / "run",
        title=subject.name,
        progress=progress,
    )
    shadow = done.shadows[smoothing.methods[0]]
    residual.write_folder(out / "raw", residual.round_tensors(done.raw), subject.base)
    if shadow.weights is not None:
        merged = residual.round_tensors(shadow.weights)
        residual.write_folder(out / "merged", merged, subject.base)
    curves = {name: {"curve": s.curve, "count": s.count} for name, s in done.shadows.items()}
    text = json.dumps(curves, indent=1) + "\n"
    (out / _CURVES).write_text(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zen_jax.training.smooth", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    own = argparse.ArgumentParser(add_help=False)
    texts = ROOT / "build" / "family" / "work" / "texts"
    own.add_argument("--texts", type=Path, default=texts, help="fetched if they are not there")
    own.add_argument("--family", type=Path, default=FAMILY, help="the demo family")
    own.add_argument("--quiet", action="store_true", help="no progress bars")
    one = commands.add_parser("tune", parents=[own], help="fine-tune a variant, with merges")
    one.add_argument("name", help="a variant of the demo family: zen4-german and so on")
    one.add_argument("--out", type=Path, required=True)
    methods = [name for name in get_args(MethodName) if name != "none"]
    one.add_argument("--method", choices=methods, default="truncated-soup")
    one.add_argument("--every", type=int, default=1000, help="gradient steps between merges (1000)")
    one.add_argument("--rank", type=int, default=32, help="of truncated soup (32)")
    one.add_argument("--pairing", choices=get_args(Pairing), default="best")
    one.add_argument(
        "--replace",
        choices=get_args(OptimizerPolicy),
        help="go on from merged weights, and keep or reset the optimizer's moments",
    )
    one.add_argument("--steps", type=int, help="of training; else the recipe's")
    one.add_argument("--seed", type=int, default=0, help="of the batches")
    study = commands.add_parser("study", parents=[own], help="measure all methods, and publish")
    study.add_argument("what", choices=["family", "smollm2"])
    study.add_argument("--work", type=Path, default=ROOT / "build" / "smoothing")
    study.add_argument("--docs", type=Path, default=ROOT / "docs")
    study.add_argument("--base", type=Path, default=ROOT / smoothing_study.SMOLLM2)
    study.add_argument("--so-far", action="store_true", help="train nothing, publish what is there")
    report = commands.add_parser("report", help="write the page and its plot again")
    report.add_argument("--docs", type=Path, default=ROOT / "docs")
    return parser


def _tune(given: argparse.Namespace) -> None:
    subject = family_subject(given.family, given.texts, given.name, given.seed, given.steps)
    smoothing = SmoothingConfig(
        methods=(given.method,),
        every=given.every,
        rank=given.rank,
        pairing=given.pairing,
        live="replace" if given.replace else "shadow",
        optimizer=given.replace,
    )
    if given.every > subject.settings.steps:
        raise ValueError(
            f"every is {given.every}, and there are {subject.settings.steps} steps: nothing would "
            "be merged; give a smaller --every"
        )
    tune(subject, smoothing, given.out, not given.quiet)
    print(f"{given.out}: raw, merged and {_CURVES}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns an exit status, 2 for bad input."""
    given = _parser().parse_args(arguments)
    began = time.monotonic()
    try:
        if given.command == "tune":
            _tune(given)
        elif given.command == "report":
            smoothing_study.publish(given.docs, {})
        else:
            given.work.mkdir(parents=True, exist_ok=True)
            remember_compilations(given.work / "compiled")
            subjects = smoothing_study.subjects(
                given.what, given.family, given.base, given.work, given.texts
            )
            if given.so_far:
                found = smoothing_study.so_far(subjects, given.work)
            else:
                found = smoothing_study.run(subjects, given.work, not given.quiet)
            smoothing_study.publish(given.docs, {given.what: found})
            print(f"{given.docs}: done in {(time.monotonic() - began) / 60:.1f} minutes")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
