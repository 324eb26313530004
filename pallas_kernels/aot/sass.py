"""Counts what a compiled kernel does, from its SASS (the processor's own instructions).

`functions` reads the listing of nvdisasm. `unpacking` finds the loops in which packed signs are
multiplied, wgmma with its left side in registers, and says how many integer instructions each
costs for a weight.
"""

import dataclasses
import re
from collections import Counter

# Of a thread, for each multiplication whose left side is 64 x 16 (16-bit) in registers.
_WEIGHTS = 64 * 16 // 128

# Instructions of the integer units. Moves by IMAD and shifts by IMAD count too, though they run
# beside them; what the uniform datapath does once for a warp does not.
INTEGER = frozenset(
    "BFI BFE BMSK BREV FLO IABS IADD IADD3 IDP IMAD IMNMX IMUL ISCADD ISETP LEA LOP LOP3 PLOP3 "
    "POPC PRMT SEL SGXT SHF SHL SHR VABSDIFF VIADD VIADDMNMX VIMNMX I2I I2IP".split()
)
SPILLS = frozenset({"LDL", "STL"})

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)(.*);")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_SECTION = re.compile(r"^\s*(?:\.section\s+)?\.text\.([^\s,:]+)(?:,|:)")
_TARGET = re.compile(r"\((\.L_\w+)\)|`\((\.L_\w+)\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its name without and with modifiers, its operands as text."""

    name: str
    modifiers: str
    operands: str

    @property
    def in_registers(self) -> bool:
        """Whether it is a wgmma whose left side is in registers."""
        operands = [text.strip() for text in self.operands.split(",")]
        return self.name == "HGMMA" and len(operands) > 1 and operands[1].startswith("R")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that has none inside and multiplies operands in registers."""

    multiplications: str  # its wgmma, such as HGMMA.64x8x16.F32.BF16
    count: int  # of them in one turn
    integer: int  # integer instructions in one turn
    per_weight: float  # integer instructions for a weight
    all: int  # instructions in one turn


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel's instructions, in order, and where its labels are."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def counts(self) -> Counter[str]:
        """How often each instruction occurs."""
        return Counter(each.name for each in self.instructions)

    def loops(self) -> list[tuple[int, int]]:
        """First and last instruction of every loop: of every branch backwards."""
        found = []
        for last, each in enumerate(self.instructions):
            if each.name != "BRA" or not (target := _TARGET.search(each.operands)):
                continue
            first = self.labels[target[1] or target[2]]
            # A branch to itself is the end of the listing.
            if first < last:
                found.append((first, last))
        return found

    def unpacking(self) -> list[Loop]:
        """The innermost loops that multiply with operands in registers."""
        of_interest = [
            (first, last)
            for first, last in self.loops()
            if any(each.in_registers for each in self.instructions[first : last + 1])
        ]
        innermost = [
            (first, last)
            for first, last in of_interest
            if not any((a, b) != (first, last) and a >= first and b <= last for a, b in of_interest)
        ]
        return [self._loop(first, last) for first, last in innermost]

    def _loop(self, first: int, last: int) -> Loop:
        body = self.instructions[first : last + 1]
        products = [each for each in body if each.in_registers]
        integer = sum(each.name in INTEGER for each in body)
        per_weight = integer / (_WEIGHTS * len(products))
        kind = products[0].name + products[0].modifiers
        return Loop(kind, len(products), integer, per_weight, len(body))


def functions(listing: str) -> dict[str, Function]:
    """Reads a listing of `nvdisasm -c`."""
    found: dict[str, Function] = {}
    name, instructions, labels = "", [], {}
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            if instructions:
                found[name] = Function(name, tuple(instructions), labels)
            if section[1] != name:
                name, instructions, labels = section[1], [], {}
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif code := _INSTRUCTION.search(line):
            instructions.append(Instruction(code[3], code[4], code[5].strip()))
    if instructions:
        found[name] = Function(name, tuple(instructions), labels)
    return found
