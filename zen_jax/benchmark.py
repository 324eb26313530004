"""Benchmarks: ratios of ways of doing the same, measured side by side in one run, with the bound.

Every way is timed in turn, again and again, over copies of its weights that no cache holds
together, and the median is taken. Absolute times are this machine's; ratios travel.
"""

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitdelta_matmul import ops, reference
from pallas_kernels.packing import packed_size, unpack_signs

Progress = Callable[[str, int, int], None]

# Bytes of weights that a way goes through before it meets one again: more than caches hold.
_WORKING_SET = 256 << 20
_SCALE = 1e-3


@dataclasses.dataclass(frozen=True)
class LinearCase:
    """One product: rows of so many variants through a weight of one shape. Times are milliseconds.

    Attributes:
      rows: B.
      d_in: I.
      d_out: O.
      variants: V, row b belongs to variant b mod V.
      impl: who computes the fused product.
      base_ms: the fastest product known here with the base alone.
      fused_ms: ours.
      naive_ms: V products of one variant's rows each, the weight read each time.
      unpack_matmul_ms: XLA's, the weight made whole first; one variant only, else None.
      fused_over_base: fused_ms / base_ms.
      speedup_over_naive: naive_ms / fused_ms.
      bound: what bytes allow: of fused_over_base 1 + 1/16 with one variant, of speedup_over_naive
        16 V / (16 + V) with more.
      fraction_of_bound: how much of it is reached.
      gb_per_s: bytes of weights, signs and scales read in fused_ms.
      read_gb_per_s: what a plain sum over memory reads here.
    """

    rows: int
    d_in: int
    d_out: int
    variants: int
    impl: str
    base_ms: float
    fused_ms: float
    naive_ms: float
    unpack_matmul_ms: float | None
    fused_over_base: float
    speedup_over_naive: float
    bound: float
    fraction_of_bound: float
    gb_per_s: float
    read_gb_per_s: float


def bench_linear(
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    variants: Sequence[int],
    repeats: int = 15,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the fused product on this device.

    Args:
      shapes: (O, I) of weights.
      rows: B of each case.
      variants: V of each case; a case with more variants than rows is left out.
      repeats: timings of each way; the median counts.
      progress: told the case, how many are done and how many there are.

    Returns:
      {"cases": [`LinearCase` as a dict], "device", "versions"}.

    Raises:
      ValueError: a size below 1, or nothing to measure.
    """
    if min([repeats, *rows, *variants, *(size for shape in shapes for size in shape)]) < 1:
        raise ValueError("rows, variants, shapes and repeats have to be 1 or more")
    wanted = [(o, i, b, v) for o, i in shapes for b in rows for v in variants if v <= b]
    if not wanted:
        raise ValueError("nothing to measure: every case has more variants than rows")
    bandwidth = read_bandwidth(repeats)
    cases = []
    for done, (outputs, size, batch, count) in enumerate(wanted):
        if progress is not None:
            progress(f"{outputs}x{size}, {batch} rows, {count} variants", done, len(wanted))
        cases.append(_measure(outputs, size, batch, count, repeats, bandwidth))
    return {
        "cases": [dataclasses.asdict(case) for case in cases],
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "versions": {name: version(name) for name in ("zen-jax", "jax", "jaxlib")},
    }


def read_bandwidth(repeats: int) -> float:
    """GB/s (1e9) that a sum over a large array reads on this device."""
    array = jnp.ones((_WORKING_SET // 4,), jnp.float32)
    total = jax.jit(jnp.sum)
    [median] = _medians([lambda _: total(array)], repeats)
    return array.nbytes / median / 1e6


def _medians(ways: Sequence[Callable[[int], Any]], repeats: int) -> list[float]:
    """Milliseconds of each way, timed in turn; a way is told which copy of the weights to take."""
    for way in ways:
        jax.block_until_ready(way(0))
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats):
        for way, taken in zip(ways, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(way(turn))
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def _unpack_matmul(x: jax.Array, w: jax.Array, bits: jax.Array, scale: jax.Array) -> jax.Array:
    """The weight made whole by XLA, then the product."""
    signs = unpack_signs(bits[0, 0], w.shape[1], w.dtype)
    whole = w + scale[0, 0, :, None].astype(w.dtype) * signs
    return reference.dot(x[:, 0].astype(w.dtype), whole)


def _measure(
    outputs: int, size: int, batch: int, count: int, repeats: int, bandwidth: float
) -> LinearCase:
    rng = np.random.default_rng(0)
    copies = max(2, -(-_WORKING_SET // (2 * outputs * size)))
    noise = rng.standard_normal((outputs, size), np.float32) * 0.02
    weights = [jnp.asarray(np.roll(noise, i), jnp.bfloat16) for i in range(copies)]
    wide = [w.astype(jnp.float32) for w in weights[: max(2, copies // 2)]]
    packed = (count, 1, outputs, packed_size(size))
    banks = [jnp.asarray(rng.integers(0, 256, packed), jnp.uint8) for _ in range(min(copies, 4))]
    scale = jnp.full((count, 1, outputs), _SCALE, jnp.float32)
    x = jnp.asarray(rng.standard_normal((batch, 1, size), np.float32))
    slots = jnp.arange(batch, dtype=jnp.int32) % count
    own = [np.flatnonzero(np.arange(batch) % count == v) for v in range(count)]
    parts = [(x[rows], slots[rows]) for rows in own]
    product, fused = jax.jit(reference.dot), jax.jit(ops.bitdelta_matmul_mixed)
    base, unpack = jax.jit(ops.base_matmul), jax.jit(_unpack_matmul)
    narrow = x.astype(jnp.bfloat16)

    def naive(turn: int) -> list[jax.Array]:
        w, bank = weights[turn % copies], banks[turn % len(banks)]
        return [fused(part, w, bank, scale, slot) for part, slot in parts]

    ways: list[Callable[[int], Any]] = [
        lambda turn: product(narrow, weights[turn % copies]),
        lambda turn: product(x, wide[turn % len(wide)]),
        lambda turn: base(x, weights[turn % copies]),
        lambda turn: fused(x, weights[turn % copies], banks[turn % len(banks)], scale, slots),
        naive,
    ]
    if count == 1:
        ways.append(lambda turn: unpack(x, weights[turn % copies], banks[turn % len(banks)], scale))
    *bases, fused_ms, naive_ms = (times := _medians(ways, repeats))[:5]
    base_ms = min(bases)
    read = outputs * size * 2 + count * (outputs * packed_size(size) + outputs * 4)
    bound = 1 + 1 / 16 if count == 1 else 16 * count / (16 + count)
    slower, faster = fused_ms / base_ms, naive_ms / fused_ms
    on_cpu = "zen_bitdelta_matmul" in fused.lower(x, weights[0], banks[0], scale, slots).as_text()
    return LinearCase(
        rows=batch,
        d_in=size,
        d_out=outputs,
        variants=count,
        impl="cpu" if on_cpu else "reference",
        base_ms=base_ms,
        fused_ms=fused_ms,
        naive_ms=naive_ms,
        unpack_matmul_ms=times[5] if count == 1 else None,
        fused_over_base=slower,
        speedup_over_naive=faster,
        bound=bound,
        fraction_of_bound=bound / slower if count == 1 else faster / bound,
        gb_per_s=read / fused_ms / 1e6,
        read_gb_per_s=bandwidth,
    )
