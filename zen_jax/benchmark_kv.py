"""What pages and fewer bits of keys and values cost: in a decode step's time, and in answers.

Fixed rows are pages of a row's length in this same engine; the pages beside them lie in an order
drawn at random, as they do after hours of serving.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.benchmark import Progress
from zen_jax.config import ModelConfig
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import BASE_SLOT, Engine, EngineConfig
from zen_jax.kv_cache import InPages, make_cache, own_pages, page_bytes, pages_for
from zen_jax.layout import Params
from zen_jax.model import make_merge

# Positions that decode steps go on for, behind the context.
_ROOM = 64
_PAGE = 32


@dataclasses.dataclass(frozen=True)
class DecodeKind:
    """One way to keep keys and values.

    Attributes:
      kv_dtype: what they are kept as.
      page_size: positions of a page; None for fixed rows.
      step_ms: a decode step, the median.
      over_fixed: step_ms over that of fixed rows of the same dtype.
      over_float32: step_ms over that of fixed rows in float32.
      bytes_per_token: in all layers.
    """

    kv_dtype: str
    page_size: int | None
    step_ms: float
    over_fixed: float
    over_float32: float
    bytes_per_token: float


class _Case:
    """An engine in the middle of requests, and its steps' times."""

    def __init__(
        self, params: Params, schema: BankSchema, sizes: EngineConfig, context: int
    ) -> None:
        self.engine = Engine(params, sizes, schema)
        self.bank = self.engine.init_bank()
        table = sizes.fixed_table()
        if sizes.columns > 1:
            mixed = np.random.default_rng(0).permutation(table.size).astype(np.int32)
            table = mixed.reshape(table.shape)
        self.table = table
        full = (sizes.rows,)
        self.state = dataclasses.replace(
            self.engine.init_state(),
            lengths=jnp.full(full, context, jnp.int32),
            tokens=jnp.full(full, 1, jnp.int32),
            slots=jnp.full(full, BASE_SLOT, jnp.int32),
            active=jnp.full(full, True),
        )
        self.times: list[float] = []

    def step(self) -> float:
        """Milliseconds of one decode step."""
        start = time.perf_counter()
        self.state, sampled = self.engine.decode(self.bank, self.state, 1, None, self.table)
        jax.block_until_ready(sampled)
        return (time.perf_counter() - start) * 1e3


def decode_kinds(
    params: Params,
    schema: BankSchema,
    kinds: Sequence[tuple[str, int | None]],
    rows: int = 16,
    context: int = 512,
    repeats: int = 15,
    progress: Progress | None = None,
) -> list[DecodeKind]:
    """Times decode steps of the base, each kind in turn, so that all meet the same disturbances.

    Args:
      params: the base's arrays.
      schema: the shapes of its bank.
      kinds: dtype and page size of each, fixed rows of each dtype among them, and of float32.
      rows: B.
      context: tokens in each row.
      repeats: steps that are timed, at most 30; each follows one that is not.
      progress: told the kind, how many are done and how many there are.

    Raises:
      ValueError: a size is out of range, or a dtype has no fixed rows.
    """
    if not 1 <= repeats <= _ROOM // 2 - 2 or rows < 1 or context < 1:
        raise ValueError(
            f"rows is {rows}, context {context} and repeats {repeats}; expected 1 or more, "
            f"repeats up to {_ROOM // 2 - 2}"
        )
    missing = {dtype for dtype, _ in kinds} | {"float32"}
    missing -= {dtype for dtype, size in kinds if size is None}
    if missing:
        raise ValueError(f"{min(missing)} has no fixed rows to compare with; add them")
    length, cases = context + _ROOM, {}
    for done, (dtype, size) in enumerate(kinds):
        if progress is not None:
            progress(f"compiling: {dtype}, {size or 'fixed rows'}", done, len(kinds))
        sizes = EngineConfig(
            rows, length, products="bfloat16", page_size=size or length, kv_dtype=dtype
        )
        cases[dtype, size] = _Case(params, schema, sizes, context)
        cases[dtype, size].step()
    for _ in range(repeats):
        for case in cases.values():
            case.step()
            case.times.append(case.step())
    median = {kind: statistics.median(case.times) for kind, case in cases.items()}
    config = schema.held.config
    return [
        DecodeKind(
            dtype,
            size,
            median[dtype, size],
            median[dtype, size] / median[dtype, None],
            median[dtype, size] / median["float32", None],
            page_bytes(config, _PAGE, dtype) / _PAGE,
        )
        for dtype, size in kinds
    ]


@dataclasses.dataclass(frozen=True)
class Divergence:
    """What fewer bits of keys and values change in a model's predictions, against float32.

    Attributes:
      kv_dtype: what they are kept as.
      tokens: predictions that are compared.
      kl: mean of KL(float32 || this), in nats.
      kl_99: its 99th percentile.
      same: share of predictions whose likeliest token is the same.
    """

    kv_dtype: str
    tokens: int
    kl: float
    kl_99: float
    same: float


def divergences(
    config: ModelConfig, params: Params, sheets: Sequence[Sequence[int]], dtypes: Sequence[str]
) -> list[Divergence]:
    """Reads texts with keys and values kept in each dtype.

    Args:
      config: the model.
      params: its weights.
      sheets: tokens of each text, of any lengths.
      dtypes: to compare with float32.
    """
    merge = make_merge(config)
    longest = max(map(len, sheets))
    columns = pages_for(longest, _PAGE)

    def read(params: Params, tokens: jax.Array, length: jax.Array, dtype: str) -> jax.Array:
        model = merge(params)
        where = InPages(jnp.asarray(own_pages(1, columns)), length[None])
        cache = make_cache(config, columns, _PAGE, dtype)
        at = jnp.arange(longest, dtype=jnp.int32)[None]
        hidden, _ = model(tokens[None], at, cache, where=where)
        return jax.nn.log_softmax(model.logits(hidden)[0])

    def compare(want: jax.Array, got: jax.Array) -> tuple[jax.Array, jax.Array]:
        kl = jnp.sum(jnp.exp(want) * (want - got), axis=-1)
        return kl, jnp.argmax(want, -1) == jnp.argmax(got, -1)

    run: Any = jax.jit(read, static_argnums=3)
    judge = jax.jit(compare)
    found: dict[str, list[Any]] = {dtype: [] for dtype in dtypes}
    for sheet in sheets:
        tokens = jnp.asarray([*sheet, *[0] * (longest - len(sheet))], jnp.int32)
        case = (params, tokens, jnp.int32(len(sheet)))
        want = run(*case, "float32")
        for dtype in dtypes:
            kl, same = judge(want, run(*case, dtype))
            found[dtype].append((np.asarray(kl)[: len(sheet)], np.asarray(same)[: len(sheet)]))
    made = []
    for dtype, parts in found.items():
        kl, same = (np.concatenate(part) for part in zip(*parts, strict=True))
        high = float(np.quantile(kl, 0.99))
        made.append(Divergence(dtype, kl.size, float(kl.mean()), high, float(same.mean())))
    return made
