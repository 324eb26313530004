"""Checks and times the Hopper kernels on a card. Needs a python3 whose jax finds it, nothing else.

    python3 tools/gpu_check.py [--out docs/gpu-check.json]

First every form's numbers on fresh random inputs, beside float64, and the same bits when repeated:
what the interpreter cannot see, such as a wait or a fence that is missing, shows here. Then times,
over weights that together are several times the L2: the base's product by cuBLAS, one variant, 1 to
14 variants mixed, a long prompt. Without a Hopper card it says so and ends with status 0.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# O and I: of Llama-3.1-70B on 8 cards, two; of Llama-3.1-8B on one; with inputs that need padding.
NUMBERS = ((1024, 2048), (640, 3696))
TIMED = ((7168, 8192), (8192, 3584), (28672, 4096))
ROWS, VARIANTS, PROMPT = 16, 14, 2048
BEYOND_L2 = 256 << 20  # bytes of weights that are gone through
REPEATS = 10


def card() -> str | None:
    """The Hopper card's name; None without one, or without jax."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        device = jax.devices("gpu")[0]
    except (ImportError, RuntimeError):
        return None
    return device.device_kind if str(device.compute_capability).startswith("9.") else None


class Problem:
    """A random weight and bank, with what is needed for float64."""

    def __init__(self, outputs: int, inputs: int, variants: int, seed: int) -> None:
        import jax.numpy as jnp
        import numpy as np

        from pallas_kernels.bitdelta_matmul import mosaic
        from pallas_kernels.packing import pack_signs

        self.rng = np.random.default_rng(seed)
        self.w = jnp.asarray(self.rng.normal(0, 0.02, (outputs, inputs)), jnp.bfloat16)
        self.signs = self.rng.choice([-1.0, 1.0], (variants, 1, outputs, inputs)).astype(np.float32)
        self.scale = self.rng.uniform(5e-4, 5e-3, (variants, 1, outputs)).astype(np.float32)
        bits = jnp.asarray(pack_signs(self.signs))
        self.bank = mosaic.to_kernel_order(bits, jnp.asarray(self.scale), self.w)

    def rows(self, count: int) -> Any:
        """Rows with a mean, in bfloat16."""
        import jax.numpy as jnp

        return jnp.asarray(self.rng.normal(0.5, 1, (count, self.w.shape[1])), jnp.bfloat16)

    def error(self, got: Any, x: Any, slots: Any) -> float:
        """Of the variants' part: the norm of what is off, over the norm of that part."""
        import numpy as np

        wide = np.asarray(x, np.float64)
        base = wide @ np.asarray(self.w, np.float64).T
        term = np.zeros_like(base)
        for slot in set(slots.tolist()) & set(range(len(self.signs))):
            own = slots == slot
            term[own] = wide[own] @ (self.scale[slot, 0][:, None] * self.signs[slot, 0]).T
        off = np.linalg.norm(np.asarray(got, np.float64) - base - term)
        return float(off / max(np.linalg.norm(term), 1e-30))


def numbers(outputs: int, inputs: int, seed: int, interpret: Any = None, prompt: int = 300) -> list:
    """Every form beside float64: its name, its error, whether repeats have the same bits."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.bitdelta_matmul import mosaic

    of = Problem(outputs, inputs, 5, seed)
    args = (of.w, of.bank)
    found = []

    def check(name: str, run: Callable[[], Any], x: Any, slots: Any, allowed: float) -> None:
        first = np.asarray(run())[: len(x), :outputs]
        same = all(np.array_equal(first, np.asarray(run())[: len(x), :outputs]) for _ in range(2))
        error = of.error(first, x, slots)
        good = bool(error <= allowed and same)
        shape = [outputs, inputs]
        found.append(dict(form=name, shape=shape, error=error, same_bits=same, good=good))

    def one(x: Any, bank: Any) -> Callable[[], Any]:
        return lambda: mosaic.bitdelta_matmul(x, args[0], bank, jnp.int32(3), interpret=interpret)

    for count in (8, 64):
        x = of.rows(count)
        check(f"one variant, {count} rows", one(x, of.bank), x, np.full(count, 3), 1e-3)
    for count in (16, 64):
        x, slots = of.rows(count), of.rng.integers(-1, 6, count).astype(np.int32)
        mixed = functools.partial(mosaic.bitdelta_matmul_mixed, x, *args, jnp.asarray(slots))
        run = functools.partial(mixed, interpret=interpret)
        check(f"mixed, {count} rows", run, x, slots, 1e-3)
    x = of.rows(prompt)
    # Signed scales are rounded to bfloat16; with reconstruction their sum with the weight is.
    for name, allow, allowed in (("two products", False, 0.005), ("reconstructed", True, 0.15)):
        bank = of.bank._replace(reconstruct=jnp.full(5, allow))
        check(f"prefill, {name}", one(x, bank), x, np.full(prompt, 3), allowed)
    ends = np.array([prompt // 3, prompt // 3, prompt - 20])
    slots = np.repeat([2, 4, -1], [ends[0], ends[2] - ends[0], 20])
    bank = of.bank._replace(reconstruct=jnp.zeros(5, bool))
    segments = mosaic.bitdelta_matmul_segments
    check(
        "segments",
        lambda: segments(
            x, args[0], bank, jnp.array([2, 0, 4]), jnp.asarray(ends), interpret=interpret
        ),
        x,
        slots,
        0.005,
    )
    return found


def seconds(step: Callable[..., Any], copies: list[tuple]) -> float:
    """One product's time: all copies in one compiled program, so that none is in the L2."""
    import jax

    program = jax.jit(lambda copies: [step(*each) for each in copies])
    jax.block_until_ready(program(copies))
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(copies))
        best = min(best, time.perf_counter() - start)
    return best / len(copies)


