"""A decode step's time: the base alone, one variant, many variants mixed, and one step a variant.

The steps are the engine's own, attention, norms, sampling and dispatch included; what is measured
is a step after another, each with the tokens of the one before, as in serving.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packing import packed_size
from zen_jax.benchmark import Progress, device_and_versions
from zen_jax.checkpoint.load import read_base
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema, DeltaBank
from zen_jax.delta.format import WeightDelta
from zen_jax.engine import BASE_SLOT, DecodeState, Engine, EngineConfig
from zen_jax.layout import EMBED, Params, ParamSpec, map_specs

# Shapes to measure without weights: speed does not depend on what they hold.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}
SHAPES["8b"] = SHAPES["1b"] | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_SCALE = 1e-4


def shape_config(model: str) -> ModelConfig:
    """A model of `SHAPES` by its name.

    Raises:
      ValueError: there is none of that name.
    """
    if model not in SHAPES:
        raise ValueError(f"model is {model!r}; expected one of {', '.join(SHAPES)}")
    return ModelConfig.from_hf(SHAPES[model] | _COMMON)


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One batch of one number of variants. Times are milliseconds of a step.

    Attributes:
      batch: B, rows that decode together.
      variants: V, row b belongs to variant b mod V.
      context: tokens in each row's cache at the start.
      base_ms: all rows of the base.
      variant_ms: all rows of one variant.
      mixed_ms: rows of V variants.
      naive_ms: V steps, one after the other, each of one variant's B / V rows.
      variant_over_base: variant_ms / base_ms.
      speedup: naive_ms / mixed_ms.
      bound: 16 V / (16 + V), what reading weights and deltas alone allows; with one variant 1.
      fraction_of_bound: speedup / bound; with one variant (1 + 1/16) / variant_over_base.
      tokens_per_s: B / mixed_ms.
      host_share: of a mixed step, the share in which the host has not launched anything yet.
      compiles: programs compiled while this was measured, after warm-up.
    """

    batch: int
    variants: int
    context: int
    base_ms: float
    variant_ms: float
    mixed_ms: float
    naive_ms: float
    variant_over_base: float
    speedup: float
    bound: float
    fraction_of_bound: float
    tokens_per_s: float
    host_share: float
    compiles: int


