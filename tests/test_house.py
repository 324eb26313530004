"""The house itself: finding a Python, setting up, what is pinned, and that each check can fail."""

import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"


def run(
    *command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; `env` is its whole environment."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def script(path: Path, body: str) -> Path:
    """An executable shell script at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# --- a Python is found by running it ---------------------------------------------------------

BROKEN_SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'
TOO_OLD = "exit 1"


def answers(version: str) -> str:
    """Body of a stand-in for a Python of `version` that will do."""
    return f'echo "{version} $0"'


def find_python(home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """tools/find-python with nothing to find but what lies under `home`."""
    return run(
        "/bin/sh",
        TOOLS / "find-python",
        env={"HOME": str(home), "PATH": str(home / "bin"), **env},
    )


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param(
            {"bin/python3.12": BROKEN_SHIM, "bin/python3": answers("3.14")},
            "bin/python3",
            id="a shim that fails is passed over",
        ),
        pytest.param(
            {"bin/python3": TOO_OLD, ".pyenv/versions/3.12.7/bin/python3": answers("3.12")},
            ".pyenv/versions/3.12.7/bin/python3",
            id="pyenv's own, where the shims lead nowhere",
        ),
        pytest.param(
            {
                "bin/python3.12": BROKEN_SHIM,
                ".local/share/uv/python/cpython-3.13-linux/bin/python3": answers("3.13"),
            },
            ".local/share/uv/python/cpython-3.13-linux/bin/python3",
            id="one that uv installed",
        ),
        pytest.param(
            {
                "bin/python3.13": answers("3.13"),
                ".pyenv/versions/3.12.7/bin/python3": answers("3.12"),
            },
            ".pyenv/versions/3.12.7/bin/python3",
            id="3.12 before a later one",
        ),
    ],
)
def test_find_python(tmp_path: Path, candidates: dict[str, str], expected: str) -> None:
    for name, body in candidates.items():
        script(tmp_path / name, body)
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout.strip()) == (0, str(tmp_path / expected))
    assert found.stderr == ""


def test_find_python_takes_the_named_one_first(tmp_path: Path) -> None:
    script(tmp_path / "bin/python3.12", answers("3.12"))
    named = script(tmp_path / "mine", answers("3.14"))
    assert find_python(tmp_path, PYTHON=str(named)).stdout.strip() == str(named)
    script(named, BROKEN_SHIM)
    fallen_back = find_python(tmp_path, PYTHON=str(named))
    assert fallen_back.stdout.strip() == str(tmp_path / "bin/python3.12")
    assert str(named) in fallen_back.stderr


def test_find_python_probes_what_it_runs(tmp_path: Path) -> None:
    """This interpreter passes the probe; one line says what to do where nothing does."""
    assert find_python(tmp_path, PYTHON=sys.executable).stdout.strip() == sys.executable
    script(tmp_path / "bin/python3", TOO_OLD)
    none = find_python(tmp_path)
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr.count("\n") == 1
    assert "3.12" in none.stderr
    assert "install" in none.stderr


# --- set-up: what was interrupted is made again ----------------------------------------------

# Stands in for Python and for the environment's own: it makes environments, and fails when told.
FAKE_PYTHON = """
case "$*" in
  "-I -c"*) echo "3.12 $0" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"install"*) [ ! -e "$REFUSE" ] ;;
esac"""


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Runs a copy of tools/set-up in tmp_path/project; the file tmp_path/refuse makes pip fail."""
    shutil.copytree(TOOLS, tmp_path / "project/tools")
    fake = script(tmp_path / "python", FAKE_PYTHON)
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "REFUSE": str(tmp_path / "refuse")}
    command = tmp_path / "project/tools/set-up"
    return lambda: run(command, ".venv", env={**env, "PYTHON": str(fake)}, cwd=tmp_path)


