"""`zen status` as it is seen in terminals of several widths."""

import io

import pytest
from rich.console import Console

from server.commands.operations import view
from zen.v1 import operations_pb2 as pb


@pytest.mark.parametrize(("width", "sees"), [(80, "TTFT"), (160, "requests/s")])
def test_variants_can_be_told_apart(width: int, sees: str):
    seen = pb.GetStatusResponse(rows=4, slots=2)
    names = ["base", "zen4-medical", "zen4-medical-assistant-26"]
    for name in names:
        model = seen.models.add(name=name, version=3, leases=120, waiting=7, bytes=123_456, slot=1)
        model.state, model.kept = "resident", True
        for field in (model.ttft_p50, model.ttft_p99):
            field.nanos = 223_456_789
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(seen, "127.0.0.1:1", width))
    lines = console.export_text().splitlines()
    for name in names:
        (line,) = [line for line in lines if f" {name} " in line]
        assert "resident" in line and "120" in line and "223.5 ms" in line
    assert any(sees in line for line in lines) and max(map(len, lines)) <= width
