"""The prefill kernel for Hopper: many rows, tile by tile, each tile of rows with one variant.

A program has 128 output rows, 64 for each of two warpgroups, and a tile of up to 256 rows of x; a
third warpgroup fetches. With `reconstruct` a tile of the weight is read into registers, the signed
scale is added to it there, and the sum is multiplied: as many matrix operations as the base alone.
Without, for scales that bfloat16 would lose beside the weight, signed scales are multiplied apart
and added up in the same float32 sums: twice the operations.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.bitdelta_matmul import mosaic_unpack
from pallas_kernels.bitdelta_matmul.mosaic_rows import TILED, readable

WARPGROUPS = 2
HIGH = WARPGROUPS * layout.ROWS  # output rows of a program
_NOTHING = 0x80008000  # minus zero in bfloat16, twice: adds nothing to any weight
# Registers of the fetching warpgroup, which leaves the others more.
_FETCHING = 40


@dataclasses.dataclass(frozen=True)
class TilesTuning:
    """How the prefill kernel cuts its work.

    rows: rows of x in a tile.
    stages: steps of 128 inputs in flight.
    cluster: programs that share each tile of x by one multicast copy, 1 or 2.
    """

    rows: int
    stages: int = 2
    cluster: int = 1

    def shared_bytes(self, levels: int = 1) -> int:
        """Shared memory of a program, but for barriers and the like."""
        of_step = (self.rows + HIGH) * layout.COLUMNS * 2 + levels * HIGH * layout.COLUMNS // 8
        return self.stages * of_step


def tiles_tuning(rows: int, outputs: int) -> TilesTuning:
    """The tuning for x[rows, I] and a weight [outputs, I]."""
    tile = next((n for n in (64, 128) if rows <= n), 256)
    pairs = layout.padded(outputs, HIGH) // HIGH % 2 == 0
    return TilesTuning(tile, stages=2 if tile == 256 else 3, cluster=2 if pairs else 1)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Sizes that a kernel is compiled for."""

    rows: int
    outputs: int
    variants: int
    wide: int  # blocks of inputs
    levels: int
    reconstruct: bool
    tuning: TilesTuning


def _multiply(shape: _Shape, tile: Any, x: Any, w: Any, signs: Any, minus: list, acc: Any) -> None:
    """One step: 128 inputs of a warpgroup's 64 output rows.

    Args:
      shape: what it is compiled for.
      tile: shared memory for a left operand, bfloat16[64, 64], when interpreted; else None.
      x: bfloat16[tile, 128].
      w: bfloat16[64, 128].
      signs: uint32[levels, 1, 256].
      minus: uint32[64] of each level, minus the scale, twice.
      acc: the sums.
    """
    for c in range(2):
        columns = pl.ds(64 * c, 64)
        right = x.at[:, columns].T
        if not shape.reconstruct:
            plgpu.wgmma(acc, w.at[:, columns], right)
        if tile is None:
            for operand in _in_registers(shape, c, w, signs, minus):
                plgpu.wgmma(acc, operand, right)
        else:  # the interpreter takes the left side from shared memory only
            for operand in _plain(shape, c, w[:, columns], signs, minus):
                tile[...] = operand
                plgpu.commit_smem()
                plgpu.wgmma(acc, tile, right)
    plgpu.wgmma_wait(0)


def _in_registers(shape: _Shape, c: int, w: Any, signs: Any, minus: list) -> list[jax.Array]:
    words = [
        plgpu.load(signs.at[level, 0], layout=mosaic_unpack.WORDS) for level in range(shape.levels)
    ]
    if not shape.reconstruct:
        return [mosaic_unpack.signed(words[n], c, minus[n]) for n in range(shape.levels)]
    tile = plgpu.load(w.at[:, pl.ds(64 * c, 64)], layout=plgpu.Layout.WGMMA)
    for n in range(shape.levels):
        tile = mosaic_unpack.signed(words[n], c, minus[n], tile)
    return [tile]


def _plain(shape: _Shape, c: int, w: jax.Array, signs: Any, minus: list) -> list[jax.Array]:
    """What `_in_registers` gives, in plain arithmetic."""
    low = [(m & 0xFFFF).astype(jnp.uint16) for m in minus]
    scales = [-jax.lax.bitcast_convert_type(m, jnp.bfloat16) for m in low]
    terms = [layout.signed(signs[n, 0], c, scales[n]) for n in range(shape.levels)]
    if not shape.reconstruct:
        return terms
    for term in terms:
        w = w + term
    return [w]


