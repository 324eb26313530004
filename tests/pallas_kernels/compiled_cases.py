"""Compiles for H100 what the tests look at beside the kernels themselves; prints JSON.

Run by the environment .aot, which has the CUDA plugin: kernels that are bad on purpose, programs
sharded over eight cards, the embedding.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith
from jax.sharding import PartitionSpec

from pallas_kernels.aot import forms, h100
from pallas_kernels.aot.compile import Report, report
from pallas_kernels.bitdelta_matmul import mosaic, mosaic_rows, mosaic_unpack
from pallas_kernels.bitdelta_matmul import mosaic_layout as layout
from pallas_kernels.decode_attention.ops import decode_attention
from pallas_kernels.paged_attention.pages import Pages


def complaints(made: Report) -> list[str]:
    """What is wrong with the one kernel of a program."""
    (kernel,) = made.kernels.values()
    return forms.complaints(kernel, 2, forms.UNPACKED)


def slow_operands(words: jax.Array, c: int, masks: Any) -> jax.Array:
    """Each sign taken by itself: a shift, a mask, a place in its half of the register."""

    @plgpu.inline_mgpu(arg_types=(mosaic_unpack.WORDS,), return_type=mosaic_unpack._TILE)
    def unpack(_: Any, words: Any) -> Any:
        constant, registers = mosaic_unpack._constant, {}
        for i in range(2):
            word = mosaic_unpack._word(words, i)
            for h in range(2):
                for q in range(4):
                    halves = []
                    for e in range(2):
                        by = constant(layout.POSITIONS[c][q] - 4 * h + 16 * e)
                        bit = arith.andi(arith.shrui(word, by), constant(1))
                        halves.append(
                            arith.subi(constant(0xBF80), arith.muli(bit, constant(0x8000)))
                        )
                    high = arith.muli(halves[1], constant(1 << 16))
                    registers[4 * i + q, h] = arith.ori(high, halves[0])
        return mosaic_unpack._fragment(registers)

    return unpack(words)


def slow() -> list[str]:
    """The decode kernel with an unpacking that is not made for the processor."""
    right, mosaic_unpack.operands = mosaic_unpack.operands, slow_operands
    jax.clear_caches()
    try:
        return complaints(forms.compiled.__wrapped__(forms.ONE, 256, 512))
    finally:
        mosaic_unpack.operands = right
        jax.clear_caches()


def spilling() -> list[str]:
    """A kernel whose sums, two times 64 x 256 in one warpgroup, are all the registers there are."""

    def body(a: Any, b: Any, out: Any, left: Any, right: Any, ready: Any) -> None:
        plgpu.copy_gmem_to_smem(a, left, ready)
        plgpu.copy_gmem_to_smem(b, right, ready)
        plgpu.barrier_wait(ready)

        def sums(first: Any, second: Any) -> None:
            for _ in range(2):
                plgpu.wgmma(first, left, right.T)
                plgpu.wgmma(second, left, right.T)
            mosaic_unpack.store_transposed(out, first[...] * second[...])

        acc = plgpu.WGMMAAccumulatorRef((64, 256), jnp.float32)
        pl.run_scoped(sums, acc, acc)

    tiled = mosaic_rows.TILED
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((256, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((256, 64), jnp.bfloat16, transforms=tiled),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    on = h100.mesh(model=1)
    shapes = [h100.argument(on, (rows, 64), jnp.bfloat16) for rows in (64, 256)]
    return complaints(report(kernel, *shapes, on=on))


def sharded(of: str) -> dict[str, Any]:
    """A weight of Llama-3.1-70B over eight cards: what is gathered, and what a card holds."""
    on = h100.mesh(model=8)
    outputs, inputs = (57344, 8192) if of == "outputs" else (8192, 28672)
    spec = {
        "outputs": [(), ("model",), (None, None, "model"), (None, None, "model")],
        "inputs": [(None, "model"), (None, "model"), (None, None, None, "model"), ()],
    }[of]
    result = PartitionSpec(None, "model" if of == "outputs" else None)

    @functools.partial(
        jax.shard_map,
        mesh=on,
        in_specs=(*(PartitionSpec(*axes) for axes in spec), PartitionSpec()),
        out_specs=result,
        check_vma=False,
    )
    def product(x: Any, w: Any, words: Any, scale: Any, slots: Any) -> jax.Array:
        bank = mosaic.KernelBank(words, scale, jnp.zeros(4, bool))
        y = mosaic.bitdelta_matmul_mixed(x, w, bank, slots)
        return y if of == "outputs" else jax.lax.psum(y, "model")

    words = (4, 1, outputs // 64, inputs // 128, 256)
    shapes = [((16, inputs), jnp.bfloat16), ((outputs, inputs), jnp.bfloat16), (words, jnp.uint32)]
    shapes += [((4, 1, outputs), jnp.float32), ((16,), jnp.int32)]
    arguments = [
        h100.argument(on, shape, dtype, *axes)
        for (shape, dtype), axes in zip(shapes, [*spec, ()], strict=True)
    ]
    made = report(product, *arguments, on=on)
    return {
        "gathers": made.hlo.count("all-gather"),
        "reduces": made.hlo.count("all-reduce"),
        "argument_bytes": made.argument_bytes,
        "temporary_bytes": made.temporary_bytes,
    }


def embedding() -> dict[str, int]:
    """Rows of Llama's vocabulary for 16 tokens of 14 variants."""
    on = h100.mesh(model=1)

    def embed(ids: Any, w: Any, words: Any, scale: Any, slots: Any) -> jax.Array:
        bank = mosaic.KernelBank(words, scale, jnp.zeros(14, bool))
        return mosaic.bitdelta_embed(ids, w, bank, slots)

    size = (128256, 4096)
    words = (14, 1, size[0] // 64, size[1] // 128, 256)
    shapes = [((16, 1), jnp.int32), (size, jnp.bfloat16), (words, jnp.uint32)]
    shapes += [((14, 1, size[0]), jnp.float32), ((16,), jnp.int32)]
    made = report(embed, *(h100.argument(on, *each) for each in shapes), on=on)
    return {"temporary_bytes": made.temporary_bytes}


def paged_attention(implementation: Any) -> dict[str, int]:
    """A decode step's attention over pages: 16 rows of 1,024 positions, heads as Llama-3.1-8B."""
    on, rows, positions, size = h100.mesh(model=1), 16, 1024, 32
    kv_heads, group, head = 8, 4, 128

    def attend(qkv: Any, k: Any, v: Any, table: Any, at: Any, cos: Any, sin: Any) -> Any:
        return decode_attention(
            qkv, Pages(k, v), table, at, (cos, sin), implementation=implementation
        )

    pool = ((rows * positions // size, size, kv_heads, head), jnp.bfloat16)
    angle = ((rows, head // 2), jnp.float32)
    shapes = [((rows, kv_heads, group + 2, head), jnp.bfloat16), pool, pool]
    shapes += [((rows, positions // size), jnp.int32), ((rows,), jnp.int32), angle, angle]
    made = report(attend, *(h100.argument(on, *each) for each in shapes), on=on)
    gathered = 2 * 2 * rows * positions * kv_heads * head
    return {"temporary_bytes": made.temporary_bytes, "gathered_bytes": gathered}


if __name__ == "__main__":
    cases: dict[str, Any] = {"slow": slow(), "spilling": spilling(), "embedding": embedding()}
    cases["sharded"] = {of: sharded(of) for of in ("outputs", "inputs")}
    cases["paged"] = {of: paged_attention(of) for of in ("auto", "xla")}
    print(json.dumps(cases))
