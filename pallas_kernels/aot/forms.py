"""What is compiled for Hopper: the kernels' forms, at the weights of the models they are for."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import h100
from pallas_kernels.aot.compile import Kernel, Report, report
from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.bitdelta_matmul import mosaic_plan, mosaic_rows, mosaic_tiles

# A Hopper multiprocessor: registers, and bytes of shared memory that a program may have.
REGISTERS, SHARED = 65536, 227 << 10
# Integer instructions for a weight: of signs by themselves, and added to a weight.
UNPACKED, RECONSTRUCTED = 1.0, 1.5
ROWS, VARIANTS, PROMPT = 16, 14, 2048

# O and I of each weight on one card. Fused: q, k and v; gate and up.
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "Llama-3.1-8B on 1": {
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate, up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "Llama-3.1-70B on 8": {
        "qkv": (1280, 8192),
        "out": (8192, 1024),
        "gate, up": (7168, 8192),
        "down": (8192, 3584),
        "head": (16032, 8192),
    },
    "Qwen2.5-72B on 8": {
        "qkv": (1280, 8192),
        "out": (8192, 1024),
        "gate, up": (7392, 8192),
        "down": (8192, 3696),
        "head": (19008, 8192),
    },
}


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel to compile.

    name: as the table has it.
    warpgroups: of a program.
    limit: integer instructions for a weight.
    make: for O and I, the function and its arguments' shapes and dtypes.
    """

    name: str
    warpgroups: int
    limit: float
    make: Callable[[int, int], tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]]


def _weights(outputs: int, inputs: int) -> list[tuple[tuple[int, ...], Any]]:
    """The weight, padded as at load, its signs and its scales, of 14 variants."""
    high, wide = (
        layout.padded(outputs, layout.PADDED_ROWS),
        layout.padded(inputs, layout.PADDED_COLUMNS),
    )
    blocks = (VARIANTS, 1, high // layout.ROWS, wide // layout.COLUMNS, layout.WORDS)
    return [
        ((high, layout.padded(inputs, layout.COLUMNS)), jnp.bfloat16),
        (blocks, jnp.uint32),
        ((VARIANTS, 1, outputs), jnp.float32),
    ]


def _rows(one: bool, rows: int, outputs: int, inputs: int) -> tuple[Callable[..., Any], list]:
    def product(x: Any, w: Any, words: Any, scale: Any, slots: Any) -> jax.Array:
        planned = mosaic_plan.plan(slots, VARIANTS, 1, one)
        return mosaic_rows.rows_matmul(x, w, words, scale, planned, one=one)

    x, slots = ((rows, inputs), jnp.bfloat16), ((rows,), jnp.int32)
    return product, [x, *_weights(outputs, inputs), slots]


def _tiles(reconstruct: bool, outputs: int, inputs: int) -> tuple[Callable[..., Any], list]:
    tuning = mosaic_tiles.tiles_tuning(PROMPT, outputs)
    product = functools.partial(mosaic_tiles.tiles_matmul, reconstruct=reconstruct, tuning=tuning)
    x, slots = ((PROMPT, inputs), jnp.bfloat16), ((PROMPT // tuning.rows,), jnp.int32)
    return product, [x, *_weights(outputs, inputs), slots]


ONE = Form("one variant", 2, UNPACKED, functools.partial(_rows, True, ROWS))
MIXED = Form("mixed", 2, UNPACKED, functools.partial(_rows, False, ROWS))
MIXED_64 = Form("mixed, 64 rows", 2, UNPACKED, functools.partial(_rows, False, 64))
PREFILL = Form("prefill", 3, RECONSTRUCTED, functools.partial(_tiles, True))
PREFILL_TWO = Form("prefill, two products", 3, RECONSTRUCTED, functools.partial(_tiles, False))
FORMS = (ONE, MIXED, PREFILL, PREFILL_TWO)


@functools.cache
def compiled(form: Form, outputs: int, inputs: int) -> Report:
    """Compiles a form for one weight on one card."""
    on = h100.mesh(model=1)
    function, arguments = form.make(outputs, inputs)
    structs = [h100.argument(on, shape, dtype) for shape, dtype in arguments]
    return report(function, *structs, on=on)


def complaints(kernel: Kernel, warpgroups: int, limit: float) -> list[str]:
    """What is wrong with a compiled kernel, one line each; none when it is as planned.

    Args:
      kernel: as it was compiled.
      warpgroups: of a program.
      limit: integer instructions for a weight.
    """
    found = []
    for name in ("HGMMA", "UTMALDG"):
        if not kernel.counts.get(name):
            found.append(f"no {name}")
    for name in ("LDL", "STL"):
        if kernel.counts.get(name):
            found.append(f"{kernel.counts[name]} {name}: registers lie in memory")
    if kernel.spilled:
        found.append(f"{kernel.spilled} bytes of registers are spilled")
    if kernel.registers * 128 * warpgroups > REGISTERS:
        found.append(f"{kernel.registers} registers of {128 * warpgroups} threads do not fit")
    if kernel.shared > SHARED:
        found.append(f"{kernel.shared} bytes of shared memory; a program may have {SHARED}")
    if not kernel.loops:
        found.append("no loop multiplies unpacked signs")
    for loop in kernel.loops:
        if loop.per_weight > limit:
            found.append(
                f"{loop.per_weight:.2f} integer instructions for a weight, at most {limit}"
            )
    return found
