"""A plan as figures: what each card holds, what a step does, how long it should take."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from zen_jax.config import ModelConfig
from zen_jax.engine_state import EngineConfig
from zen_jax.kv_cache import page_bytes
from zen_jax.plan import compiled, memory, roofline
from zen_jax.plan.chips import Chip
from zen_jax.plan.memory import Layout

# What a process and its sums over the cards take of each card beside arrays.
RESERVE = 2_000_000_000
# Cards that are made to be linked with each other.
_ONE_NODE = 8
# Of variants and of rows: far beyond what a node has.
_MOST = 1 << 16


@dataclasses.dataclass(frozen=True)
class Request:
    """What a plan is asked for.

    Attributes:
      config: the model.
      name: as it was given.
      chip: the card.
      count: how many.
      variants: M; 0 for the base alone.
      rows: B, requests that decode at once.
      context: the most tokens of a request.
      prompt: tokens of the prompt whose first token is predicted.
      base_dtype: one of `memory.BASE_DTYPES`.
      kv_dtype: of keys and values.
    """

    config: ModelConfig
    name: str
    chip: Chip
    count: int
    variants: int = 14
    rows: int = 64
    context: int = 8192
    prompt: int = 512
    base_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, least in (("variants", 0), ("rows", 1)):
            value = getattr(self, name)
            if not least <= value <= _MOST:
                raise ValueError(f"--{name} is {value}; expected {least} to {_MOST:,}")
        if self.base_dtype not in memory.BASE_DTYPES:
            known = ", ".join(memory.BASE_DTYPES)
            raise ValueError(f"the base's dtype is {self.base_dtype!r}; expected one of {known}")
        if self.context > self.config.max_position:
            raise ValueError(
                f"the context is {self.context}; the model has {self.config.max_position} positions"
            )
        if not 1 <= self.prompt < self.context:
            raise ValueError(
                f"the prompt is {self.prompt} tokens; expected 1 to {self.context - 1}, less than "
                "the context"
            )

    @property
    def layout(self) -> Layout:
        """How it lies on the cards."""
        sizes = EngineConfig(
            rows=self.rows,
            max_length=self.context,
            dtype="bfloat16",
            kv_dtype=self.kv_dtype,
            signs="hopper" if self.chip.ordered else "packed",
        )
        own = (self.config, self.variants, sizes, self.count, self.base_dtype, self.chip.ordered)
        return Layout(*own)


def make_plan(request: Request) -> dict[str, Any]:
    """The figures of a plan, in bytes, milliseconds and counts."""
    lay, chip = request.layout, request.chip
    held = {
        "weights": memory.weight_bytes(lay.share, lay.base_dtype),
        "bank": memory.bank_bytes(lay.share, lay.variants, lay.ordered),
        "kv": memory.kv_bytes(lay),
        "state": memory.state_bytes(lay),
        "temp": memory.temporary_bytes(lay),
    }
    whole = memory.weight_bytes(request.config)
    figures = {
        "model": request.name,
        "parameters": request.config.parameters,
        "chips": f"{request.count}x{chip.name}",
        "variants": request.variants,
        "rows": request.rows,
        "context": request.context,
        "prompt": request.prompt,
        "base_dtype": request.base_dtype,
        "kv_dtype": request.kv_dtype,
        "per_device": per_device(request, held),
        "total_bytes": request.count * (held["weights"] + held["bank"]),
        "full_copies_bytes": request.variants * whole,
        "full_copies_chips": request.variants * request.count,
        "collectives": collectives(lay),
        **times(request),
        "compile_s": None,
        "assumptions": assumptions(request),
    }
    return figures


def with_compiled(
    figures: dict[str, Any], request: Request, points: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A plan's figures with those of the compiled programs in the place of estimates.

    Args:
      figures: of `make_plan`.
      request: the plan's.
      points: of `zen_jax.plan.compiled`, each program at several depths.
    """
    lay = request.layout
    names = list(dict.fromkeys(point["program"] for point in points))
    made = {
        name: compiled.at_depth(
            [point for point in points if point["program"] == name], lay.config.num_layers
        )
        for name in names
    }
    held = {name: figures["per_device"][name] for name in ("weights", "bank", "kv", "state")}
    temp = max(one["temp_bytes"] + one["output_bytes"] for one in made.values())
    decode = made[compiled.DECODE]
    sums = decode["collectives"].get("all-reduce", [0, 0])
    gathers = decode["collectives"].get("all-gather", [0, 0])
    layers = sorted({point["layers"] for point in points})
    said = (
        "temporaries, collectives, kernels and copies are those of programs that XLA compiled for "
        f"{request.count} H100 with {', '.join(map(str, layers))} layers"
    )
    if lay.config.num_layers in layers:
        said += "; all layers were compiled"
    else:
        off = max(one["off"] for one in made.values())
        said += (
            f"; the figures of {lay.config.num_layers} follow on the line through two of them, "
            f"which the others miss by {off:,} bytes of temporaries at most"
        )
    return figures | {
        "per_device": per_device(request, {**held, "temp": temp}),
        "collectives": {
            "all_reduce": sums[0],
            "all_gather": gathers[0],
            "all_reduce_bytes": sums[1],
            "all_gather_bytes": gathers[1],
            "sent_bytes": sent_bytes(request.count, sums[1], gathers[1]),
        },
        "compile_s": round(sum(point["seconds"] for point in points), 1),
        "compiled": {"layers": layers, "programs": made},
        "assumptions": [*figures["assumptions"][:-1], said],
    }