def bench_decode(
    batches: Sequence[int],
    variants: Sequence[int],
    model: str = "smollm2-135m",
    context: int = 64,
    repeats: int = 30,
    products: str = "bfloat16",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures decode steps on this device.

    Args:
      batches: B of each case.
      variants: V of each case; a case whose batch is no multiple of V is left out.
      model: a name of `SHAPES`, or the path of a store, whose base is read; deltas are random.
      context: tokens in each row's cache at the start.
      repeats: steps that are timed; the median counts.
      products: what activations are rounded to at weights, "float32" or "bfloat16".
      progress: told the case, how many are done and how many there are.

    Returns:
      {"cases": [`DecodeCase` as a dict], "model", "products", "device", "versions"}.

    Raises:
      ValueError: a size below 1, an unknown model, or nothing to measure.
    """
    if min([context, repeats, *batches, *variants]) < 1:
        raise ValueError("batch, variants, context and repeats have to be 1 or more")
    wanted = [(b, v) for b in batches for v in variants if b % v == 0]
    if not wanted:
        raise ValueError("nothing to measure: no batch is a multiple of a number of variants")
    params, schema = _model(model, max(variants))
    make = functools.partial(_Bench, params, schema, context, repeats, products)
    cases, bank = [], None
    for done, (batch, count) in enumerate(wanted):
        if progress is not None:
            progress(f"{batch} rows, {count} variants", done, len(wanted))
        whole = make(batch, bank)
        bank = whole.bank  # of the same shapes whatever the rows
        cases.append(_measure(whole, make(batch // count, bank), count))
    about = {"model": model, "products": products} | device_and_versions()
    return {"cases": [dataclasses.asdict(case) for case in cases]} | about


def _model(model: str, slots: int) -> tuple[Params, BankSchema]:
    """The base's arrays and the shapes of a bank."""
    if model in SHAPES:
        config = shape_config(model)
        schema = BankSchema.covering(config, slots)

        # Made where they stay: 8 billion of them would take minutes to bring to a card.
        keys = (jax.random.key(i) for i in itertools.count())

        def weight(spec: ParamSpec) -> jax.Array:
            noise = jax.random.normal(next(keys), spec.shape, jnp.bfloat16) * 0.02
            return noise if spec.init_std else noise + 1

        params = map_specs(weight, config)
    elif Path(model).is_dir():
        store = Store(Path(model))
        schema = BankSchema.covering(store.base().config, slots)
        params = read_base(store, schema.held)
    else:
        names = ", ".join(SHAPES)
        raise ValueError(f"model is {model!r}; expected {names} or the folder of a store")
    return params, schema


def model_bytes(model: str) -> tuple[int, int]:
    """Bytes of a model of `SHAPES` that a decode step reads: of the base's weights in bfloat16, and
    of one variant's signs and scales.

    An embedding that is no head as well is not read but for a row.
    """
    schema = BankSchema.covering(ModelConfig.from_hf(SHAPES[model] | _COMMON), 1)
    base = delta = 0

    def add(spec: ParamSpec) -> None:
        nonlocal base, delta
        if spec.kind == "vector" or (spec.sources[0] == EMBED and not config.tie_word_embeddings):
            return
        outputs = math.prod(spec.shape[:-1])
        base += 2 * outputs * spec.shape[-1]
        delta += outputs * (packed_size(spec.shape[-1]) + 4)

    config = schema.held.config
    map_specs(add, config)
    return base, delta


def random_engine(model: str, slots: int, rows: int, length: int) -> tuple[Engine, DeltaBank]:
    """An engine of random weights, or of a store's, with a bank of random deltas.

    Args:
      model: as `bench_decode` takes it.
      slots: M.
      rows, length: as in `EngineConfig`.

    Raises:
      ValueError: an unknown model, or a length beyond it.
    """
    params, schema = _model(model, slots)
    engine = Engine(params, EngineConfig(rows, length, dtype=_dtype()), schema)
    return engine, random_bank(engine)


def _dtype() -> str:
    """Of activations on this machine."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def random_bank(engine: Engine) -> DeltaBank:
    """A bank whose every slot has random signs and one small scale: variants to measure with."""
    keys = (jax.random.key(i) for i in itertools.count(1))

    def signs(bits: jax.Array) -> jax.Array:
        return jax.random.bits(next(keys), bits.shape, bits.dtype)

    def random(delta: WeightDelta) -> WeightDelta:
        if delta.kernel is not None:
            words, scale = signs(delta.kernel.words), jnp.full_like(delta.kernel.scale, _SCALE)
            kernel = delta.kernel._replace(words=words, scale=scale)
            return dataclasses.replace(delta, kernel=kernel)
        if delta.bits is None or delta.scale is None:
            return delta
        scale = jnp.full_like(delta.scale, _SCALE)
        return dataclasses.replace(delta, bits=signs(delta.bits), scale=scale)

    empty = engine.init_bank()
    deltas = jax.tree.map(random, empty.weights, is_leaf=lambda n: isinstance(n, WeightDelta))
    return DeltaBank(deltas, empty.vocab)


class _Bench:
    """An engine of so many rows, and steps of it timed one by one."""

    def __init__(
        self,
        params: Params,
        schema: BankSchema,
        context: int,
        repeats: int,
        products: str,
        batch: int,
        bank: DeltaBank | None = None,
    ) -> None:
        # Two states take turns; each makes a step untimed before every timed one.
        length = context + 2 * repeats + 8
        sizes = EngineConfig(batch, length, products=products, dtype=_dtype())
        self.engine = Engine(params, sizes, schema)
        self.bank = random_bank(self.engine) if bank is None else bank
        self.batch, self.context, self.repeats = batch, context, repeats

    def state(self, slots: np.ndarray) -> DecodeState:
        """Rows of these slots in the middle of a request."""
        full = functools.partial(jnp.full, (self.batch,))
        return dataclasses.replace(
            self.engine.init_state(),
            lengths=full(self.context, jnp.int32),
            tokens=full(1, jnp.int32),
            slots=jnp.asarray(slots, jnp.int32),
            active=full(True),
        )

    def step(self, state: DecodeState) -> tuple[DecodeState, float, float]:
        """A step after an untimed one; its seconds, and those until it was launched."""
        state, _ = self.engine.decode(self.bank, state)
        jax.block_until_ready(state.tokens)
        start = time.perf_counter()
        state, tokens = self.engine.decode(self.bank, state)
        launched = time.perf_counter()
        jax.block_until_ready(tokens)
        return state, time.perf_counter() - start, launched - start


def _measure(whole: _Bench, part: _Bench, count: int) -> DecodeCase:
    """Times the four ways in turn: `whole` has all rows, `part` those of one variant."""
    batch = whole.batch
    rows = np.arange(batch) % count
    states = {
        "base": (whole, whole.state(np.full(batch, BASE_SLOT))),
        "variant": (whole, whole.state(np.zeros(batch))),
        "mixed": (whole, whole.state(rows)),
    }
    # The V steps of the naive way are V times one of them: each reads the weights anew.
    states["part"] = (part, part.state(np.zeros(part.batch)))
    for name, (bench, state) in states.items():
        states[name] = (bench, bench.step(state)[0])
    before = whole.engine.compiles + part.engine.compiles
    times: dict[str, list[float]] = {name: [] for name in states}
    host: list[float] = []
    for _ in range(whole.repeats - 1):
        for name, (bench, state) in states.items():
            state, seconds, launch = bench.step(state)
            states[name] = (bench, state)
            times[name].append(seconds * 1e3)
            if name == "mixed":
                host.append(launch / seconds)
    compiles = whole.engine.compiles + part.engine.compiles - before
    median = {name: statistics.median(taken) for name, taken in times.items()}
    slower = median["variant"] / median["base"]
    naive_ms = count * median["part"]
    speedup, bound = naive_ms / median["mixed"], 16 * count / (16 + count) if count > 1 else 1.0
    return DecodeCase(
        batch=batch,
        variants=count,
        context=whole.context,
        base_ms=median["base"],
        variant_ms=median["variant"],
        mixed_ms=median["mixed"],
        naive_ms=naive_ms,
        variant_over_base=slower,
        speedup=speedup,
        bound=bound,
        fraction_of_bound=speedup / bound if count > 1 else (1 + 1 / 16) / slower,
        tokens_per_s=1e3 * batch / median["mixed"],
        host_share=statistics.median(host),
        compiles=compiles,
    )
