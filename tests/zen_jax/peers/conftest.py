"""The demo family's base in a store, and programs that speak as a worker does."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import zen_jax
from zen_jax.convert import convert_base

DEMO = Path(zen_jax.__file__).parents[1] / "family"

# Replies to `load` and to the first RUNS requests to run; then it does as LATER says.
_PEER = """
import json, sys
name, tokens, later, runs, log = {name!r}, {tokens!r}, {later!r}, {runs!r}, {log!r}
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    with open(log, "a") as file:
        print(name, request["do"], len(request.get("prompt", "")), file=file)
    if number > runs:
        exec(later)
    reply = {{"versions": {{name: "1"}}}}
    if request["do"] == "run":
        chosen = (tokens * request["steps"])[: request["steps"] + 1]
        reply = {{"prefill_s": 0.5 + number, "decode_s": 0.25 + number, "tokens": chosen}}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo family's base alone; not to be changed."""
    path = tmp_path_factory.mktemp("peers") / "store"
    convert_base(DEMO / "base", path)
    return path


@pytest.fixture(scope="session")
def fake_peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Makes the command of a peer that chooses TOKENS over and over and takes a time that grows
    with every request: 0.5 s and one more for each, 0.25 s likewise."""
    folder = tmp_path_factory.mktemp("programs")

    def make(
        name: str, log: Path, tokens: list[int], later: str = "pass", runs: int = 10**9
    ) -> list[str]:
        path = folder / f"{len(list(folder.iterdir()))}.py"
        text = _PEER.format(name=name, tokens=tokens, later=later, runs=runs, log=str(log))
        path.write_text(textwrap.dedent(text))
        return [sys.executable, str(path)]

    return make
