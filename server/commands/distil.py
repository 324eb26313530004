"""`zen distill`: a variant's signs and scales fitted to text."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from server import console
from zen_jax.delta.levels import MAX_LEVELS
from zen_jax.distillation import Distilled, Distilling, distill
from zen_jax.distillation_plot import draw


def run(
    src: Path,
    store: Path,
    name: str,
    texts: Sequence[Path],
    how: Distilling,
    *,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Distils and says what came of it.

    Raises:
      ValueError: bad input of any kind; nothing was published.
      OSError: a file cannot be read or written.
    """
    if plot is not None:
        plot.touch()  # tried before minutes are spent
    with console.progress_bar(name) as report:
        done = distill(src, store, name, texts, how, report)
    if plot is not None:
        try:
            draw(done, plot)
        except ImportError:
            console.note("no plot: it needs matplotlib (pip install matplotlib)")
    if as_json:
        console.print_json(dataclasses.asdict(done))
    else:
        _say(done, how.bytes)


def _say(done: Distilled, allowed: int | None) -> None:
    if done.version is None:
        console.say(
            f"{done.name} version {done.began} stays: nothing was nearer to its fine-tune "
            f"(KL {done.before:.5f} nats a token on held-out text)"
        )
        return
    console.say(
        f"{done.name} version {done.version}, {done.bytes:,} bytes on disk, in {done.seconds:.1f} s"
    )
    if allowed is not None:
        counts = sorted(Counter(done.levels.values()).items())
        each = ", ".join(f"{number} with {levels}" for levels, number in counts)
        all_of_it = set(done.levels.values()) == {MAX_LEVELS}
        more = "; no matrix can have more" if all_of_it else ""
        console.say(
            f"  of {allowed:,} bytes allowed it took {done.bytes:,}; matrices by levels: "
            f"{each}{more}"
        )
    console.say(
        f"  KL to the fine-tune on {done.windows[1]} held-out windows, nats a token: version "
        f"{done.began} {done.before:.5f}, layers fitted {done.fitted:.5f}, at the end "
        f"{done.after:.5f}"
    )
