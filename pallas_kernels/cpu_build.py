"""Builds the CPU kernels against the installed jaxlib, and finds what was built.

`python -m pallas_kernels.cpu_build` is part of the set-up. A kernel's folder holds cpu.cc, which is
what is compiled, and the headers that it includes; headers beside this file are shared. A library
is named by a hash of all of them, the jaxlib and the processor's kind, so that a stale one is never
loaded. Without a C++ compiler nothing is built, and XLA does the kernels' work.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

_log = logging.getLogger(__name__)

ROOT = Path(__file__).parent
_ROOMS = ("bitdelta_matmul", "decode_attention", "prompt_attention")
SOURCES = {room: ROOT / room / "cpu.cc" for room in _ROOMS}
# Without contraction, since a fused multiply-add where the source has none changes a sum's bits.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-w", "-shared", "-fPIC")
_BUILD_S = 300


def library_path(kernel: str) -> Path:
    """Where the library of a kernel lies once it is built.

    Raises:
      ValueError: there is no such kernel.
    """
    if kernel not in SOURCES:
        raise ValueError(f"kernel is {kernel!r}; expected one of {', '.join(SOURCES)}")
    texts = [path.read_bytes() for path in _files(kernel)]
    made_of = (texts, version("jaxlib"), platform.machine(), _FLAGS)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    return ROOT / "_build" / f"{kernel}-{digest}.so"


def _files(kernel: str) -> list[Path]:
    """Everything that a library's code stands in: its own folder's files and the shared headers."""
    own = SOURCES[kernel].parent
    return sorted({*own.glob("*.cc"), *own.glob("*.h"), *ROOT.glob("*.h")})


def compiler() -> str | None:
    """A C++ compiler on the path, the one that CXX names first; None when there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(kernel: str) -> Path | None:
    """Compiles a kernel unless that is done; returns its library, or None without a compiler.

    Raises:
      RuntimeError: the compiler failed; its last words are given.
    """
    target = library_path(kernel)
    if target.exists():
        return target
    cxx = compiler()
    if cxx is None:
        return None
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / target.name
        command = [
            cxx,
            *_FLAGS,
            f"-I{jax.ffi.include_dir()}",
            f"-I{ROOT}",
            str(SOURCES[kernel]),
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S)
        if done.returncode:
            raise RuntimeError(f"{cxx} could not build {kernel}: {done.stderr[-500:]}")
        made.replace(target)
    for old in target.parent.glob(f"{kernel}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


@functools.cache
def load(kernel: str) -> ctypes.CDLL | None:
    """The library of a kernel, or None where it was not built, which is said once."""
    path = library_path(kernel)
    if not path.exists():
        _log.warning(
            "the CPU kernel %s is not built: XLA does its work, several times slower; "
            "install a C++ compiler and run python -m pallas_kernels.cpu_build",
            kernel,
        )
        return None
    return ctypes.CDLL(str(path))


def main() -> int:
    """Builds every kernel; says in one line when that cannot be."""
    for kernel in SOURCES:
        try:
            if build(kernel) is None:
                print("no C++ compiler: on the CPU XLA will do the kernels' work, which is slower")
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{kernel} was not built, so XLA will do its work: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
