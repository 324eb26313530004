"""Programs that a model wrote, each run in a process with limits.

A program has processor time, wall-clock time, memory, file sizes and open files bounded, cannot
start processes or threads, has no network, no other process in sight, no environment, a temporary
folder to work in, and its output is thrown away. It can still read what the user can read, and
write to the user's files: this keeps mistakes in, not an attacker. Whoever evaluates models that
they do not trust does so in a container or a virtual machine as well.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from zen_jax.evaluation import confined

Outcome = Literal["passed", "failed", "out of time"]

# A program that came to its end says so by this status: an early exit() is no success.
_PASSED = 77
_END = f"\nimport os as _os\n_os._exit({_PASSED})\n"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a program may use.

    Attributes:
      cpu_s: seconds of processor time.
      wall_s: seconds altogether.
      nbytes: of address space.
    """

    cpu_s: int = 5
    wall_s: float = 15.0
    nbytes: int = 512 << 20


def run_program(program: str, bounds: Bounds | None = None) -> Outcome:
    """Runs a Python program; it passes if it comes to its end without an exception.

    Args:
      program: its source.
      bounds: what it may use.

    Raises:
      ValueError: this machine cannot confine it; nothing was run.
    """
    bounds = bounds or Bounds()
    if not hasattr(os, "unshare"):
        raise ValueError("running what a model writes needs Linux, for limits and namespaces")
    with tempfile.TemporaryDirectory(prefix="zen-program-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(program + _END, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-S", confined.__file__, str(path)]
        process = subprocess.Popen(
            [*command, str(bounds.cpu_s), str(bounds.nbytes)],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(bounds.wall_s)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == confined.CANNOT_CONFINE:
        raise ValueError(
            "this machine cannot confine a program (user namespaces or seccomp are off), so what a "
            "model writes is not run; turn them on, or leave --human-eval out"
        )
    # The limit on processor time ends a program with SIGKILL, as soft and hard limit are one.
    out_of_time = status in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)
    return "passed" if status == _PASSED else "out of time" if out_of_time else "failed"
