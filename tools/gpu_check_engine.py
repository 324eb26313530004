"""Times the engine on a Hopper card: a random 8B base and 14 random variants, made on the card.

    python3 tools/gpu_check_engine.py [--out docs/gpu-check-engine.json]

Needs a python3 whose jax finds the card, with flax beside it. Decode steps of the base, of one
variant and of 14 mixed, beside 14 steps of one each, with the bounds and the share of the card's
bandwidth; then times to the first token of 512-token prompts, base and variant in turn. Under five
minutes, most of them spent on compiling. Without a Hopper card it says so and ends with status 0.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VARIANTS, CONTEXT, PROMPT = 14, 512, 512
REPEATS, ASKED = 20, 20


def steps(model: str, context: int, repeats: int, bandwidth: float | None) -> list[dict[str, Any]]:
    """One row, and as many rows as variants: `DecodeCase` with the bytes that a step has to read.

    Args:
        bandwidth: bytes a second that the card reads at best; None where it is not known.
    """
    from zen_jax.benchmark_decode import bench_decode, model_bytes

    def tell(what: str, done: int, total: int) -> None:
        print(f"decode steps: {what}", file=sys.stderr)

    base, delta = model_bytes(model)
    rows = []
    for batch, variants in ((1, 1), (VARIANTS, VARIANTS)):
        [case] = bench_decode([batch], [variants], model, context, repeats, "float32", tell)[
            "cases"
        ]
        case["bytes"] = {"base": base, "mixed": base + variants * delta}
        if bandwidth is not None:
            case["bandwidth_share"] = case["bytes"]["mixed"] / bandwidth / case["mixed_ms"] * 1e3
            case["base_bandwidth_share"] = base / bandwidth / case["base_ms"] * 1e3
        rows.append(case)
    return rows


def first_tokens(model: str, prompt: int, asked: int) -> dict[str, float]:
    """Milliseconds until a prompt's first token is on the host: medians, and the ratio."""
    import numpy as np

    from zen_jax.benchmark_decode import random_engine
    from zen_jax.sampling import SamplingParams

    greedy = SamplingParams(temperature=0, ignore_eos=True)
    engine, bank = random_engine(model, 1, rows=1, length=prompt + 8)
    state, rng = engine.init_state(), np.random.default_rng(0)
    times: dict[int, list[float]] = {-1: [], 0: []}
    for turn in range(asked + 2):
        for slot, taken in times.items():
            tokens = rng.integers(0, engine.config.vocab_size, prompt).tolist()
            start = time.perf_counter()
            state, _ = engine.enter(bank, state, 0, slot, tokens, greedy, turn)
            if turn >= 2:  # the first compile, or come to the clock speed of the others
                taken.append((time.perf_counter() - start) * 1e3)
    base, variant = (statistics.median(taken) for taken in times.values())
    return {"base_ms": base, "variant_ms": variant, "variant_over_base": variant / base}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes, beside the terminal")
    out = parser.parse_args().out
    from tools.gpu_check import card

    name = card()
    if name is None:
        print("skipped: no Hopper card that this python3's jax finds")
        return 0
    from pallas_kernels.aot import roofline

    began = time.time()
    bandwidth = roofline.CARDS["H200" if "H200" in name else "H100"]
    report = {
        "card": name,
        "decode": steps("8b", CONTEXT, REPEATS, bandwidth),
        "first_token": first_tokens("8b", PROMPT, ASKED),
        "seconds": time.time() - began,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
