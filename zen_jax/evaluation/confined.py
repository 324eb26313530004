"""Gives up what a program of a model must not have, then becomes that program.

Run as a script, by `zen_jax.evaluation.sandbox`, in a process of its own: confined.py PROGRAM
SECONDS BYTES. Linux only. It imports nothing of the project.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

# The exit status that says that the program was not run.
CANNOT_CONFINE = 117
FILE_BYTES = 1 << 20
OPEN_FILES = 32

# Machine -> its number for seccomp, and those of clone, clone3, fork and vfork, where it has them.
_CALLS = {
    "x86_64": (0xC000003E, (56, 435, 57, 58)),
    "aarch64": (0xC00000B7, (220, 435)),
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
# Of BPF: load a word, jump if equal, jump if at least, return (linux/filter.h).
_LOAD, _EQUAL, _LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: with EPERM


def main() -> int:
    """Confines this process and runs the program in a child of it."""
    program, seconds, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        # No network but an unconnected loopback, no other process in sight.
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC)
        child = os.fork()  # the first process of the new namespace: the others end with it
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return 128 - status if status < 0 else status
        _bound(seconds, nbytes)
        _alone()
    except OSError:
        return CANNOT_CONFINE
    os.execve(sys.executable, [sys.executable, "-I", "-S", program], {"HOME": os.getcwd()})


def _bound(seconds: int, nbytes: int) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, nbytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _alone() -> None:
    """No process and no thread can be started from now on, not even by root, for whom
    RLIMIT_NPROC does not count: seccomp's filter refuses the calls.

    Raises:
      OSError: this machine or kernel cannot do that.
    """
    if platform.machine() not in _CALLS:
        raise OSError("the numbers of system calls are not known here")
    machine, calls = _CALLS[platform.machine()]
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_LEAST, len(calls) + 1, 0, 0x40000000),  # x86's other set of numbers
        *((_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    whole = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, whole, 0, 0)):
        if libc.prctl(*(ctypes.c_ulong(v) if isinstance(v, int) else v for v in call)):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main())