def times(outputs: int, inputs: int, name: str) -> list[dict[str, Any]]:
    """The forms beside the base's product, with the fraction of their bounds."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.aot import roofline
    from pallas_kernels.bitdelta_matmul import mosaic
    from pallas_kernels.bitdelta_matmul import mosaic_layout as layout

    bandwidth = roofline.CARDS["H200" if "H200" in name else "H100"]
    keys = iter(jax.random.split(jax.random.key(time.time_ns() % 2**31), 64))
    copies = max(2, -(-BEYOND_L2 // (2 * outputs * inputs)))
    high = layout.padded(outputs, layout.PADDED_ROWS)
    wide = layout.padded(inputs, layout.PADDED_COLUMNS)
    weights, banks = [], []
    for _ in range(copies):
        w = 0.02 * jax.random.normal(next(keys), (outputs, inputs), jnp.bfloat16)
        weights.append(w)
        shape = (VARIANTS, 1, high // layout.ROWS, wide // layout.COLUMNS, layout.WORDS)
        words = jax.random.bits(next(keys), shape, jnp.uint32)
        scale = jnp.full((VARIANTS, 1, outputs), 1e-3, jnp.float32)
        banks.append(mosaic.KernelBank(words, scale, jnp.ones(VARIANTS, bool)))
    x = jax.random.normal(next(keys), (ROWS, inputs), jnp.bfloat16)
    prompt = jax.random.normal(next(keys), (PROMPT, inputs), jnp.bfloat16)
    of_w = 2.0 * outputs * inputs
    found = []

    def add(form: str, taken: float, bound: float, base: float | None) -> None:
        row = dict(form=form, shape=[outputs, inputs], us=taken * 1e6, bound_us=bound * 1e6)
        row["fraction_of_bound"] = bound / taken
        if base is not None:
            row["times_of_base"] = taken / base
        found.append(row)

    def base(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

    alone = seconds(base, [(x, w) for w in weights])
    add("base", alone, of_w / bandwidth, None)
    pairs = list(zip(weights, banks, strict=True))
    one = seconds(lambda w, bank: mosaic.bitdelta_matmul(x, w, bank, jnp.int32(0)), pairs)
    add("one variant", one, of_w * 17 / 16 / bandwidth, alone)
    for variants in (1, 4, 8, 14):
        slots = jnp.arange(ROWS, dtype=jnp.int32) % variants
        planned = mosaic.plan(slots, banks[0])
        mixed = seconds(
            lambda w, bank, s=slots, p=planned: mosaic.bitdelta_matmul_mixed(
                x, w, bank, s, planned=p
            ),
            pairs,
        )
        add(f"mixed, {variants}", mixed, of_w * (1 + variants / 16) / bandwidth, alone)
        found[-1]["over_one_by_one"] = variants * alone / mixed
    peak = 2 * PROMPT * outputs * inputs / (roofline.MULTIPROCESSORS * roofline.CLOCK * 4096)
    long = seconds(base, [(prompt, w) for w in weights[:2]])
    add("base, long prompt", long, peak, None)
    for form, allow in (("prefill", True), ("prefill, two products", False)):
        flags = jnp.full(VARIANTS, allow)
        taken = seconds(
            lambda w, bank, f=flags: mosaic.bitdelta_matmul(
                prompt, w, bank._replace(reconstruct=f), jnp.int32(0)
            ),
            pairs[:2],
        )
        add(form, taken, peak, long)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes, beside the terminal")
    out = parser.parse_args().out
    name = card()
    if name is None:
        print("skipped: no Hopper card that this python3's jax finds")
        return 0
    seed = time.time_ns() % 2**31
    report: dict[str, Any] = {"card": name, "seed": seed, "numbers": [], "times": []}
    for shape in NUMBERS:
        report["numbers"] += numbers(*shape, seed)
    for shape in TIMED:
        report["times"] += times(*shape, name)
    text = json.dumps(report, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")
    wrong = [row for row in report["numbers"] if not row["good"]]
    for row in wrong:
        print(f"{row['form']} at {row['shape']}: error {row['error']:.2g}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
