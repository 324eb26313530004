"""`zen demo`: the demonstration is run and shown."""

import asyncio
import dataclasses
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from server import console, demo
from server.address import check_address
from server.app import running
from server.demo import Answer, Findings, Member

_PROBES = 32
_SHOWN = 44


def run(
    family: Path, *, keep: Path | None, port: int, probes: int, serve: bool, as_json: bool
) -> None:
    """Converts, serves, asks, prints; with `serve`, goes on serving until a signal comes."""
    members = demo.read_family(family)
    options = demo.serve_options(len(members), port)
    check_address(options.host, port)
    began = time.perf_counter()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zen-demo-")))
        with console.progress_bar("convert") as report:
            store = demo.convert_family(family, members, keep or work / "store", work, report)
        converted_s = time.perf_counter() - began
        disk = sum(store.manifest(store.variant(name)).bytes_on_disk for name in store.names())
        if not as_json:
            console.say(
                f"Converted the base and {len(members)} full fine-tunes in {converted_s:.0f} s; "
                f"a fine-tune takes {disk // len(members):,} bytes on disk as a 1-bit delta."
            )
        with console.progress_bar("start") as report:
            server = stack.enter_context(running(store, options, report))
        if not as_json:
            console.say(f"Serving base + {len(members)} variants on {server.address}.\n")
        with console.progress_bar("ask") as report:
            found = asyncio.run(demo.ask_family(server, members, probes, report))
        seconds = time.perf_counter() - began
        if as_json:
            console.print_json(_as_dict(members, found, probes, seconds))
        else:
            _show(members, found, probes)
            console.say(f"All of this took {seconds:.0f} s.\n")
            _show_how_to_go_on(server.address if serve else None, keep)
        if serve:
            console.note(f"serving on {server.address}; Ctrl-C ends it")
            _wait_for_signal()


def _wait_for_signal() -> None:
    came = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: came.set())
    came.wait()


def _show(members: Sequence[Member], found: Findings, probes: int) -> None:
    out = console.stdout()
    out.print(_same_table(found.same), _fitting_table(members, found, probes))
    out.print(
        f"Scores are exact matches (1 is best; {_counted(members, probes)}), or for "
        "texts bits per byte (b/B, less is better). Base and full precision as recorded with the "
        "family; delta over gRPC now, for texts (*) as recorded.\n"
        f"TTFT and tokens/s of each stream are its client's, all {len(members)} streams at once; "
        f"together they made {found.tokens_per_s:.0f} tokens/s.\n"
    )
    r = found.residency
    out.print(
        f"Bytes resident: base {r.base:,} + {r.count} variants {r.variants:,} = "
        f"{r.base + r.variants:,}\n"
        f"{r.count + 1} full copies in bfloat16 would take {r.copies:,}: "
        f"the ratio is {r.ratio:.4f}\n"
    )


def _counted(members: Sequence[Member], probes: int) -> str:
    asked = max((len(m.probes[:probes]) for m in members), default=0)
    return f"delta on {asked} unseen inputs each"


def _same_table(answers: Sequence[Answer]) -> Table:
    title = f"One prompt to all, {_quoted(demo.SAME_PROMPT)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("continuation")
    for answer in answers:
        table.add_row(answer.model, Text(_quoted(answer.text)))
    return table


def _fitting_table(members: Sequence[Member], found: Findings, probes: int) -> Table:
    title = "To each what it was made for"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("variant", "prompt", "continuation"):
        table.add_column(name)
    for name in ("base", "full", "delta", "TTFT ms", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for member in members:
        answer = found.fitting[member.name]
        table.add_row(
            member.name,
            Text(_quoted(member.prompt)),
            Text(_quoted(answer.text)),
            *_scores(member, found, probes),
            f"{1000 * answer.ttft_s:.0f}",
            f"{answer.tokens_per_s:.0f}",
        )
    return table


def _scores(member: Member, found: Findings, probes: int) -> tuple[str, str, str]:
    if member.name not in found.right:
        unit = " b/B"
        return (
            f"{member.base:.2f}{unit}",
            f"{member.full:.2f}{unit}",
            f"{member.one_bit:.2f}{unit}*",
        )
    delta = found.right[member.name] / len(member.probes[:probes])
    return f"{member.base:.2f}", f"{member.full:.2f}", f"{delta:.2f}"


def _quoted(text: str) -> str:
    """A text on one line, without control characters, its end cut off when it is long."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _show_how_to_go_on(address: str | None, keep: Path | None) -> None:
    store, zen = keep or Path("demo-store"), _own_name()
    lines = []
    if address is None and keep is None:
        lines += [(f"{zen} demo --serve", "the same, left running")]
        lines += [(f"{zen} demo --keep {store}", "the same, the store kept")]
    if address is None:
        lines += [(f"{zen} serve {store}", "serves a store")]
    at = "" if address is None else f" --address {address}"
    lines += [
        (f"{zen} client --list{at}", "what is served"),
        (f"{zen} client zen4-math 27+38 --chat --temperature 0{at}", "asks one variant"),
        (f"{zen} client base 'Once upon a time'{at}", "asks the base"),
    ]
    width = max(len(command) for command, _ in lines)
    console.say("To go on:")
    for command, what in lines:
        console.say(f"  {command.ljust(width)}   {what}")
    console.say(
        "and from Python:\n"
        "  from server.client import ZenClient\n"
        f'  with ZenClient("{address or "127.0.0.1:50051"}") as zen:\n'
        '      print(zen.generate("zen4-math", "27+38\\n", temperature=0).text)'
    )


def _own_name() -> str:
    """What to type for this command: its name where it is found by that, else the path given."""
    given = Path(sys.argv[0])
    found = shutil.which("zen")
    by_name = given.name != "zen" or (
        found is not None and given.resolve() == Path(found).resolve()
    )
    return "zen" if by_name else str(given)


def _as_dict(
    members: Sequence[Member], found: Findings, probes: int, seconds: float
) -> dict[str, Any]:
    rows = []
    for member in members:
        asked = len(member.probes[:probes])
        measured = member.name in found.right
        rows.append(
            {
                "variant": member.name,
                "title": member.title,
                "metric": member.metric,
                "base": member.base,
                "full": member.full,
                "delta": found.right[member.name] / asked if measured else member.one_bit,
                "delta_measured_on": asked if measured else None,
                "prompt": member.prompt,
                "continuation": found.fitting[member.name].text,
                "base_continuation": found.base_fitting[member.name].text,
                "ttft_ms": round(1000 * found.fitting[member.name].ttft_s, 1),
                "tokens_per_s": round(found.fitting[member.name].tokens_per_s, 1),
            }
        )
    residency = dataclasses.asdict(found.residency) | {"ratio": found.residency.ratio}
    return {
        "variants": rows,
        "same_prompt": demo.SAME_PROMPT,
        "same": {answer.model: answer.text for answer in found.same},
        "tokens_per_s": round(found.tokens_per_s, 1),
        "bytes_resident": residency,
        "seconds": round(seconds, 1),
    }
