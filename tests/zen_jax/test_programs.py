"""Programs compiled ahead: counted, refused when they do not fit, kept on disk."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.programs import Programs, keep_compiled

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)


def programs() -> Programs:
    made = Programs()
    for times in (2, 3, 4):
        made.add(times, f"times {times}", jax.jit(lambda x, t=times: x * t), lambda: (VECTOR,))
    return made


def test_all_are_compiled_and_told_of_and_none_twice() -> None:
    made, told = programs(), []
    assert np.asarray(made(3, np.ones(4, np.float32))).tolist() == [3.0] * 4
    assert made.compiles == 1
    made.compile_all(lambda *what: told.append(what))
    assert sorted(name for name, _, _ in told) == ["times 2", "times 4"]
    assert [what[1:] for what in told] == [(1, 2), (2, 2)]
    assert made.compiles == 3
    made(2, np.ones(4, np.float32))
    assert made.compiles == 3


def test_another_shape_is_refused_and_not_compiled() -> None:
    made = programs()
    made.compile_all()
    with pytest.raises(TypeError, match=r"compiled with float32\[4\]"):
        made(2, np.ones(5, np.float32))
    assert made.compiles == 3


def test_who_is_told_may_end_it() -> None:
    def enough(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        programs().compile_all(enough)


def test_a_donated_array_that_cannot_be_reused_is_an_error() -> None:
    made = Programs()
    made.add("sum", "sum", jax.jit(jnp.sum, donate_argnums=0), lambda: (VECTOR,))
    for start in (made.compile_all, lambda: made("sum", jnp.ones(4))):
        with pytest.raises(UserWarning, match="donated buffers were not usable"):
            start()


@pytest.fixture
def unset() -> Any:
    """JAX as it is when nobody has told it of a folder."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_are_kept_in_the_users_cache(
    unset: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = keep_compiled()
    assert folder is not None and folder.parent == tmp_path / "zen-jax" / "compiled"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert keep_compiled(tmp_path / "other") == folder, "what was chosen stands"


def test_nothing_is_kept_where_nothing_can_be_written(
    unset: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert keep_compiled(file / "below") is None
    monkeypatch.setattr(os, "access", lambda *what: False)
    assert keep_compiled(tmp_path / "read-only") is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize(("which", "mode"), [(".", 0o770), (".", 0o702), ("..", 0o777)])
def test_nothing_is_kept_where_others_can_write(
    unset: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str, mode: int
) -> None:
    folder = tmp_path / "caches" / "compiled"
    folder.mkdir(parents=True)
    (folder / which).chmod(mode)
    assert keep_compiled(folder) is None and "can be written by others" in caplog.text
    (folder / which).chmod(0o1777 if which == ".." else 0o700)  # of a sticky folder nothing moves
    assert keep_compiled(folder) == folder


def test_nothing_is_kept_in_anothers_folder(
    unset: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert keep_compiled(tmp_path) is None