def test_set_up_repairs_what_was_left_half_made(
    tmp_path: Path, set_up: Callable[[], subprocess.CompletedProcess[str]]
) -> None:
    venv = tmp_path / "project/.venv"
    half_written = venv / "lib/half-written"
    half_written.mkdir(parents=True)
    assert set_up().returncode == 0
    assert (venv / ".stamp").exists()
    assert not half_written.exists()


def test_set_up_that_fails_leaves_no_stamp(
    tmp_path: Path, set_up: Callable[[], subprocess.CompletedProcess[str]]
) -> None:
    venv = tmp_path / "project/.venv"
    assert set_up().returncode == 0
    kept = venv / "kept"
    kept.touch()
    assert set_up().returncode == 0
    assert kept.exists(), "an update keeps the environment"
    (tmp_path / "refuse").touch()
    assert set_up().returncode != 0
    assert not (venv / ".stamp").exists()
    (tmp_path / "refuse").unlink()
    assert set_up().returncode == 0
    assert not kept.exists(), "after a failure the environment is made again"


# --- what is installed is pinned -------------------------------------------------------------


def pins() -> dict[str, str]:
    """constraints.txt: canonical name -> exact version."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version
    return found


def installed(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Canonical name -> version of everything that `requirements` bring in here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(requirements)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        here = distribution(requirement.name)
        found[name] = here.version
        for text in here.requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                todo.append(needed)
    return found


def test_constraints_pin_everything_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = ["pip", *project["build-system"]["requires"], *project["project"]["dependencies"]]
    here = installed(Requirement(text) for text in (*texts, *project["dependency-groups"]["dev"]))
    assert len(here) > 50, "the walk found too little to be the whole environment"
    assert here.items() <= pins().items()


def test_constraints_name_exact_versions_and_no_place() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    stated = [line for line in lines if not line.startswith("#")]
    for line in stated:
        name, equals, version = line.partition("==")
        assert equals and name.strip() == name and version.strip() == version, line
        assert not set("/@:* ") & set(line), line
    assert len(pins()) == len(stated), "a name is pinned twice"


def test_constraints_satisfy_what_the_project_asks_for() -> None:
    """Groups and extras that are not installed here are pinned to versions that will do too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups: list[list[str]] = [
        project["project"]["dependencies"],
        *project["dependency-groups"].values(),
        *project["project"]["optional-dependencies"].values(),
    ]
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        version = pins()[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{text}: pinned to {version}"


# --- each check fails when there is something to find ----------------------------------------


@pytest.fixture
def bare_packages(tmp_path: Path) -> Path:
    """The packages with empty modules, under the project's own contracts."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    imports = [
        line.split(" -> ")
        for contract in rules["contracts"]
        for line in contract.get("ignore_imports", ())
    ]
    modules = {*rules["root_packages"], *(module for pair in imports for module in pair)}
    for contract in rules["contracts"]:
        modules |= {*contract.get("source_modules", ())}
    for package in rules["root_packages"]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for module in modules - {*rules["root_packages"]}:
        file = (tmp_path / module.replace(".", "/")).with_suffix(".py")
        if not file.parent.exists():
            file.parent.mkdir()
            (file.parent / "__init__.py").touch()
        file.touch()
    for importer, imported in imports:
        file = (tmp_path / importer.replace(".", "/")).with_suffix(".py")
        file.write_text(f"import {imported}\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(
        Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache", cwd=folder
    )


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("pallas_kernels/packing.py", "import zen_jax"),
        ("zen_jax/engine.py", "import server.router"),
        ("zen_jax/store.py", "from zen.v1 import generate_pb2"),
        ("zen_jax/delta_cache.py", "import jax.numpy as jnp"),
        ("server/events.py", "import numpy as np"),
    ],
)
def test_layers_refuse_a_planted_import(bare_packages: Path, file: str, statement: str) -> None:
    before = lint_imports(bare_packages)
    assert before.returncode == 0, before.stdout
    (bare_packages / file).write_text(f"{statement}\n")
    after = lint_imports(bare_packages)
    assert after.returncode == 1, after.stdout
    module = file.removesuffix(".py").replace("/", ".")
    assert f"{module} -> {statement.split()[1].split('.')[0]}" in after.stdout


def test_decisions_run_without_arrays_and_grpc() -> None:
    """What the contract above allows for the sake of a type is not imported when it runs."""
    modules = "server.router, server.scheduler, zen_jax.delta_cache"
    heavy = {"flax", "grpc", "jax", "jaxlib", "numpy", "orbax"}
    loaded = run(sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)")
    assert loaded.returncode == 0, loaded.stderr
    assert heavy & {*loaded.stdout.split()} == set()


def function(lines: int, docstring: int = 0) -> str:
    """Source of a function of so many lines, its docstring of so many lines not counted."""
    doc = ['    """A'] + ["    line"] * (docstring - 2) + ['    """'] if docstring else []
    return "\n".join(["def long():", *doc, *["    x = 1"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("server/a.py", function(60, docstring=30), ""),
        ("server/a.py", function(61), "server/a.py:1: long has 61 lines, at most 60\n"),
        ("zen_jax/deep/a.py", "async " + function(99), "zen_jax/deep/a.py:1: long has 99 lines"),
        ("tests/test_a.py", function(99), ""),
        ("tests/test_a.py", "x = 1\n" * 501, "tests/test_a.py: 501 lines, at most 500"),
        ("pallas_kernels/a.cc", "int x;\n" * 501, "pallas_kernels/a.cc: 501 lines"),
        ("server/a_pb2.py", "x = 1\n" * 501, ""),
    ],
)
def test_sizes(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    checked = run(sys.executable, TOOLS / "check_sizes.py", "--root", tmp_path)
    assert checked.returncode == (1 if complaint else 0)
    assert checked.stdout.startswith(complaint)
    assert bool(checked.stdout) == bool(complaint)


def test_generated_code_is_fresh_and_a_planted_change_is_found(tmp_path: Path) -> None:
    root = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", root, ignore=shutil.ignore_patterns("__pycache__"))
    check = (sys.executable, TOOLS / "protos.py", "check", "--root", root)
    fresh = run(*check)
    assert (fresh.returncode, fresh.stdout) == (0, "")

    proto = next(iter(sorted(root.rglob("*.proto"))))
    proto.write_text(proto.read_text() + "\nmessage Planted { string name = 1; }\n")
    gone = sorted(root.rglob("*_pb2_grpc.py"))[-1]
    gone.unlink()
    left_over = proto.with_name("dropped_pb2.py")
    left_over.touch()
    found = run(*check)
    assert found.returncode == 1
    stem = proto.relative_to(root).with_suffix("").as_posix()
    assert f"{stem}_pb2.py: not what its .proto file gives" in found.stdout
    assert f"{stem}_pb2.pyi: not what its .proto file gives" in found.stdout
    assert f"{gone.relative_to(root).as_posix()}: missing" in found.stdout
    assert "dropped_pb2.py: generated from no .proto file" in found.stdout

    assert run(sys.executable, TOOLS / "protos.py", "write", "--root", root).returncode == 0
    assert run(*check).returncode == 0
    assert not left_over.exists()


# --- what the tests run under ----------------------------------------------------------------


def test_eight_devices(devices: list[Any]) -> None:
    assert [device.platform for device in devices] == ["cpu"] * 8


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning, match="planted"):
        warnings.warn("planted", DeprecationWarning, stacklevel=1)


def test_make_help_lists_every_command() -> None:
    """Each phony target that is documented, and the one that a bare `make` runs."""
    bare = run("make")
    assert bare.returncode == 0
    listed = {line.split()[1] for line in bare.stdout.splitlines() if line.startswith("make ")}
    assert {"demo", "test", "check", "soak", "format", "protos"} <= listed
    assert {"family", "family-full", "clean", "help", "lock"} <= listed
