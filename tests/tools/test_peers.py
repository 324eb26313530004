"""What `make peers` installs: once, each in its own environment, and named when it cannot be."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Makes an environment whose Python is this very script, and "installs" unless told not to.
_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*"broken"*) echo "building"; echo "no compiler" >&2; exit 1 ;;
  "-c import absent") echo "No module named 'absent'" >&2; exit 1 ;;
esac
"""


@pytest.fixture(scope="session")
def peers() -> ModuleType:
    """tools/peers.py, imported."""
    spec = importlib.util.spec_from_file_location("peers", ROOT / "tools" / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers"] = module  # where its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a Python with pip."""
    path = tmp_path / "python"
    path.write_text(_PYTHON)
    path.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PEERS_PYTHON", str(path))
    return path


def test_what_is_installed_is_left_alone(peers, python: Path, tmp_path: Path, capsys) -> None:
    into = tmp_path / "peers"
    peers.main(["--into", str(into)])
    log = (tmp_path / "log").read_text()
    assert log.count("-m venv") == 2 and log.count("pip install") == 2
    assert "llama-cpp-python==0.3.36" in log and "torch==2.13.0 transformers==5.24.0" in log
    assert all((into / name / ".stamp").is_file() for name in ("llama-cpp", "transformers"))
    peers.main(["--into", str(into)])
    assert (tmp_path / "log").read_text() == log
    assert capsys.readouterr().out.count("llama-cpp is there") == 2


@pytest.mark.parametrize(
    ("requirement", "module", "why"),
    [("broken==1", "fine", "no compiler"), ("fine==1", "absent", "No module named 'absent'")],
)
def test_what_cannot_be_installed_says_why(
    peers, python: Path, tmp_path: Path, monkeypatch, capsys, requirement, module, why
) -> None:
    one = peers.Packaged("one", (requirement,), module, {"CMAKE_ARGS": "-DX=1"})
    two = peers.Packaged("two", ("fine==1",), "fine")
    monkeypatch.setattr(peers, "PACKAGED", (one, two))
    into = tmp_path / "peers"
    peers.main(["--into", str(into)])
    assert not (into / "one" / ".stamp").exists() and (into / "two" / ".stamp").is_file()
    assert (into / "one.why").read_text().strip().endswith(f": {why}")
    assert f"one is not there: {into}" in capsys.readouterr().out
    # Once it works the reason is gone, and what lay there half made is too.
    (into / "one" / "left-over").touch()
    again = peers.Packaged("one", ("fine==1",), "fine")
    assert peers.install(again, into, str(python)) is None
    assert not (into / "one.why").exists() and not (into / "one" / "left-over").exists()


def test_a_python_that_is_not_there(peers, tmp_path: Path) -> None:
    tmp_path.joinpath("peers").mkdir()
    why = peers.install(peers.PACKAGED[0], tmp_path / "peers", "/no/such/python")
    assert "/no/such/python" in why and "No such file" in why


def test_a_name_that_leads_nowhere_is_passed_over(peers, tmp_path: Path, monkeypatch) -> None:
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.delenv("PEERS_PYTHON", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert peers.find_python() == sys.executable
    shim.write_text("#!/bin/sh\nexit 0\n")
    assert peers.find_python() == str(shim)


def test_the_bench_looks_where_make_peers_installs(peers) -> None:
    from zen_jax.peers.bench import FOLDERS, PEERS

    assert set(FOLDERS.values()) == {program.name for program in peers.PACKAGED}
    assert PEERS == ROOT / ".peers"
    assert "tools/peers.py" in (ROOT / "Makefile").read_text()
    assert "/.peers" in (ROOT / ".gitignore").read_text().splitlines()
