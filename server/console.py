"""What the `zen` command shows: results on stdout, everything else on stderr."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

# What is worked on, how much is done, how much there is.
type Report = Callable[[str, int, int], None]

# Control characters but tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Tables keep their columns when they are piped somewhere.
_PIPED_WIDTH = 160


def stdout() -> Console:
    """Where results go."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def stderr() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Prints a line of result at once."""
    print(text, flush=True)


def show(text: str, end: str = "\n") -> None:
    """Prints what a model wrote: on a terminal without control characters, which could move the
    cursor or rename the window; piped, as it is."""
    if sys.stdout.isatty():
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    print(text, end=end, flush=True)


def note(text: str) -> None:
    """Prints a line beside the results."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints figures for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def measured[T](out: Path | None, measure: Callable[[Report], T]) -> T:
    """Figures, made under a bar and written to a file that was tried before minutes are spent.

    Raises:
      OSError: the file cannot be written.
    """
    if out is not None:
        out.touch()
    with progress_bar("bench") as report:
        figures = measure(report)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """Shows a bar on stderr that goes away when the block ends; off a terminal, nothing moves."""
    columns = (
        TextColumn("{task.fields[title]}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = stderr()
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bars:
        task = bars.add_task("", total=None, title=title)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report
