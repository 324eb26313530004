"""`zen status` and `zen profile`: a server as its operators see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from server import console
from server.client import ZenError
from server.client_access import Access
from server.client_operations import OperationsClient
from zen.v1 import operations_pb2 as pb

_STYLES = {"resident": "green", "loading": "yellow", "failed": "red", "absent": "dim"}


def status(address: str, access: Access, every: float, *, once: bool, as_json: bool) -> None:
    """Shows a server, once or until Ctrl-C."""
    with OperationsClient(address, access) as client:
        first = client.status()
        if as_json:
            console.print_json(_as_dict(first))
            return
        out = console.stdout()
        if once or not out.is_terminal:
            out.print(view(first, address, out.width))
            return
        with Live(
            view(first, address, out.width), console=out, screen=True, auto_refresh=False
        ) as live:
            while True:
                time.sleep(every)  # between two looks
                live.update(_look(client, address, out.width), refresh=True)


def profile(address: str, access: Access, seconds: float, *, as_json: bool) -> None:
    """Has a server record itself, and says where that is."""
    with OperationsClient(address, access) as client:
        made = client.capture_profile(seconds)
    if as_json:
        console.print_json({"name": made.name, "bytes": made.bytes})
    else:
        console.say(f"recorded {made.name}, {made.bytes:,} bytes, in the server's --profiles")


def _look(client: OperationsClient, address: str, width: int) -> RenderableType:
    """The next picture; a server that cannot be asked for a while is said to be away."""
    try:
        return view(client.status(), address, width)
    except ZenError as error:
        if error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            raise
        return Text(f"{address} does not answer: {error.message}", style="red")


def view(seen: pb.GetStatusResponse, address: str, width: int) -> Group:
    """A server as a picture of text, in a terminal of so many columns."""
    up = timedelta(seconds=round(_seconds(seen.uptime) or 0))
    head = Text(f"{address}  up {up}", style="bold")
    return Group(head, _bars(seen), _recent(seen.recent), _models(seen.models, width), _since(seen))


def _bars(seen: pb.GetStatusResponse) -> Table:
    resident = sum(model.HasField("slot") for model in seen.models)
    bars = Table.grid(padding=(0, 2))
    budget = "" if seen.host_budget >= 2**63 else f" of {_size(seen.host_budget)}"
    waiting = f"{seen.waiting} waiting"
    rows = (
        ("rows", seen.rows_in_use, seen.rows, waiting),
        ("slots", resident, seen.slots, f"{seen.loads} loads, {seen.evictions} evictions"),
        ("pages", seen.pages_held, seen.pages, f"{seen.pages_kept} kept for later prompts"),
        ("host memory", seen.host_bytes, seen.host_budget, _size(seen.host_bytes) + budget),
    )
    for name, used, most, note in rows:
        count = "" if name == "host memory" else f"{used} of {most}"
        bars.add_row(name, ProgressBar(max(most, 1), used, width=30), count, note)
    return bars


def _recent(recent: pb.Recent) -> Text:
    window = round(_seconds(recent.window) or 0)
    return Text(
        f"last {window} s: {recent.finished} answered, {recent.failed} failed, "
        f"{recent.prompt_tokens_per_s:.1f} tokens/s of prompts, "
        f"{recent.answer_tokens_per_s:.1f} of answers\n"
        f"TTFT P50 {_ms(recent, 'ttft_p50')}, P99 {_ms(recent, 'ttft_p99')}; "
        f"TPOT P50 {_ms(recent, 'tpot_p50')}, P99 {_ms(recent, 'tpot_p99')}"
    )


def _models(models: Collection[pb.ModelStatus], width: int) -> Table:
    """A line for each; what is least asked for is left out where there is no room."""
    names = [name for name in _COLUMNS if width >= _WIDE or name not in _WIDE_ONLY]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        right = name in ("requests/s", "bytes", "TTFT P50", "P99")
        least = max((len(str(_COLUMNS[name](model))) for model in models), default=0)
        whole = least if name in ("model", "state") else None
        table.add_column(name, justify="right" if right else "left", min_width=whole)
    for model in models:
        table.add_row(*(_COLUMNS[name](model) for name in names))
    return table


def _state(model: pb.ModelStatus) -> Text:
    return Text(model.state, style=_STYLES.get(model.state, ""))


# What stands in each column.
_COLUMNS: Mapping[str, Callable[[pb.ModelStatus], str | Text]] = {
    "model": lambda model: model.name,
    "version": lambda model: str(model.version or ""),
    "state": _state,
    "slot": lambda model: str(model.slot) if model.HasField("slot") else "",
    "stays": lambda model: "pinned" if model.pinned else "popular" if model.kept else "",
    "in use": lambda model: str(model.leases or ""),
    "waiting": lambda model: str(model.waiting or ""),
    "requests/s": lambda model: f"{model.requests_per_s:.2g}" if model.version else "",
    "bytes": lambda model: _size(model.bytes) if model.bytes else "",
    "TTFT P50": lambda model: _ms(model, "ttft_p50"),
    "P99": lambda model: _ms(model, "ttft_p99"),
}
_WIDE, _WIDE_ONLY = 115, frozenset({"version", "slot", "requests/s", "bytes", "P99"})


def _since(seen: pb.GetStatusResponse) -> Text:
    step = f"a decode step takes {_ms(seen, 'step')}; " if seen.HasField("step") else ""
    return Text(
        f"{step}since the start: {seen.compiles} programs compiled, {seen.rows_lost} rows "
        "taken by others"
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _ms(message: Any, field: str) -> str:
    """A time in ms, or a dash where there is none yet."""
    if not message.HasField(field):
        return "-"
    return f"{1000 * _seconds(getattr(message, field)):.1f} ms"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _as_dict(seen: pb.GetStatusResponse) -> dict[str, Any]:
    """Figures for programs: times in seconds, counts as numbers."""
    found = MessageToDict(
        seen, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _plain(found, seen)


def _plain(found: dict[str, Any], message: Any) -> dict[str, Any]:
    """With 64-bit counts as numbers and times as seconds, which protobuf's JSON has as texts."""
    plain: dict[str, Any] = {}
    for name, value in found.items():
        told = getattr(message, name)
        if isinstance(told, Duration):
            plain[f"{name}_s"] = _seconds(told)
        elif isinstance(value, dict):
            plain[name] = _plain(value, told)
        elif isinstance(value, list):
            plain[name] = [_plain(v, t) for v, t in zip(value, told, strict=True)]
        else:
            plain[name] = told
    return plain
