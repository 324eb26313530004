"""Benchmarks: ratios of ways of doing the same, measured side by side in one run, with the bound.

Every way is timed in turn, again and again, over copies of its weights that no cache holds
together, and the median is taken. Absolute times are this machine's; ratios travel.
"""

import dataclasses
import functools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitdelta_matmul import cpu, ops, reference
from pallas_kernels.bitdelta_matmul.ops import SignBank
from pallas_kernels.packing import packed_size, unpack_signs

Progress = Callable[[str, int, int], None]
# (x, w, bank, slots) -> product; a way of doing what is measured.
Way = Callable[[jax.Array, jax.Array, SignBank, jax.Array], jax.Array]

# Bytes of weights that a way goes through before it meets one again: more than caches hold.
_WORKING_SET = 256 << 20
# Bytes of weights that one program goes through, so that starting it does not count.
_PROGRAM = 48 << 20
_SCALE = 1e-3
# Rows from which the product is a prompt's, and not a decode step's.
_PROMPT_ROWS = 128


@dataclasses.dataclass(frozen=True)
class LinearCase:
    """One product: rows of so many variants through a weight of one shape. Times are milliseconds.

    Attributes:
      rows: B; 128 and more are measured as a prompt's product, fewer as a decode step's.
      d_in: I.
      d_out: O.
      variants: V, row b belongs to variant b mod V.
      activations: dtype of the rows.
      impl: who computes the fused product.
      base_ms: the fastest product known here with the base alone: XLA's in bfloat16, XLA's in
        float32 (over a float32 weight), ours in the dtype of `activations`.
      base_impl: whose that is. XLA's in bfloat16 rounds float32 rows, which ours does not.
      unrounded_base_ms: the fastest of those that take rows as they are: with float32 rows XLA's
        in float32 and ours.
      fused_ms: ours.
      naive_ms: V products of one variant's rows each, the weight read each time.
      unpack_matmul_ms: XLA's, the weight made whole first; one variant only, else None.
      fused_over_base: fused_ms / base_ms.
      fused_over_unrounded: fused_ms / unrounded_base_ms.
      speedup_over_naive: naive_ms / fused_ms.
      speedup_over_unpack: unpack_matmul_ms / fused_ms, or None.
      bound: what bytes allow: of fused_over_base 1 + 1/16 with one variant, of speedup_over_naive
        16 V / (16 + V) with more.
      fraction_of_bound: how much of it is reached.
      gb_per_s: bytes of weights, signs and scales read in fused_ms.
      read_gb_per_s: what reading memory and doing nothing else reaches here.
    """

    rows: int
    d_in: int
    d_out: int
    variants: int
    activations: str
    impl: str
    base_ms: float
    base_impl: str
    unrounded_base_ms: float
    fused_ms: float
    naive_ms: float
    unpack_matmul_ms: float | None
    fused_over_base: float
    fused_over_unrounded: float
    speedup_over_naive: float
    speedup_over_unpack: float | None
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
    activations: Sequence[str] = ("float32", "bfloat16"),
) -> dict[str, Any]:
    """Measures the fused product on this device.

    Args:
      shapes: (O, I) of weights.
      rows: B of each case.
      variants: V of each case; a case with more variants than rows is left out.
      repeats: timings of each way; the median counts.
      progress: told the case, how many are done and how many there are.
      activations: "float32", "bfloat16" or both.

    Returns:
      {"cases": [`LinearCase` as a dict], "device", "versions"}.

    Raises:
      ValueError: a size below 1, an unknown dtype, or nothing to measure.
    """
    if min([repeats, *rows, *variants, *(size for shape in shapes for size in shape)]) < 1:
        raise ValueError("rows, variants, shapes and repeats have to be 1 or more")
    for dtype in activations:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"activations are {dtype!r}; expected 'float32' or 'bfloat16'")
    wanted = [
        (shape, b, v, d)
        for shape in shapes
        for b in rows
        for v in variants
        if v <= b
        for d in activations
    ]
    if not wanted:
        raise ValueError("nothing to measure: every case has more variants than rows")
    bandwidth = read_bandwidth(repeats)
    cases = []
    for done, (shape, batch, count, dtype) in enumerate(wanted):
        if progress is not None:
            name = f"{shape[0]}x{shape[1]}, {batch} rows, {count} variants, {dtype}"
            progress(name, done, len(wanted))
        cases.append(_measure(_Data.make(*shape, batch, count, dtype), repeats, bandwidth))
    return {"cases": [dataclasses.asdict(case) for case in cases]} | device_and_versions()


