"""Files from strangers: read right, or refused with a line that names what is wrong."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from zen_jax.checkpoint import safetensors
from zen_jax.checkpoint.safetensors import (
    SourceError,
    count_not_finite,
    read_header,
    read_json,
    read_tensor,
)


def _file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_the_library_writes(tmp_path: Path, dtype: Any) -> None:
    tensors = {
        "a.weight": np.arange(12).reshape(3, 4).astype(dtype),
        "b": np.linspace(-1, 1, 5).astype(dtype),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "m.safetensors")
    assert sorted(found) == ["a.weight", "b"]
    for name, expected in tensors.items():
        values = read_tensor(found[name])
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        ({"a": _entry(0, 8, [2])}, b"\0" * 4, "cut short"),
        ({"a": _entry(0, 8, [2])}, b"\0" * 9, "1 bytes that belong to no tensor"),
        ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, b"\0" * 12, "overlaps"),
        ({"a": _entry(0, 4, [1]), "b": _entry(8, 12, [1])}, b"\0" * 12, "leaves a hole"),
        ({"a": _entry(0, 8, [3])}, b"\0" * 8, "do not fit F32"),
        ({"a": _entry(0, 8, [-2])}, b"\0" * 8, "malformed"),
        ({"a": _entry(8, 0, [2])}, b"\0" * 8, "do not fit"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "malformed"),
        ({"a": 3}, b"", "malformed"),
        ({"../a": _entry(0, 8, [2])}, b"\0" * 8, "'../a' is not allowed"),
        ({"/etc/a": _entry(0, 8, [2])}, b"\0" * 8, "not allowed"),
        ({"a..b": _entry(0, 8, [2])}, b"\0" * 8, "not allowed"),
        ({"": _entry(0, 8, [2])}, b"\0" * 8, "not allowed"),
        ([], b"", "not an object"),
        (b'{"a"', b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": {"dtype": "F32"}, "a": {"dtype": "F32"}}', b"", "'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", "'dtype' occurs twice"),
    ],
)
def test_refuses_and_says_why(tmp_path: Path, header: Any, data: bytes, problem: str) -> None:
    path = _file(tmp_path / "m.safetensors", header, data)
    with pytest.raises(SourceError, match=r"m\.safetensors: ") as error:
        read_header(path)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_caps_are_checked_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", safetensors.MAX_HEADER_BYTES + 1) + b"{}")
    with pytest.raises(SourceError, match="header of 16777217 bytes; at most 16777216"):
        read_header(path)
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 3)
    monkeypatch.setattr(safetensors.json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(SourceError, match="more than 3 tensors"):
        read_header(_file(path, {f"t{i}": _entry(0, 0, [0]) for i in range(4)}))


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.int8)}, tmp_path / "m.safetensors")
    with pytest.raises(SourceError, match="w is I8; expected one of BF16, F16, F32"):
        read_tensor(read_header(tmp_path / "m.safetensors")["w"])


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": np.zeros(1000, np.float32)}, path)
    found = read_header(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match="ended inside w"):
        read_tensor(found["w"])


def test_json_files_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(SourceError, match="expected an object"):
        read_json(path)
    monkeypatch.setattr(safetensors, "MAX_JSON_BYTES", 2)
    with pytest.raises(SourceError, match="larger than 2 bytes"):
        read_json(path)


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=50),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_counts_every_value_that_is_not_finite(values: list[float], dtype: str) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(values, np.float32).astype(np.dtype(dtype))
    expected = int(np.count_nonzero(~np.isfinite(array.astype(np.float32))))
    assert count_not_finite(array) == expected


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_in_one_way(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    try:
        assert isinstance(read_header(path), dict)
    except SourceError as error:
        assert error.problems
