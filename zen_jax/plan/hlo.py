"""What a compiled program does, read from its text: kernels, collectives, copies of what is held.

The text is XLA's, after all of its passes. Instructions inside a fusion make no arrays of their
own, so only those outside are looked at; a fusion is known by what it has inside.
"""

import dataclasses
import math
import re

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# Pass arrays on without touching them.
_PLUMBING = frozenset(
    "parameter get-tuple-element tuple bitcast while conditional call custom-call "
    "all-reduce all-reduce-start all-reduce-done opt-barrier".split()
)
# Read or write a part of an array, in place where they write.
_PARTS = frozenset("gather scatter dynamic-slice dynamic-update-slice".split())
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

# dtype and number of elements
type Kind = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: of its result.
      opcode: what it does.
      results: each array of its result.
      operands: names.
      line: as it stands.
    """

    name: str
    opcode: str
    results: tuple[Kind, ...]
    operands: tuple[str, ...]
    line: str


def nbytes(kind: Kind) -> int:
    """Bytes of an array."""
    dtype, count = kind
    digits = re.search(r"[0-9]+", dtype)
    bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(digits[0]) if digits else 8)
    return count * bits // 8


def parse(text: str) -> dict[str, list[Instruction]]:
    """Every computation of a module by its name."""
    found: dict[str, list[Instruction]] = {}
    here: list[Instruction] | None = None
    for line in text.splitlines():
        if here is None:
            start = _COMPUTATION.match(line)
            if start is not None and "->" in line:
                here = found.setdefault(start[1], [])
        elif line.strip() == "}":
            here = None
        elif (made := _instruction(line)) is not None:
            here.append(made)
    return found


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    rest = match[2]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest[end:].lstrip())
    if opcode is None:
        return None
    start = rest.index(opcode[0], end) + len(opcode[0]) - 1
    inside = rest[start : _closing(rest, start)]
    results = tuple(
        (dtype, math.prod(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(rest[:end])
    )
    return Instruction(match[1], opcode[1], results, tuple(_NAME.findall(inside)), rest)


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    return len(text)


class Program:
    """A compiled program."""

    def __init__(self, text: str) -> None:
        self._computations = parse(text)
        fused = {
            name
            for body in self._computations.values()
            for one in body
            if one.opcode == "fusion"
            for name in _CALLS.findall(one.line)
        }
        # What is called by a fusion, a reduction or a sort makes no arrays of its own.
        inner = re.findall(r"(?:to_apply|comparator)=%?([\w.\-]+)", text)
        self._outer = {
            name: body
            for name, body in self._computations.items()
            if name not in fused and name not in inner
        }

    def kernels(self, target: str = "mosaic_gpu") -> int:
        """Calls of our own kernels."""
        return sum(
            one.opcode == "custom-call" and any(target in t for t in _TARGET.findall(one.line))
            for body in self._outer.values()
            for one in body
        )

    def collectives(self) -> dict[str, list[int]]:
        """The bytes of each one's result, by kind."""
        found: dict[str, list[int]] = {}
        for body in self._outer.values():
            for one in body:
                name = one.opcode.removesuffix("-start")
                if name not in COLLECTIVES:
                    continue
                # One that is begun and ended apart has its operand in its result too.
                result = one.results[-1] if one.opcode.endswith("-start") else one.results[0]
                found.setdefault(name, []).append(nbytes(result))
        return found

    def copies(self, held: set[Kind]) -> list[str]:
        """Instructions that make an array, at least half as large, of one that is held.

        Args:
          held: dtype and elements of each array that is to stay where it is.

        Returns:
          Their lines, cut; none when nothing is copied.
        """
        found = []
        for body in self._outer.values():
            results = {one.name: one.results for one in body}
            for one in body:
                if one.opcode in _PLUMBING or one.opcode.endswith("-done") or self._of_parts(one):
                    continue
                sources = [k for name in one.operands for k in results.get(name, ()) if k in held]
                largest = max((nbytes(kind) for kind in one.results), default=0)
                if sources and 2 * largest >= min(map(nbytes, sources)):
                    found.append(one.line[:160])
        return found

    def _of_parts(self, one: Instruction) -> bool:
        """Whether an instruction reads or writes parts of an array."""
        if one.opcode != "fusion":
            return one.opcode in _PARTS
        inside = (
            inner for name in _CALLS.findall(one.line) for inner in self._computations.get(name, ())
        )
        return any(inner.opcode in _PARTS for inner in inside)
