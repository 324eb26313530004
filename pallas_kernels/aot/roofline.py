"""How long a product should take on a Hopper card, from what its kernel was compiled to.

The longest of four: bytes over the memory's bandwidth; for the tiles of a long prompt, bytes from
the L2; instructions over what a multiprocessor issues and its integer units do; matrix operations.
That and a constant for the start. It is a prediction: nothing here was measured on a card. What is
assumed stands in the constants, the same for the base's product, which the others are held against.
"""

import dataclasses

from pallas_kernels.aot.sass import Loop
from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.bitdelta_matmul.mosaic_plan import padded_rows
from pallas_kernels.bitdelta_matmul.mosaic_rows import MULTIPROCESSORS, RowsTuning
from pallas_kernels.bitdelta_matmul.mosaic_tiles import HIGH, TilesTuning

CARDS = {"H100": 3.35e12, "H200": 4.8e12}  # SXM; bytes/s from memory
CLOCK = 1.755e9  # under load
REACHED = 0.92  # of the memory's bandwidth, by a kernel that does nothing but read
L2 = 5.5e12  # bytes/s, all multiprocessors together
INTEGER_LANES, ISSUED_LANES = 64, 128  # of a multiprocessor in a cycle
# Cycles of a wgmma of 64 outputs and 16 inputs: half its rows, but not under this. For few rows the
# left side's way to the tensor cores counts; 16 cycles is that of one from shared memory.
LEAST_CYCLES = 16
START = 3e-6  # s: launch, first copies, last store


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a product does, and its time on each card in seconds."""

    bytes: float
    integer: float  # integer instructions, of single threads
    matrix: float  # floating-point operations
    time: dict[str, float]
    bound: dict[str, float]  # bytes, or matrix operations, at the peak

    def fraction(self, card: str) -> float:
        """Of the bound that is reached."""
        return self.bound[card] / self.time[card]


def _estimate(
    bytes_: float, integer: float, matrix: float, busy: float, work: float, l2: float = 0.0
) -> Estimate:
    """From bytes, operations, and `work` in cycles of one multiprocessor, `busy` of which have it.

    Args:
      bytes_: from and to memory.
      integer: integer instructions of single threads.
      matrix: floating-point operations.
      busy: share of the multiprocessors that have work, over all waves of programs.
      work: cycles, if one multiprocessor did all.
      l2: bytes from the L2.
    """
    cycles = work / (MULTIPROCESSORS * busy * CLOCK)
    peak = MULTIPROCESSORS * CLOCK * 4096
    time = {
        card: max(bytes_ / (rate * REACHED), cycles, l2 / L2) + START
        for card, rate in CARDS.items()
    }
    bound = {card: max(bytes_ / rate, matrix / peak) for card, rate in CARDS.items()}
    return Estimate(bytes_, integer, matrix, time, bound)


def _busy(programs: int) -> float:
    return programs / (-(-programs // MULTIPROCESSORS) * MULTIPROCESSORS)


def base_rows(rows: int, outputs: int, inputs: int) -> Estimate:
    """x W^T of few rows, by a kernel that does as well as the memory lets it."""
    of = 2.0 * outputs * inputs + 2 * rows * inputs + 4 * rows * outputs
    return _estimate(of, 0, 2.0 * rows * outputs * inputs, 1, 0)


def fused_rows(
    rows: int, outputs: int, inputs: int, entries: int, width: int, tuning: RowsTuning, loop: Loop
) -> Estimate:
    """The decode kernel.

    Args:
      rows: B.
      outputs: O.
      inputs: I.
      entries: variants times levels in the batch.
      width: rows that an entry is multiplied with.
      tuning: as it was compiled.
      loop: its unpacking.
    """
    high = layout.padded(outputs, layout.PADDED_ROWS)
    wide = layout.padded(inputs, layout.PADDED_COLUMNS)
    weights = float(high * wide)
    parts = tuning.splits * high * padded_rows(rows) * 4
    of = base_rows(rows, high, inputs).bytes + entries * weights / 8 + 2 * parts
    each = 8 * loop.count  # weights that a thread unpacks in a turn
    integer = entries * weights * loop.integer / each
    issued = entries * weights * loop.all / each
    products = weights / (layout.ROWS * 16)
    cycles = products * (
        max(LEAST_CYCLES, padded_rows(rows) / 2) + entries * max(LEAST_CYCLES, width / 2)
    )
    work = max(integer / INTEGER_LANES, issued / ISSUED_LANES, cycles)
    matrix = 2.0 * rows * outputs * inputs * (1 + entries)
    busy = _busy(high // layout.PADDED_ROWS * tuning.splits)
    return _estimate(of, integer, matrix, busy, work)


def tiles(
    rows: int,
    outputs: int,
    inputs: int,
    tuning: TilesTuning,
    loop: Loop | None,
    products: int,
) -> Estimate:
    """The prefill kernel, or without a loop a plain product by the same tiles.

    Args:
      rows: T.
      outputs: O.
      inputs: I.
      tuning: as it was compiled.
      loop: its unpacking.
      products: matrix products, 1 with reconstruction and 2 without.
    """
    high = layout.padded(outputs, HIGH)
    wide = layout.padded(inputs, layout.COLUMNS)
    signs = high * wide / 8 if loop else 0.0
    of = 2.0 * high * wide + signs + 2 * rows * wide + 4 * rows * high
    programs = -(-rows // tuning.rows) * (high // HIGH)
    of_program = wide * (2 * HIGH + 2 * tuning.rows / tuning.cluster) + signs / (high / HIGH)
    cycles = programs * (wide / 16) * (HIGH / layout.ROWS) * (tuning.rows / 2) * products
    integer = issued = 0.0
    if loop:
        weights = programs * HIGH * float(wide)
        integer = weights * loop.integer / (8 * loop.count)
        issued = weights * loop.all / (8 * loop.count)
    work = max(integer / INTEGER_LANES, issued / ISSUED_LANES, cycles)
    matrix = 2.0 * rows * outputs * inputs
    return _estimate(of, integer, matrix, _busy(programs), work, programs * of_program)
