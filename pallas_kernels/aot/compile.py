"""Compiles a function for H100 and reports its kernels: registers, spills, shared memory, SASS."""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from pallas_kernels.aot import sass

_REGISTERS = re.compile(r"Used (\d+) registers")
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")
_LIMIT_S = 300


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as ptxas made it."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes of shared memory
    counts: dict[str, int]  # instructions by name
    loops: list[sass.Loop]  # those that unpack signs


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled program is made of."""

    kernels: dict[str, Kernel]
    argument_bytes: int
    temporary_bytes: int
    hlo: str


def tool(name: str) -> str:
    """The path of a CUDA tool: that of the wheels, or else the one on the path.

    Raises:
      RuntimeError: there is none.
    """
    with contextlib.suppress(ImportError):
        import nvidia  # pyright: ignore[reportMissingImports]

        for root in nvidia.__path__:
            for path in sorted(Path(root).glob(f"*/bin/{name}")):
                return str(path)
    if found := shutil.which(name):
        return found
    raise RuntimeError(f"{name} was not found; install the dependency group aot: make setup")


def report(function: Callable[..., Any], *arguments: Any, on: Mesh) -> Report:
    """Compiles `function` for the arguments' mesh of H100s.

    Args:
      function: to be jitted.
      *arguments: from `h100.argument`.
      on: the mesh.

    Raises:
      RuntimeError: ptxas or nvdisasm failed, or is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Mosaic reads the variable at each compilation.
        before = os.environ.get("MOSAIC_GPU_DUMP_TO")
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            with jax.sharding.use_abstract_mesh(on.abstract_mesh):
                compiled = jax.jit(function).lower(*arguments).compile()
        finally:
            if before is None:
                del os.environ["MOSAIC_GPU_DUMP_TO"]
            else:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before
        kernels = {}
        for number, path in enumerate(sorted(Path(folder).glob("*.ptx"))):
            for name, kernel in _kernels(path).items():
                kernels[f"{name}.{number}"] = kernel
    memory: Any = compiled.memory_analysis()
    return Report(
        kernels,
        int(memory.argument_size_in_bytes),
        int(memory.temp_size_in_bytes),
        compiled.as_text() or "",
    )


def _kernels(ptx: Path) -> dict[str, Kernel]:
    cubin = ptx.with_suffix(".cubin")
    log = _run(tool("ptxas"), "-arch=sm_90a", "-v", str(ptx), "-o", str(cubin)).stderr
    functions = sass.functions(_run(tool("nvdisasm"), "-c", str(cubin)).stdout)
    registers: dict[str, int] = {}
    spilled: dict[str, int] = {}
    name = ""
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        if spills := _SPILLS.search(line):
            spilled[name] = int(spills[1]) + int(spills[2])
        if used := _REGISTERS.search(line):
            registers[name] = int(used[1])
    resources = ptx.with_suffix(".resources.txt").read_text()
    (shared,) = (int(found) for found in _SHARED.findall(resources))
    return {
        name: Kernel(registers[name], spilled[name], shared, dict(code.counts()), code.unpacking())
        for name, code in functions.items()
        if name in registers
    }


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr[-500:]}")
    return done
