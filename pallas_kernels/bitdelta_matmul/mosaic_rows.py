"""The decode kernel for Hopper: up to 64 rows, each with its own variant, or all with one.

A program has 128 output rows, 64 for each of two warpgroups, and a span of inputs, which it goes
through in chunks. The rows of x of a chunk lie in shared memory; over them go the weight's tiles,
and then each variant's packed signs, once for all of its rows. Both come through rings of TMA
copies that run ahead over the borders of chunks and variants. x W and x S have sums of their own in
float32; the second is scaled.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.bitdelta_matmul import mosaic_unpack
from pallas_kernels.bitdelta_matmul.mosaic_plan import MOST_ROWS, Plan, padded_rows, widths_of

MULTIPROCESSORS = 132
WARPGROUPS = 2
# Blocks of inputs that are unpacked in one turn of the innermost loop, while others are multiplied.
TOGETHER = 4
TILED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


@dataclasses.dataclass(frozen=True)
class RowsTuning:
    """How the decode kernel cuts its work.

    chunk: inputs whose x is held at a time, a multiple of 128.
    splits: programs that share a block of output rows, each with a span of chunks.
    weight_stages: tiles of the weight in flight, of each warpgroup.
    sign_stages: chunks of signs in flight, of each warpgroup.
    """

    chunk: int
    splits: int
    weight_stages: int = 3
    sign_stages: int = 3

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a program, but for barriers and the like."""
        x = 2 * self.chunk * rows * 2
        weight = self.weight_stages * layout.ROWS * layout.COLUMNS * 2
        signs = self.sign_stages * layout.ROWS * (self.chunk // 8 + 4)
        return x + WARPGROUPS * (weight + signs + layout.ROWS * rows * 4)


def rows_tuning(rows: int, outputs: int, columns: int) -> RowsTuning:
    """The tuning for x[rows, columns] and a weight [outputs, columns].

    A program fills a multiprocessor's shared memory (227 KB). Its time is taken as that of its
    blocks, one more for each chunk, which adds its sums up, and two until the first copy is there.

    Raises:
      ValueError: there are more rows than the kernel takes.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows; the decode kernel takes 1 to {MOST_ROWS}: use prefill")
    wide = layout.padded(columns, layout.PADDED_COLUMNS) // layout.COLUMNS
    programs = layout.padded(outputs, layout.PADDED_ROWS) // layout.PADDED_ROWS
    most = {8: 8, 16: 8, 32: 4, 64: 2}[padded_rows(rows)]

    def blocks(of_chunk: int, splits: int) -> float:
        each = wide // of_chunk // splits * (of_chunk + 1) + 2
        return -(-programs * splits // MULTIPROCESSORS) * each * (1 + splits / 100)

    candidates = [
        (blocks(of_chunk, splits), of_chunk, splits)
        for of_chunk in range(1, most + 1)
        for splits in range(1, wide // of_chunk + 1)
        if wide % (of_chunk * splits) == 0
    ]
    _, of_chunk, splits = min(candidates)
    return RowsTuning(of_chunk * layout.COLUMNS, splits)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Sizes that a kernel is compiled for."""

    rows: int
    high: int  # blocks of output rows
    wide: int  # blocks of inputs
    columns: int  # inputs of the weight as it lies
    entries: int
    widths: tuple[int, ...]  # numbers of rows that an entry may have
    tuning: RowsTuning

    @property
    def chunks(self) -> int:
        """Chunks of a program."""
        return self.wide // self.steps // self.tuning.splits

    @property
    def steps(self) -> int:
        """Blocks of inputs in a chunk."""
        return self.tuning.chunk // layout.COLUMNS


class _Warpgroup:
    """One of a program's warpgroups: its references, and what it does with them.

    Both have the same x and the same entries, each its own output rows and its own rings.
    """

    def __init__(self, shape: _Shape, inputs: tuple, out: Any, scratch: dict[str, Any]) -> None:
        self.shape, self.out = shape, out
        self.x, self.w, self.signs, self.scale, self.offsets, self.slots = inputs[:6]
        self.entries, masks = inputs[6:]
        self.s = scratch
        self.split = jax.lax.axis_index("split")
        self.own = jax.lax.axis_index("warpgroup")
        self.block = jax.lax.axis_index("block") * WARPGROUPS + self.own
        self.rows = pl.ds(self.block * layout.ROWS, layout.ROWS)
        first = self.split * (shape.chunks * shape.steps)
        left = -(-shape.columns // layout.COLUMNS) - first
        self.weight_steps = jnp.clip(left, 0, shape.chunks * shape.steps)
        self.interpreted = "tile" in scratch
        self.masks = []
        if not self.interpreted:
            self.masks = [
                plgpu.load(masks.at[n], layout=mosaic_unpack.MASK, optimized=False)
                for n in range(8)
            ]

    def copy_x(self, chunk: jax.Array) -> None:
        """Fetches a chunk of x and of the corrections; chunks count from the program's first."""
        at, buffer = self.split * self.shape.chunks + chunk, jax.lax.rem(chunk, 2)
        barrier = self.s["x_ready"].at[buffer]
        for k in range(self.shape.steps):
            columns = pl.ds((at * self.shape.steps + k) * layout.COLUMNS, layout.COLUMNS)
            plgpu.copy_gmem_to_smem(self.x.at[:, columns], self.s["x"].at[buffer, k], barrier)
        plgpu.copy_gmem_to_smem(self.offsets.at[at], self.s["offsets"].at[buffer], barrier)

    def copy_weight(self, step: jax.Array) -> None:
        """Fetches a tile of the weight; steps count from the program's first."""
        slot = jax.lax.rem(step, self.shape.tuning.weight_stages)
        at = self.split * (self.shape.chunks * self.shape.steps) + step
        source = self.w.at[self.rows, pl.ds(at * layout.COLUMNS, layout.COLUMNS)]
        barrier = self.s["w_ready"].at[self.own, slot]
        plgpu.copy_gmem_to_smem(source, self.s["w"].at[self.own, slot], barrier)

    def copy_signs(self, step: jax.Array, count: jax.Array) -> None:
        """Fetches an entry's signs of a chunk; entries of the first chunk come first."""
        slot = jax.lax.rem(step, self.shape.tuning.sign_stages)
        chunk, entry = jax.lax.div(step, count), jax.lax.rem(step, count)
        at = (self.split * self.shape.chunks + chunk) * self.shape.steps
        row, barrier = self.s["entries"][0, entry], self.s["signs_ready"].at[self.own, slot]
        source = self.signs.at[row, self.block, pl.ds(at, self.shape.steps)]
        plgpu.copy_gmem_to_smem(source, self.s["signs"].at[self.own, slot], barrier)
        source = self.scale.at[row, self.rows]
        plgpu.copy_gmem_to_smem(source, self.s["scale"].at[self.own, slot], barrier)

    def run(self) -> None:
        """The whole program."""
        shape, s = self.shape, self.s

        @pl.when(self.own == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(self.entries, s["entries"], s["ready"])
            plgpu.copy_gmem_to_smem(self.slots, s["slots"], s["ready"])
            self.copy_x(jnp.int32(0))

        for stage in range(shape.tuning.weight_stages):
            copy = functools.partial(self.copy_weight, jnp.int32(stage))
            pl.when(stage < self.weight_steps)(copy)
        plgpu.barrier_wait(s["ready"])
        count = s["entries"][3, 0]
        for stage in range(shape.tuning.sign_stages):
            copy = functools.partial(self.copy_signs, jnp.int32(stage), count)
            pl.when(stage < count * shape.chunks)(copy)
        for group in range(shape.rows // 8):
            zero = jnp.zeros((layout.ROWS, 8), jnp.float32)
            s["y"][self.own, group] = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)

        @pl.loop(0, shape.chunks)
        def _(chunk: jax.Array) -> None:
            self.chunk(chunk, count)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["y"].at[self.own], self.out.at[self.split, self.block])
        plgpu.wait_smem_to_gmem(0)

    def chunk(self, chunk: jax.Array, count: jax.Array) -> None:
        """Adds x W and all entries' x S of a chunk."""
        s, last = self.s, self.shape.chunks - 1
        buffer = jax.lax.rem(chunk, 2)

        @pl.when((self.own == 0) & (chunk < last))
        def _() -> None:
            # The first warpgroup fetches x for both: the other has to be through with the buffer.
            @pl.when(chunk > 0)
            def _() -> None:
                plgpu.barrier_wait(s["x_free"].at[1 - buffer])

            self.copy_x(chunk + 1)

        plgpu.barrier_wait(s["x_ready"].at[buffer])
        self.base(chunk)

        @pl.loop(0, count)
        def _(entry: jax.Array) -> None:
            self.entry(chunk, entry, count)

        @pl.when(chunk < last - 1)
        def _() -> None:
            plgpu.barrier_arrive(s["x_free"].at[buffer])

    def base(self, chunk: jax.Array) -> None:
        """Adds x W of a chunk."""
        shape, s = self.shape, self.s
        first = chunk * shape.steps
        last = jnp.minimum(first + shape.steps, self.weight_steps)

        def product(acc: Any) -> jax.Array:
            @pl.loop(first, last)
            def _(step: jax.Array) -> None:
                slot = jax.lax.rem(step, shape.tuning.weight_stages)
                plgpu.barrier_wait(s["w_ready"].at[self.own, slot])
                x = s["x"].at[jax.lax.rem(chunk, 2), step - first]
                plgpu.wgmma(acc, s["w"].at[self.own, slot], x.T)
                plgpu.wgmma_wait(0)
                ahead = step + shape.tuning.weight_stages
                pl.when(ahead < self.weight_steps)(functools.partial(self.copy_weight, ahead))

            return acc[...]

        total = pl.run_scoped(
            product, plgpu.WGMMAAccumulatorRef((layout.ROWS, shape.rows), jnp.float32)
        )
        for group in range(shape.rows // 8):
            y = s["y"].at[self.own, group]
            so_far = plgpu.load(y, layout=plgpu.Layout.WGMMA, optimized=False)
            y[...] = so_far + total[:, 8 * group : 8 * group + 8]

    def entry(self, chunk: jax.Array, entry: jax.Array, count: jax.Array) -> None:
        """Adds alpha x S of a chunk for one variant and level, to the rows that are the variant's.

        Of the rows, sorted by variant, it multiplies a window of the least width that has all of
        the variant's.
        """
        shape, s = self.shape, self.s
        step = chunk * count + entry
        slot = jax.lax.rem(step, shape.tuning.sign_stages)
        plgpu.barrier_wait(s["signs_ready"].at[self.own, slot])
        windows = [functools.partial(self.window, chunk, entry, slot, n) for n in shape.widths]
        if len(windows) == 1:
            windows[0]()
        else:
            jax.lax.switch(s["entries"][2, entry], windows)
        plgpu.commit_smem()  # what was read here may be written over
        ahead = step + shape.tuning.sign_stages
        pl.when(ahead < count * shape.chunks)(functools.partial(self.copy_signs, ahead, count))

    def window(self, chunk: jax.Array, entry: jax.Array, slot: jax.Array, width: int) -> None:
        """Multiplies `width` rows from the entry's first group of 8 on."""
        s = self.s
        buffer = jax.lax.rem(chunk, 2)
        group = s["entries"][1, entry] if width < self.shape.rows else jnp.int32(0)
        rows = pl.ds(pl.multiple_of(group * 8, 8), width)

        def product(first: Any, second: Any) -> jax.Array:
            together = math.gcd(self.shape.steps, TOGETHER)

            @pl.loop(0, self.shape.steps // together)
            def _(several: jax.Array) -> None:
                for n in range(together):
                    step = several * together + n
                    x = s["x"].at[buffer, step, rows]
                    self.multiply(s["signs"].at[self.own, slot, step], x, (first, second))
                plgpu.wgmma_wait(0)

            return first[...] + 2.0 * second[...]

        acc = plgpu.WGMMAAccumulatorRef((layout.ROWS, width), jnp.float32)
        total = pl.run_scoped(product, acc, acc)
        column = plgpu.Layout.WGMMA.reduce(0)
        tile = (layout.ROWS, 8)
        alpha = s["scale"].at[self.own, slot]
        alpha = plgpu.load(alpha, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        alpha = jax.lax.broadcast_in_dim(alpha, tile, (0,))
        for n in range(width // 8):
            at = pl.ds(pl.multiple_of((group + n) * 8, 8), 8)
            offset = plgpu.load(s["offsets"].at[buffer, at], layout=column, optimized=False)
            owner = plgpu.load(s["slots"].at[at], layout=column, optimized=False)
            own = jax.lax.broadcast_in_dim(owner == s["entries"][4, entry], tile, (1,))
            offset = jax.lax.broadcast_in_dim(offset, tile, (1,))
            y = s["y"].at[self.own, group + n]
            so_far = plgpu.load(y, layout=plgpu.Layout.WGMMA, optimized=False)
            term = alpha * (total[:, 8 * n : 8 * n + 8] - offset)
            y[...] = jnp.where(own, so_far + term, so_far)

    def multiply(self, words: Any, x: Any, sums: tuple[Any, Any]) -> None:
        """x S of 128 inputs: unpacks a half while the one before it is multiplied."""
        if not self.interpreted:
            words = plgpu.load(words, layout=mosaic_unpack.WORDS)
        for c in range(2):
            right = x.at[:, pl.ds(64 * c, 64)].T
            if self.interpreted:  # the interpreter takes the left side from shared memory only
                self.s["tile"][self.own] = layout.operands(words[...], c)
                plgpu.commit_smem()
                plgpu.wgmma(sums[c], self.s["tile"].at[self.own], right)
            else:
                plgpu.wgmma(sums[c], mosaic_unpack.operands(words, c, self.masks), right)
                plgpu.wgmma_wait(1)


def _kernel(shape: _Shape, interpret: Any) -> Any:
    tuning, rows, stages = shape.tuning, shape.rows, shape.tuning.sign_stages
    weight = (WARPGROUPS, tuning.weight_stages, layout.ROWS, layout.COLUMNS)
    scratch: dict[str, Any] = dict(
        x=plgpu.SMEM((2, shape.steps, rows, layout.COLUMNS), jnp.bfloat16, transforms=TILED),
        w=plgpu.SMEM(weight, jnp.bfloat16, transforms=TILED),
        signs=plgpu.SMEM((WARPGROUPS, stages, shape.steps, layout.WORDS), jnp.uint32),
        scale=plgpu.SMEM((WARPGROUPS, stages, layout.ROWS), jnp.float32),
        offsets=plgpu.SMEM((2, MOST_ROWS), jnp.float32),
        slots=plgpu.SMEM((MOST_ROWS,), jnp.int32),
        entries=plgpu.SMEM((5, shape.entries), jnp.int32),
        y=plgpu.SMEM((WARPGROUPS, rows // 8, layout.ROWS, 8), jnp.float32),
        x_ready=plgpu.Barrier(num_arrivals=shape.steps + 1, num_barriers=2),
        x_free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        w_ready=plgpu.Barrier(num_barriers=(WARPGROUPS, tuning.weight_stages)),
        signs_ready=plgpu.Barrier(num_arrivals=2, num_barriers=(WARPGROUPS, stages)),
        ready=plgpu.Barrier(num_arrivals=2),
    )
    if interpret:
        tiles = (WARPGROUPS, layout.ROWS, 64)
        scratch["tile"] = plgpu.SMEM(tiles, jnp.bfloat16, transforms=TILED)

    def body(*arrays: Any, **scratch: Any) -> None:
        _Warpgroup(shape, arrays[:-1], arrays[-1], scratch).run()

    return plgpu.kernel(
        body,
        grid=(shape.high // WARPGROUPS, tuning.splits),
        grid_names=("block", "split"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        out_type=jax.ShapeDtypeStruct(
            (tuning.splits, shape.high, rows // 8, layout.ROWS, 8), jnp.float32
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("one", "tuning", "interpret"))
def rows_matmul(
    x: jax.Array,
    w: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    planned: Plan,
    *,
    one: bool = False,
    tuning: RowsTuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x W^T plus each row's own alpha (x S^T), for 1 to 64 rows: float32[B, O].

    Args:
      x: float[B, I], multiplied in bfloat16.
      w: bfloat16[O, I]; see `readable`.
      words: uint32[M, levels, H, W, 256], from `to_kernel_order`.
      scale: float32[M, levels, O].
      planned: from `plan`.
      one: as it was given to `plan`.
      tuning: how the work is cut; by shape when not given.
      interpret: parameters of the interpreter; compiled when not given.

    Raises:
      ValueError: there are more than 64 rows, or the tuning does not fit.
    """
    batch, outputs = x.shape[0], scale.shape[-1]
    variants, levels, high, wide = words.shape[:4]
    tuning = tuning or rows_tuning(batch, outputs, wide * layout.COLUMNS)
    if wide * layout.COLUMNS % (tuning.chunk * tuning.splits):
        raise ValueError(
            f"{wide * layout.COLUMNS} inputs are not {tuning.splits} times as many chunks of "
            f"{tuning.chunk}; choose a chunk and splits whose product divides them"
        )
    rows = padded_rows(batch)
    # Rows that fill up have a place in the order too, but belong to nobody and are left out after.
    x = x.astype(jnp.bfloat16) if one else x.astype(jnp.bfloat16)[planned.order]
    x = jnp.pad(x, ((0, rows - x.shape[0]), (0, wide * layout.COLUMNS - x.shape[1])))
    w = readable(w, interpret)
    scale = jnp.pad(scale, ((0, 0), (0, 0), (0, high * layout.ROWS - outputs)))
    count, widths = planned.entries.shape[1], widths_of(rows, one)
    shape = _Shape(rows, high, wide, w.shape[1], count, widths, tuning)
    parts = _kernel(shape, interpret)(
        x,
        w,
        words.reshape(variants * levels, high, wide, layout.WORDS),
        scale.reshape(variants * levels, high * layout.ROWS),
        corrections(x, tuning.chunk),
        planned.slots,
        planned.entries,
        layout.masks(),
    )
    y = jnp.sum(parts, axis=0).transpose(1, 3, 0, 2).reshape(rows, high * layout.ROWS)
    return y[:batch, :outputs] if one else y[planned.rank, :outputs]


def corrections(x: jax.Array, chunk: int) -> jax.Array:
    """What is taken off the sums of each chunk: bfloat16[rows, I] -> float32[I / chunk, 64]."""
    rows, columns = x.shape
    each = x.astype(jnp.float32) * layout.coefficients(columns)
    sums = jnp.sum(each.reshape(rows, columns // chunk, chunk), axis=-1).T
    return jnp.pad(sums, ((0, 0), (0, MOST_ROWS - rows)))


def readable(w: jax.Array, interpret: Any = None) -> jax.Array:
    """A weight as the kernels' copies take it: bfloat16, and as it lies wherever that is possible.

    A tile that reaches beyond a weight is filled up with zeros by the copy itself (Pallas'
    `OOBFillMode.ZEROS`), so that a weight needs no padding. Padded, which copies it, are weights
    whose rows are no multiple of 16 bytes, and all in an interpreter that reads nothing there.

    Args:
      w: float[O, I].
      interpret: parameters of the interpreter; None: compiled.
    """
    w = w.astype(jnp.bfloat16)
    aligned = w.shape[1] * w.dtype.itemsize % 16 == 0
    if aligned and (interpret is None or interpret.out_of_bounds_reads != "raise"):
        return w
    rows, columns = -w.shape[0] % layout.PADDED_ROWS, -w.shape[1] % layout.COLUMNS
    return jnp.pad(w, ((0, rows), (0, columns))) if rows or columns else w
