"""Installs the programs that `zen bench peers` measures ours beside, each in an environment of its
own.

    python tools/peers.py [--into .peers]

llama.cpp is compiled for this machine, which takes many minutes; nothing is fetched but by pip, by
name. What is done already is left alone. A program that cannot be installed is named, with why in
.peers/NAME.why, and the bench goes on without it. PEERS_PYTHON=/path/to/python makes the
environments; otherwise python3.11, for which torch's build without CUDA is at hand, or this Python.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STAMP = ".stamp"


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A program in packages.

    Attributes:
      name: of its environment.
      requirements: its packages and their versions.
      module: is imported to see that it works.
      environment: what pip is given.
    """

    name: str
    requirements: Sequence[str]
    module: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


PACKAGED = (
    Packaged("transformers", ("torch==2.13.0", "transformers==5.24.0"), "transformers"),
    Packaged(
        "llama-cpp",
        ("llama-cpp-python==0.3.36", "numpy>=2"),
        "llama_cpp",
        {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},  # pictures: half of what there is to compile
    ),
)


def find_python() -> str:
    """The Python that makes the environments."""
    wanted = os.environ.get("PEERS_PYTHON")
    if wanted:
        return wanted
    for name in ("python3.11", sys.executable):
        found = shutil.which(name)
        # A name on the PATH may be a shim that leads nowhere.
        if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
            return found
    return sys.executable


def install(program: Packaged, into: Path, python: str) -> str | None:
    """Makes a program's environment; returns why not, or None when it is there.

    Its stamp is written last: without it the folder is not trusted, and made again.
    """
    home, why = into / program.name, into / f"{program.name}.why"
    if (home / STAMP).is_file():
        return None
    shutil.rmtree(home, ignore_errors=True)
    own = str(home / "bin" / "python")
    commands = (
        [python, "-m", "venv", str(home)],
        [own, "-m", "pip", "install", "-q", "--disable-pip-version-check", *program.requirements],
        [own, "-c", f"import {program.module}"],
    )
    for command in commands:
        environment = os.environ | program.environment
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
            told = "" if not ran.returncode else (ran.stderr or ran.stdout).strip()
            failed = ran.returncode != 0
        except OSError as error:
            told, failed = str(error), True
        if failed:
            last = told.splitlines()[-1:] or ["it said nothing"]
            why.write_text(f"{command[0]} {command[1]} {command[2]}: {last[0]}\n")
            return why.read_text().strip()
    why.unlink(missing_ok=True)
    (home / STAMP).touch()
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Installs all."""
    parser = argparse.ArgumentParser(description="Install what `zen bench peers` compares with.")
    parser.add_argument("--into", type=Path, default=Path(".peers"), help="folder, .peers")
    into: Path = parser.parse_args(arguments).into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    python = find_python()
    for program in PACKAGED:
        print(f"{program.name}: {', '.join(program.requirements)}", flush=True)
        why = install(program, into, python)
        print(f"{program.name} is there" if why is None else f"{program.name} is not there: {why}")


if __name__ == "__main__":
    main()
