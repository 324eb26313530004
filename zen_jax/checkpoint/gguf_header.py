"""The header of a GGUF file: its settings and where its tensors lie, nothing believed unchecked.

The layout, all little-endian: "GGUF", version uint32, number of tensors and of settings uint64;
settings (key, type uint32, value); tensors (name, number of dimensions uint32, dimensions uint64
from the innermost, type uint32, offset uint64); then, aligned, the tensors. A string is its length
in bytes, uint64, and UTF-8.

The gguf library's own reader is not used on files from strangers: it makes a NumPy view of every
element of every array before anything can be refused, and reads past the end without a word.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from zen_jax.checkpoint.safetensors import MAX_TENSORS, SourceError

MAX_HEADER_BYTES = 128 * 2**20
MAX_SETTINGS = 4096
MAX_KEY_BYTES = 1024
MAX_ELEMENTS = 4 * 2**20
_MAX_ALIGNMENT = 2**20
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies, as the file names it.

    Attributes:
      name: as in the file.
      kind: how its values are coded.
      shape: outermost dimension first, as NumPy has it.
      start: its first byte in the file.
      size: its bytes.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself.

    Attributes:
      settings: by key; arrays are lists.
      tensors: by the file's names.
    """

    settings: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """Reads a header in order, never past its cap or the end of the file."""

    def __init__(self, file: BinaryIO, name: str, total: int):
        self._file, self._name, self._total = file, name, total
        self.position = 0

    def fail(self, problem: str) -> SourceError:
        return SourceError(self._name, problem)

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self._total:
            raise self.fail(f"is cut short: {self._total} bytes end inside its header")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        self.position = end
        return self._file.read(count)

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack(self.take(layout.size))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.fail(f"has a text of {length} bytes; at most {limit} are read")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.fail("has a text that is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"gives {key!r} a value of the unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if count > MAX_ELEMENTS:
            raise self.fail(f"gives {key!r} {count} values; at most {MAX_ELEMENTS} are read")
        if element == _STRING:
            return [self.text() for _ in range(count)]
        if element not in _SCALARS:
            raise self.fail(f"gives {key!r} an array of the unknown type {element}")
        return list(self.numbers(_SCALARS[element], count))


def read_header(path: Path) -> Header:
    """Reads what comes before the tensors.

    Raises:
      SourceError: the file is damaged, short, split over several files, or larger than the caps;
        or it has a key or a tensor twice, or tensors that overlap.
    """
    if not path.is_file():
        raise SourceError(path.name, "is missing, or is not a file")
    total = path.stat().st_size
    with open(path, "rb") as file:
        cursor = _Cursor(file, path.name, total)
        if total < 24 or cursor.take(4) != b"GGUF":
            raise cursor.fail("is no GGUF file")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise cursor.fail(f"has GGUF version {version}; versions 2 and 3 are read")
        count, settings_count = cursor.numbers("Q", 2)
        if count > MAX_TENSORS or settings_count > MAX_SETTINGS:
            raise cursor.fail(
                f"has {count} tensors and {settings_count} settings; at most {MAX_TENSORS} and "
                f"{MAX_SETTINGS} are read"
            )
        settings: dict[str, Any] = {}
        for _ in range(settings_count):
            key = cursor.text(MAX_KEY_BYTES)
            if key in settings:
                raise cursor.fail(f"has the setting {key!r} twice")
            settings[key] = cursor.value(cursor.number("I"), key)
        entries = [_entry(cursor) for _ in range(count)]
    if settings.get("split.count", 1) not in (0, 1):
        raise cursor.fail(f"is one of {settings['split.count']} files; merge them first")
    tensors = _place(cursor, entries, _alignment(cursor, settings), total)
    return Header(settings, tensors)


def _entry(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    """Name, type, shape and relative offset of one tensor."""
    name = cursor.text(MAX_KEY_BYTES)
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= 4:
        raise cursor.fail(f"gives {name!r} {dimensions} dimensions; expected 1 to 4")
    shape = tuple(reversed(cursor.numbers("Q", dimensions)))
    raw, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = GGMLQuantizationType(raw)
    except ValueError:
        raise cursor.fail(f"codes {name!r} in the unknown type {raw}") from None
    return name, kind, shape, offset


def _alignment(cursor: _Cursor, settings: dict[str, Any]) -> int:
    value = settings.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"has alignment {value!r}; expected a power of two")
    return value


def _place(
    cursor: _Cursor,
    entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]],
    alignment: int,
    total: int,
) -> dict[str, StoredTensor]:
    """Each tensor's bytes in the file: all inside it, none shared, none but padding left over."""
    data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, kind, shape, offset in entries:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block:
            raise cursor.fail(
                f"gives {name!r} the shape {shape}; {kind.name} has blocks of {block}"
            )
        if name in tensors:
            raise cursor.fail(f"has the tensor {name!r} twice")
        size = math.prod(shape) // block * block_bytes
        tensors[name] = StoredTensor(name, kind, shape, data + offset, size)
    end = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.size)):
        if tensor.start < end or tensor.start - end >= alignment:
            problem = "overlaps another tensor" if tensor.start < end else "leaves a hole"
            raise cursor.fail(f"{tensor.name!r} {problem} at byte {end}")
        end = tensor.start + tensor.size
        if end > total:
            raise cursor.fail(
                f"is cut short: {tensor.name!r} ends at byte {end}, the file has {total}"
            )
    if total - end >= alignment:
        raise cursor.fail(f"has {total - end} bytes that belong to no tensor")
    return tensors
