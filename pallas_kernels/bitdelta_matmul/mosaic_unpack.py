"""Packed words to matrix operands in registers: one bitwise operation for two weights.

Pallas refuses bitcasts that change the width, so the compiled form is written on registers; the
interpreter runs the same arithmetic of `mosaic_layout` instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout

WORDS = plgpu.Layout.WG_STRIDED((layout.WORDS,), vec_size=2)
MASK = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
_TILE = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
_BOTH = 0x10001  # the same in both halves of a word
_SIGNS = 0x8000 * _BOTH


def _constant(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    signed = value - (1 << 32) if value >> 31 else value
    return arith.constant(i32, ir.IntegerAttr.get(i32, signed))


def _element(register: ir.Value, index: int) -> ir.Value:
    position = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(register, dynamic_position=[], static_position=position)


def _word(words: mgpu.FragmentedArray, index: int) -> ir.Value:
    (both,) = words.registers.flat
    return _element(both, index)


def _pair(register: ir.Value) -> ir.Value:
    """A word as two bfloat16."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    if register.type == pair:
        return register
    one = ir.VectorType.get((1,), register.type)
    return vector.bitcast(pair, vector.broadcast(one, register))


def _fragment(registers: dict[tuple[int, int], ir.Value]) -> mgpu.FragmentedArray:
    """The tile whose register for 8-column block k and row half h is registers[k, h]."""
    array = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, 64)), dtype=object)
    flat = array.reshape(8, 2)
    for at, register in registers.items():
        flat[at] = _pair(register)
    return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def operands(words: jax.Array, c: int, masks: list[jax.Array]) -> jax.Array:
    """As `mosaic_layout.operands`, in registers: uint32[256] -> bfloat16[64, 64].

    Args:
      words: a block.
      c: which half of its 128 inputs.
      masks: uint32[128] each, the eight rows of `mosaic_layout.masks`.
    """

    @plgpu.inline_mgpu(arg_types=(WORDS, *[MASK] * 4), return_type=_TILE)
    def unpack(_: Any, words: Any, *masks: Any) -> Any:
        taken = [_element(mask.registers.flat[0], 0) for mask in masks]
        registers = {}
        for i in range(2):
            word = _word(words, i)
            for h in range(2):
                moved = arith.shli(word, _constant(4)) if h else word
                for q in range(4):
                    bits = arith.andi(moved, taken[q])
                    if fixed := layout.FIXED[c][q]:
                        bits = arith.xori(bits, _constant(fixed * _BOTH))
                    registers[4 * i + q, h] = bits
        return _fragment(registers)

    return unpack(words, *masks[4 * c : 4 * c + 4])


def signed(
    words: jax.Array, c: int, negative: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Each row's magnitude with the signs of `words`, added to a tile of weights if there is one.

    Args:
      words: uint32[256], a block.
      c: which half of its inputs.
      negative: uint32[64], the bits of minus the row's magnitude in bfloat16, twice.
      weights: bfloat16[64, 64], in the layout of a wgmma's operand.

    Returns:
      bfloat16[64, 64].
    """
    arguments = (words, negative) if weights is None else (words, negative, weights)
    layouts = (WORDS, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA)[: len(arguments)]

    @plgpu.inline_mgpu(arg_types=layouts, return_type=_TILE)
    def unpack(_: Any, words: Any, negative: Any, *weights: Any) -> Any:
        minus = [_element(register, 0) for register in negative.registers.flat]
        registers = {}
        for i in range(2):
            word = _word(words, i)
            for h in range(2):
                for q in range(4):
                    by = 15 - layout.POSITIONS[c][q] + 4 * h
                    moved = arith.shli(word, _constant(by)) if by else word
                    taken = arith.xori(arith.andi(moved, _constant(_SIGNS)), minus[h])
                    registers[4 * i + q, h] = taken
        if weights:
            before = weights[0].registers.reshape(8, 2)
            registers = {
                at: arith.addf(before[at], _pair(register)) for at, register in registers.items()
            }
        return _fragment(registers)

    return unpack(*arguments)


def store_transposed(target: Any, sums: jax.Array) -> None:
    """Writes float32[64, n] to an array in device memory as its transpose.

    Pallas has no such store. Eight threads write the 32 bytes of a sector at a time.
    """

    def store(_: Any, target: Any, sums: Any) -> None:
        def one(value: ir.Value, index: Any) -> None:
            memref.store(value, target, [index[1], index[0]])

        sums.foreach(one)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    inline(store)(target, sums)
