"""What a model writes runs within its bounds: each bound is met by a program that needs more."""

import os
import socket
import threading

import pytest

from zen_jax.evaluation import confined, sandbox
from zen_jax.evaluation.sandbox import Bounds, run_program

SOON = Bounds(cpu_s=1, wall_s=20.0)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("x = sorted([2, 1])\nassert x == [1, 2]", "passed"),
        ("assert 1 == 2", "failed"),
        ("def f(:", "failed"),
        ("raise SystemExit(0)", "failed"),  # leaving early is no success
        ("import os; os._exit(0)", "failed"),
        ("while True: pass", "out of time"),
        ("x = bytearray(600 << 20)", "failed"),
        ("x = bytearray(100 << 20)", "passed"),
        ("import os; os.fork()", "failed"),
        ("import threading; threading.Thread(target=print).start()", "failed"),
        ("import subprocess; subprocess.run(['true'])", "failed"),
        ("open('large', 'wb').write(bytes(2 << 20))", "failed"),
        ("open('small', 'wb').write(bytes(1 << 19))", "passed"),
        ("files = [open(__file__) for _ in range(40)]", "failed"),
        ("import os; assert set(os.environ) <= {'HOME', 'LC_CTYPE'}", "passed"),
        ("import os; assert os.getpid() == 1 and os.listdir('.') == ['program.py']", "passed"),
        ("import sys; sys.stdin.read() and 1 / 0", "passed"),
        ("'\ud800'", "passed"),  # what cannot be written as UTF-8 is replaced
    ],
)
def test_bounds(program: str, outcome: str) -> None:
    assert run_program(program, SOON) == outcome


def test_a_sleeper_is_ended(tmp_path) -> None:
    assert run_program("import time; time.sleep(60)", Bounds(wall_s=0.5)) == "out of time"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        called = []
        server.settimeout(20)

        def accept() -> None:
            connection, address = server.accept()
            called.append(address)
            connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        assert run_program(reach, SOON) == "failed"
        socket.create_connection(("127.0.0.1", port), 2).close()  # it is there for others
        thread.join()
        assert len(called) == 1


def test_a_machine_that_cannot_confine_runs_nothing(monkeypatch, tmp_path) -> None:
    script = tmp_path / "confined.py"
    script.write_text(f"import sys; sys.exit({confined.CANNOT_CONFINE})")
    monkeypatch.setattr(sandbox.confined, "__file__", str(script))
    with pytest.raises(ValueError, match="this machine cannot confine a program"):
        run_program("x = 1")
    monkeypatch.delattr(os, "unshare")
    with pytest.raises(ValueError, match="needs Linux"):
        run_program("x = 1")
