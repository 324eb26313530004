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
_TARGET = re.compile(r"`?\((\.L_\w+)\)")
_LEAVES = frozenset({"BRA", "EXIT", "RET"})


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its predicate, name, modifiers, and operands as text."""

    predicate: str
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

    def unpacking(self) -> list[Loop]:
        """The innermost loops that multiply with operands in registers."""
        loops = [
            body for body in self.loops() if any(self.instructions[at].in_registers for at in body)
        ]
        return [self._loop(body) for body in loops if not any(other < body for other in loops)]

    def loops(self) -> list[frozenset[int]]:
        """Every loop, as the places of its instructions.

        A loop is entered at one place only, its head, which each way into it passes. A branch
        backwards need not make one: what seldom happens is put behind everything else, and comes
        back by a branch.
        """
        starts = self._starts()
        after = {start: self._after(start, starts) for start in starts}
        before: dict[int, set[int]] = {start: set() for start in starts}
        for start, targets in after.items():
            for target in targets:
                before[target].add(start)
        dominators = _dominators(starts, before)
        found: dict[int, set[int]] = {}
        for start in starts:
            for head in after[start] & dominators[start]:
                body = found.setdefault(head, {head})
                waiting = [start]
                while waiting:
                    if (block := waiting.pop()) not in body:
                        body.add(block)
                        waiting += before[block]
        ends = dict(zip(starts, [*starts[1:], len(self.instructions)], strict=True))
        return [
            frozenset(at for start in body for at in range(start, ends[start]))
            for body in found.values()
        ]

    def _target(self, at: int) -> int | None:
        target = _TARGET.search(self.instructions[at].operands)
        return self.labels.get(target[1]) if target else None

    def _starts(self) -> list[int]:
        """Where runs of instructions begin that are done from first to last."""
        starts = {0}
        for at, each in enumerate(self.instructions):
            if each.name in _LEAVES:
                starts |= {at + 1, self._target(at) or 0}
        return sorted(start for start in starts if start < len(self.instructions))

    def _after(self, start: int, starts: list[int]) -> set[int]:
        """Where the run from `start` may go on."""
        following = next((s for s in starts if s > start), len(self.instructions))
        last = self.instructions[following - 1]
        targets = set()
        if last.name not in _LEAVES or last.predicate:
            targets.add(following)
        if last.name == "BRA" and (target := self._target(following - 1)) is not None:
            targets.add(target)
        return {target for target in targets if target < len(self.instructions)}

    def _loop(self, body: frozenset[int]) -> Loop:
        instructions = [self.instructions[at] for at in sorted(body)]
        products = [each for each in instructions if each.in_registers]
        integer = sum(each.name in INTEGER for each in instructions)
        per_weight = integer / (_WEIGHTS * len(products))
        kind = products[0].name + products[0].modifiers
        return Loop(kind, len(products), integer, per_weight, len(instructions))


def _dominators(starts: list[int], before: dict[int, set[int]]) -> dict[int, set[int]]:
    """Which runs are passed on every way to a run, itself among them."""
    found = {start: set(starts) for start in starts}
    found[starts[0]] = {starts[0]}
    changed = True
    while changed:
        changed = False
        for start in starts[1:]:
            ways = [found[way] for way in before[start]]
            now = (set.intersection(*ways) if ways else set()) | {start}
            changed |= now != found[start]
            found[start] = now
    return found


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
            parts = code[2] or "", code[3], code[4], code[5]
            instructions.append(Instruction(*(part.strip() for part in parts)))
    if instructions:
        found[name] = Function(name, tuple(instructions), labels)
    return found
