"""Headers of safetensors files, read with every size checked before it is believed.

A file is a little-endian uint64 (bytes of the header), the header (JSON: name -> dtype, shape and
offsets), and the tensors' bytes back to back. Files come from strangers, so sizes and counts are
capped before anything is parsed, and duplicate names, holes, overlaps and missing or trailing
bytes are refused.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER_BYTES = 16 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_TENSORS = 100_000

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2}
_SIZES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class SourceError(ValueError):
    """A checkpoint that cannot be converted; every problem that was found is named.

    Attributes:
      problems: one line each.
    """

    def __init__(self, where: str, problems: str | list[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        shown = "; ".join(self.problems[:8])
        if len(self.problems) > 8:
            shown += f"; and {len(self.problems) - 8} more"
        count = f"{len(self.problems)} problems: " if len(self.problems) > 1 else ""
        super().__init__(f"{where}: {count}{shown}")


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """Where one tensor lies.

    Attributes:
      name: as in the file.
      dtype: as in the file, "BF16" and so on.
      shape: true shape.
      file: the file that holds it.
      start: its first byte in the file.
      size: its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def parse_json(data: bytes, where: str) -> Any:
    """Parses JSON in which no object has a key twice.

    Raises:
      SourceError: it is no JSON, is nested too deeply, or has a duplicate key, which is named.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise SourceError(where, f"{twice!r} occurs twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=once)
    except SourceError:
        raise
    except (ValueError, RecursionError) as error:
        raise SourceError(where, f"is not valid JSON ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a small JSON object from a file.

    Raises:
      SourceError: the file is missing, larger than `MAX_JSON_BYTES`, or no JSON object.
    """
    if not path.is_file():
        raise SourceError(str(path.parent), f"has no {path.name}")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise SourceError(path.name, f"is larger than {MAX_JSON_BYTES} bytes")
    value = parse_json(path.read_bytes(), path.name)
    if not isinstance(value, dict):
        raise SourceError(path.name, f"holds a {type(value).__name__}; expected an object")
    return value


def read_header(path: Path) -> dict[str, SourceTensor]:
    """The tensors of one safetensors file, by name; no tensor is read.

    Raises:
      SourceError: the file is damaged, short, or refused for one of the reasons above.
    """
    if not path.is_file():
        raise SourceError(path.name, "is missing, or is not a file")
    total = path.stat().st_size
    with open(path, "rb") as file:
        lead = file.read(8)
        if len(lead) < 8:
            raise SourceError(path.name, f"is cut short: {total} bytes, no header")
        length = int.from_bytes(lead, "little")
        if length > MAX_HEADER_BYTES:
            raise SourceError(
                path.name, f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        if 8 + length > total:
            raise SourceError(
                path.name, f"is cut short: {total} bytes, its header alone takes {8 + length}"
            )
        data = file.read(length)
    # Each entry has one "dtype": a cheap bound on the count before the parser allocates.
    if data.count(b'"dtype"') > MAX_TENSORS:
        raise SourceError(path.name, f"has more than {MAX_TENSORS} tensors")
    header = parse_json(data, path.name)
    if not isinstance(header, dict):
        raise SourceError(path.name, "has a header that is not an object")
    header.pop("__metadata__", None)
    tensors = {
        name: _tensor(path, name, entry, 8 + length, total) for name, entry in header.items()
    }
    _check_layout(path, tensors, 8 + length, total)
    return tensors


def _tensor(path: Path, name: str, entry: Any, data_start: int, total: int) -> SourceTensor:
    if not _NAME.fullmatch(name) or ".." in name:
        raise SourceError(path.name, f"tensor name {name!r} is not allowed")
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(path.name, f"{name} has a malformed entry ({error!r})") from error
    if not whole or not isinstance(dtype, str) or len(shape) > 8:
        raise SourceError(path.name, f"{name} has a malformed entry")
    if data_start + end > total:
        raise SourceError(
            path.name,
            f"is cut short: {name} ends at byte {data_start + end}, the file has {total}",
        )
    if dtype in _SIZES and math.prod(shape) * _SIZES[dtype] != end - start:
        raise SourceError(
            path.name, f"{name} has {end - start} bytes, which do not fit {dtype}{list(shape)}"
        )
    return SourceTensor(name, dtype, shape, path, data_start + start, end - start)


def _check_layout(
    path: Path, tensors: Mapping[str, SourceTensor], data_start: int, total: int
) -> None:
    """Every byte belongs to exactly one tensor."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.size)):
        if tensor.start != position:
            problem = "overlaps another tensor" if tensor.start < position else "leaves a hole"
            raise SourceError(path.name, f"{tensor.name} {problem} at byte {position}")
        position += tensor.size
    if position != total:
        raise SourceError(path.name, f"has {total - position} bytes that belong to no tensor")


def read_tensor(tensor: SourceTensor) -> np.ndarray:
    """One tensor, in its own dtype and shape; nothing else of the file is read.

    Raises:
      SourceError: its dtype is not one of `DTYPES`, or the file has become shorter.
    """
    if tensor.dtype not in DTYPES:
        raise SourceError(
            tensor.file.name,
            f"{tensor.name} is {tensor.dtype}; expected one of {', '.join(DTYPES)}",
        )
    # An array of its own, not a map of the file: pages of a map would count as this process's.
    data = np.empty(tensor.size, np.uint8)
    view, done = memoryview(data), 0
    handle = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while done < tensor.size:
            count = os.preadv(handle, [view[done:]], tensor.start + done)
            if count == 0:
                raise SourceError(
                    tensor.file.name, f"ended inside {tensor.name}; was it changed meanwhile?"
                )
            done += count
    finally:
        os.close(handle)
    return data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def count_not_finite(values: np.ndarray) -> int:
    """How many elements are NaN or infinite.

    Args:
      values: bfloat16, float16 or float32, contiguous.
    """
    mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[values.dtype.name]
    flat = values.reshape(-1).view(np.dtype(f"u{values.dtype.itemsize}"))
    masked, block, count = flat.dtype.type(mask), 1 << 20, 0
    for start in range(0, flat.size, block):
        count += int(np.count_nonzero((flat[start : start + block] & masked) == masked))
    return count
