"""Cards that a plan can be made for, from their makers' data sheets.

What a card tells a program of its memory is less than its name says; that is what stands here.
"""

import dataclasses
import re

_CHIPS = re.compile(r"(?:([0-9]+)x)?([A-Za-z0-9]+)")
_MOST = 16


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of card.

    Attributes:
      name: as it is asked for.
      memory: bytes that a program sees.
      bandwidth: bytes/s from memory.
      flops: matrix operations/s in bfloat16, dense.
      flops_8: the same of 8-bit numbers; as many as `flops` where there is no faster way.
      multiprocessors: how many.
      clock: Hz under load.
      link: bytes/s to the other cards, in one direction.
      reduce_start: s that a sum over the cards takes beside its bytes.
      ordered: whether the Hopper kernels run on it, and signs lie in their order.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    flops_8: float
    multiprocessors: int
    clock: float
    link: float
    reduce_start: float
    ordered: bool

    @property
    def flops_per_cycle(self) -> float:
        """Matrix operations of one multiprocessor in a cycle, in bfloat16."""
        return self.flops / (self.multiprocessors * self.clock)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("H100", 84929347584, 3.35e12, 989e12, 1979e12, 132, 1.755e9, 450e9, 12e-6, True),
        Chip("H200", 150110011392, 4.8e12, 989e12, 1979e12, 132, 1.755e9, 450e9, 12e-6, True),
        Chip("A100", 84987740160, 2.039e12, 312e12, 312e12, 108, 1.41e9, 300e9, 15e-6, False),
        Chip("L40S", 47667216384, 0.864e12, 362e12, 733e12, 142, 2.2e9, 25e9, 30e-6, False),
    )
}


def parse_chips(text: str) -> tuple[Chip, int]:
    """Reads "8xH100", or "H100" for one.

    Raises:
      ValueError: the card is not known, or there are more or fewer than 1 to 16.
    """
    found = _CHIPS.fullmatch(text.strip())
    if found is None or found[2].upper() not in CHIPS:
        known = ", ".join(CHIPS)
        raise ValueError(f"--chips is {text!r}; expected such as 8xH100, of {known}")
    count = int(found[1] or 1)
    if not 1 <= count <= _MOST:
        raise ValueError(f"--chips is {text!r}; expected 1 to {_MOST} cards")
    return CHIPS[found[2].upper()], count