def device_and_versions() -> dict[str, Any]:
    """What figures were measured on: {"device", "versions"}."""
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "versions": {name: version(name) for name in ("zen-jax", "jax", "jaxlib")},
    }


def read_bandwidth(repeats: int) -> float:
    """GB/s (1e9) at which this device reads a large array and does nothing else."""
    array = jnp.ones((_WORKING_SET // 4,), jnp.float32)
    read = jax.jit(cpu.read_all if cpu.available() else jnp.sum)
    [median] = _medians([lambda _: read(array)], repeats)
    return array.nbytes / median / 1e6


def _medians(ways: Sequence[Callable[[int], Any]], repeats: int) -> list[float]:
    """Milliseconds of each way, timed in turn. A way is told the number of the timing, so that it
    does not take weights that have just been read; it runs once untimed before, so that threads
    which another way left waiting or busy do not count."""
    for way in ways:
        jax.block_until_ready(way(0))
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats):
        for i, (way, taken) in enumerate(zip(ways, times, strict=True)):
            number = 2 * (turn * len(ways) + i)
            jax.block_until_ready(way(number))
            start = time.perf_counter()
            jax.block_until_ready(way(number + 1))
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


@dataclasses.dataclass(frozen=True)
class _Data:
    """What a case's ways are fed: more weights and banks than caches hold, in programs' shares."""

    x: jax.Array
    slots: jax.Array
    weights: list[list[jax.Array]]
    wide: list[list[jax.Array]]
    banks: list[list[SignBank]]
    variants: int

    @classmethod
    def make(cls, outputs: int, size: int, batch: int, count: int, dtype: str) -> "_Data":
        rng = np.random.default_rng(0)
        nbytes = 2 * outputs * size
        each = max(1, min(32, _PROGRAM // nbytes))
        turns = max(3, -(-_WORKING_SET // (each * nbytes)))
        noise = rng.standard_normal((outputs, size), np.float32) * 0.02
        packed = rng.integers(0, 256, (count, 1, outputs, packed_size(size)), np.uint8)
        scale = jnp.full((count, 1, outputs), _SCALE, jnp.float32)

        def share(make: Callable[[int], Any]) -> list[list[Any]]:
            return [[make(turn * each + i) for i in range(each)] for turn in range(turns)]

        x = jnp.asarray(rng.standard_normal((batch, size), np.float32), dtype)
        weights = share(lambda i: jnp.asarray(np.roll(noise, i), jnp.bfloat16))
        banks = share(lambda i: SignBank(jnp.asarray(np.roll(packed, i)), scale))
        wide = [[w.astype(jnp.float32) for w in some] for some in weights[: max(3, turns // 2)]]
        slots = jnp.arange(batch, dtype=jnp.int32) % count
        return cls(x, slots, weights, wide, banks, count)


def _in_turn(way: Way) -> Callable[..., jax.Array]:
    """A program that takes a way through several weights, each after the one before."""

    def program(x: jax.Array, slots: jax.Array, weights: Any, banks: Any) -> jax.Array:
        y = jnp.zeros((1, 1), jnp.float32)
        for w, bank in zip(weights, banks, strict=True):
            # What is added is 0, but not to the compiler: it keeps the products in order.
            y = way(x + (0 * y[:1, :1]).astype(x.dtype), w, bank, slots)
        return y

    return jax.jit(program)


def _fused(x: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array) -> jax.Array:
    if x.shape[0] < _PROMPT_ROWS:
        return ops.bitdelta_matmul_mixed(x, w, bank, slots)
    if bank.bits.shape[0] == 1:
        return ops.bitdelta_matmul(x, w, bank, slots[0])
    ends = jnp.arange(1, x.shape[0] + 1, dtype=jnp.int32)
    return ops.bitdelta_matmul_segments(x, w, bank, slots, ends)


def _naive(x: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array) -> jax.Array:
    """One fused product a variant, each of that variant's rows, one after the other."""
    count = bank.bits.shape[0]
    y = jnp.zeros((1, 1), jnp.float32)
    for v in range(count):
        part = x[v::count] + (0 * y[:1, :1]).astype(x.dtype)
        y = _fused(
            part, w, SignBank(bank.bits[v : v + 1], bank.scale[v : v + 1]), slots[v::count] * 0
        )
    return y


def _unpack_matmul(x: jax.Array, w: jax.Array, bank: SignBank, slots: jax.Array) -> jax.Array:
    """The weight made whole by XLA, then the product."""
    signs = unpack_signs(bank.bits[0, 0], w.shape[1], w.dtype)
    whole = w + bank.scale[0, 0, :, None].astype(w.dtype) * signs
    return reference.dot(x.astype(w.dtype), whole)


def _measure(data: _Data, repeats: int, bandwidth: float) -> LinearCase:
    prompt = data.x.shape[0] >= _PROMPT_ROWS
    bases: dict[str, Way] = {
        "XLA bfloat16": lambda x, w, bank, slots: reference.dot(x.astype(w.dtype), w),
        "XLA float32": lambda x, w, bank, slots: reference.dot(x.astype(w.dtype), w),
        "ours": lambda x, w, bank, slots: ops.base_matmul(x, w, prompt=prompt),
    }
    ways = {**bases, "fused": _fused, "naive": _naive}
    if data.variants == 1:
        ways["unpack"] = _unpack_matmul
    timed = []
    for name, way in ways.items():
        weights = data.wide if name == "XLA float32" else data.weights
        timed.append(functools.partial(_run, _in_turn(way), data, weights))
    each = len(data.weights[0])
    times = dict(zip(ways, (t / each for t in _medians(timed, repeats)), strict=True))
    unrounded = [n for n in bases if data.x.dtype == jnp.bfloat16 or n != "XLA bfloat16"]
    base, exact = (min(names, key=lambda name: times[name]) for names in (bases, unrounded))
    return _case(data, times, base, exact, bandwidth)


def _run(program: Callable[..., jax.Array], data: _Data, weights: Any, turn: int) -> jax.Array:
    some = weights[turn % len(weights)]
    return program(data.x, data.slots, some, data.banks[turn % len(data.banks)])


def _case(
    data: _Data, times: dict[str, float], base: str, unrounded: str, bandwidth: float
) -> LinearCase:
    (batch, size), count = data.x.shape, data.variants
    outputs = data.weights[0][0].shape[0]
    fused_ms, unpack_ms = times["fused"], times.get("unpack")
    read = outputs * size * 2 + count * (outputs * packed_size(size) + outputs * 4)
    bound = 1 + 1 / 16 if count == 1 else 16 * count / (16 + count)
    slower, faster = fused_ms / times[base], times["naive"] / fused_ms
    first = (data.x, data.weights[0][0], data.banks[0][0], data.slots)
    on_cpu = "zen_bitdelta_matmul" in jax.jit(_fused).lower(*first).as_text()
    return LinearCase(
        rows=batch,
        d_in=size,
        d_out=outputs,
        variants=count,
        activations=str(data.x.dtype),
        impl="cpu" if on_cpu else "reference",
        base_ms=times[base],
        base_impl=base,
        unrounded_base_ms=times[unrounded],
        fused_ms=fused_ms,
        naive_ms=times["naive"],
        unpack_matmul_ms=unpack_ms,
        fused_over_base=slower,
        fused_over_unrounded=fused_ms / times[unrounded],
        speedup_over_naive=faster,
        speedup_over_unpack=None if unpack_ms is None else unpack_ms / fused_ms,
        bound=bound,
        fraction_of_bound=bound / slower if count == 1 else faster / bound,
        gb_per_s=read / fused_ms / 1e6,
        read_gb_per_s=bandwidth,
    )