def _program(shape: _Shape, arrays: tuple, out: Any, tiles: Any) -> None:
    """What each of a program's warpgroups does: the last one fetches, the others multiply."""
    tuning, (x, w, signs, minus, slots) = shape.tuning, arrays
    at = jax.lax.axis_index("high") * tuning.cluster + jax.lax.axis_index("of_cluster")
    of_rows, warpgroup = jax.lax.axis_index("rows"), jax.lax.axis_index("warpgroup")
    slot = slots[of_rows]
    tokens = pl.ds(of_rows * tuning.rows, tuning.rows)
    own = pl.ds((at * WARPGROUPS + warpgroup) * layout.ROWS, layout.ROWS)

    def context(pipeline: Any) -> None:
        row = plgpu.Layout.WGMMA.reduce(1)
        scales = [
            plgpu.load(minus.at[slot, n, own], layout=row, optimized=False)
            for n in range(shape.levels)
        ]

        def sums(acc: Any) -> None:
            pipeline((acc, scales))
            if tiles is not None:
                out.at[tokens, own].T[...] = acc[...]
            else:
                mosaic_unpack.store_transposed(out.at[tokens, own], acc[...])

        pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef((layout.ROWS, tuning.rows), jnp.float32))

    def step(_: Any, x: Any, w: Any, signs: Any, carry: Any) -> Any:
        acc, scales = carry
        rows = pl.ds(warpgroup * layout.ROWS, layout.ROWS)
        signs = signs.at[:, pl.ds(warpgroup, 1), 0]
        tile = None if tiles is None else tiles.at[warpgroup]
        _multiply(shape, tile, x, w.at[rows], signs, scales, acc)
        return carry

    shared = ("of_cluster",) if tuning.cluster > 1 else ()
    of_x, of_w = (tuning.rows, layout.COLUMNS), (HIGH, layout.COLUMNS)
    of_signs = (shape.levels, WARPGROUPS, 1, layout.WORDS)
    pipeline = plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(shape.wide,),
        memory_registers=_FETCHING,
        wg_axis="warpgroup",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=tuning.stages,
        compute_context=context,
        in_specs=[
            plgpu.BlockSpec(of_x, lambda k: (0, k), transforms=TILED, collective_axes=shared),
            plgpu.BlockSpec(of_w, lambda k: (0, k), transforms=TILED),
            plgpu.BlockSpec(of_signs, lambda k: (0, 0, k, 0)),
        ],
    )
    resident = jnp.minimum(slot, shape.variants - 1)
    pipeline(
        x.at[tokens],
        w.at[pl.ds(at * HIGH, HIGH)],
        signs.at[resident, :, pl.ds(at * WARPGROUPS, WARPGROUPS)],
    )


def _kernel(shape: _Shape, interpret: Any) -> Any:
    tuning = shape.tuning
    scratch = {}
    if interpret:
        tiles = (WARPGROUPS, layout.ROWS, 64)
        scratch["tiles"] = plgpu.SMEM(tiles, jnp.bfloat16, transforms=TILED)

    def body(*arrays: Any, tiles: Any = None) -> None:
        _program(shape, arrays[:-1], arrays[-1], tiles)

    return plgpu.kernel(
        body,
        # Programs side by side have the same weights: their tiles of x stay in the L2.
        grid=(shape.outputs // HIGH // tuning.cluster, shape.rows // tuning.rows),
        grid_names=("high", "rows"),
        cluster=(tuning.cluster,),
        cluster_names=("of_cluster",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        out_type=jax.ShapeDtypeStruct((shape.rows, shape.outputs), jnp.float32),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("reconstruct", "tuning", "interpret"))
def tiles_matmul(
    x: jax.Array,
    w: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    slots: jax.Array,
    *,
    reconstruct: bool,
    tuning: TilesTuning,
    interpret: Any = None,
) -> jax.Array:
    """x W^T + alpha (x S^T), each tile of rows with its own variant: float32[T, O].

    Args:
      x: float[T, I], T a multiple of the tuning's rows; multiplied in bfloat16.
      w: bfloat16[O, I]; see `mosaic_rows.readable`.
      words: uint32[M, levels, H, W, 256], from `to_kernel_order`.
      scale: float32[M, levels, O]; used in bfloat16.
      slots: int32[T / rows], a tile's variant; one outside 0..M-1 reads as the base.
      reconstruct: add the signed scale to the weight in bfloat16 before multiplying.
      tuning: how the work is cut.
      interpret: parameters of the interpreter; compiled when not given.

    Raises:
      ValueError: T is no multiple of the tile's rows.
    """
    rows, outputs = x.shape[0], scale.shape[-1]
    if rows % tuning.rows:
        raise ValueError(f"{rows} rows; expected a multiple of a tile's {tuning.rows}: pad them")
    variants, levels, high, _, _ = words.shape
    w = readable(w, interpret)
    wide = layout.padded(w.shape[1], layout.COLUMNS)
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, 0), (0, wide - x.shape[1])))
    valid = (slots >= 0) & (slots < variants)
    # One more variant, of no scale, for the base.
    minus = jax.lax.bitcast_convert_type(-scale.astype(jnp.bfloat16), jnp.uint16)
    minus = minus.astype(jnp.uint32) * jnp.uint32(0x10001)
    short = high * layout.ROWS - outputs
    minus = jnp.pad(minus, ((0, 1), (0, 0), (0, short)), constant_values=jnp.uint32(_NOTHING))
    shape = _Shape(
        rows, high * layout.ROWS, variants, wide // layout.COLUMNS, levels, reconstruct, tuning
    )
    slots = jnp.where(valid, slots, variants).astype(jnp.int32)
    y = _kernel(shape, interpret)(x, w, words, minus, slots)
    return y[:, :outputs]