def per_device(request: Request, held: dict[str, int]) -> dict[str, Any]:
    """What one card holds, and what that leaves.

    Args:
      request: the plan's.
      held: bytes of weights, bank, kv, state and temp.
    """
    lay, chip = request.layout, request.chip
    peak = sum(held.values())
    room = chip.memory - RESERVE
    page = page_bytes(lay.share, lay.sizes.page_size, lay.sizes.held_as)
    pages = max(0, room - (peak - held["kv"])) // page
    return {
        **held,
        "peak": peak,
        "memory": chip.memory,
        "reserve": RESERVE,
        "headroom": room - peak,
        "kv_pages": pages,
        "kv_tokens": pages * lay.sizes.page_size,
    }


def collectives(lay: Layout) -> dict[str, Any]:
    """What the cards send each other in a decode step: sums, and the logits brought together."""
    reduces = roofline.all_reduces(lay)
    gathers = int(lay.devices > 1 and "vocab" in lay.placement.sharded)
    summed = reduces * lay.sizes.rows * lay.config.hidden_size * roofline.SUM_BYTES
    gathered = gathers * lay.sizes.rows * lay.config.vocab_size * 2
    return {
        "all_reduce": reduces,
        "all_gather": gathers,
        "all_reduce_bytes": summed,
        "all_gather_bytes": gathered,
        "sent_bytes": sent_bytes(lay.devices, summed, gathered),
    }


def sent_bytes(cards: int, summed: int, gathered: int) -> int:
    """What each card sends for sums and gatherings of arrays of so many bytes, in a ring."""
    return (2 * summed + gathered) * (cards - 1) // cards


def times(request: Request) -> dict[str, Any]:
    """Predicted times of first tokens and of steps, with where they go."""
    lay, chip = request.layout, request.chip
    mixed = min(request.variants, request.rows)
    cases = {"base": 0, **({"one_variant": 1, "mixed": mixed} if mixed else {})}
    steps = {
        name: roofline.decode_step(chip, lay, request.rows, entries)
        for name, entries in cases.items()
    }
    near = {
        name: roofline.decode_step(chip, lay, request.rows, entries, gathered=False)
        for name, entries in cases.items()
    }
    ways = {"base": (1.0, 0)}
    if request.variants:
        ways["variant"] = (roofline.RECONSTRUCTED, 1)
        ways["variant_two_products"] = (roofline.TWO_PRODUCTS, 1)
    prompts = {n: roofline.prompt_read(chip, lay, request.prompt, *w) for n, w in ways.items()}
    return {
        "ttft_ms": {name: _ms(step.seconds) for name, step in prompts.items()},
        "tpot_ms": {name: _ms(step.seconds) for name, step in steps.items()},
        "tpot_ms_pages_read_once": {name: _ms(step.seconds) for name, step in near.items()},
        "ttft_parts": {name: _parts(step) for name, step in prompts.items()},
        "tpot_parts": {name: _parts(step) for name, step in steps.items()},
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _parts(step: roofline.Step) -> dict[str, float]:
    parts = {f"{name}_ms": _ms(getattr(step, name)) for name in _TIMES}
    return parts | {"bytes": round(step.bytes), "flops": round(step.flops)}


_TIMES = ("products", "attention", "reduces", "small")


def assumptions(request: Request) -> list[str]:
    """What the figures rest on, one sentence each."""
    lay, chip = request.layout, request.chip
    found = [
        "times are predictions; nothing was measured on such a card",
        f"{chip.name}: {chip.memory} bytes, {chip.bandwidth / 1e12:g} TB/s, "
        f"{chip.flops / 1e12:g} TFLOP/s in bfloat16, {chip.link / 1e9:g} GB/s to the others, "
        f"{chip.reduce_start * 1e6:g} us for a sum to start",
        f"{RESERVE} bytes of each card are kept for the process; JAX is told to use all else",
        "variants have one level, a scale a row, 1-bit embedding and head, and whole norms",
        "full copies are the variants alone, in bfloat16, each on as many cards",
        *roofline.ASSUMED,
    ]
    if not chip.ordered:
        found.append(f"no kernel here is made for {chip.name}; one as good as Hopper's is assumed")
    if lay.base_dtype != "bfloat16":
        found.append(
            f"a base in {lay.base_dtype} is arithmetic only: the engine holds bases in bfloat16"
        )
    if request.count > _ONE_NODE:
        found.append(
            f"{request.count} cards are taken to be one node, all as near to each other as "
            f"{_ONE_NODE} are; sums between nodes take longer"
        )
    if lay.devices > 1:
        missing = sorted({"vocab", "heads", "kv_heads", "ff"} - lay.placement.sharded)
        if missing:
            named = ", ".join(missing)
            found.append(f"does not divide by {lay.devices} and lies on every card: {named}")
    found.append("temporaries are an estimate; --compile has the compiler's own")
    return found


def most_variants(request: Request) -> int:
    """How many variants would fit with these rows and this context; -1 when not even the base."""
    base = dataclasses.replace(request, variants=0)
    room = make_plan(base)["per_device"]["headroom"]
    if room < 0:
        return -1
    lay = request.layout
    one = memory.bank_bytes(lay.share, 1, lay.ordered)
    return math.floor(room / one)
