"""What the arithmetic of a decode step costs: the default format as it is served.

Fine-tunes that are examined alike share one bank over their bfloat16 base. Their sheets are read
one token at a time with a cache, rows of all of them in one batch, so that every product is
`bitdelta_matmul_mixed` with the CPU kernel. The tokens are given, not sampled, and what is
predicted is held against the fine-tune and against the same format as whole float32 weights. What
rounded activations do to a fine-tune's own weights is measured beside it: that is nobody's delta.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from pallas_kernels import cpu_build
from pallas_kernels.bitdelta_matmul import cpu
from pallas_kernels.paged_attention.pages import Pages
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import bind
from zen_jax.delta.bank import BankSchema
from zen_jax.evaluation.sheet import Sheet
from zen_jax.kv_cache import InPages, make_cache, own_pages
from zen_jax.layout import Params, fuse
from zen_jax.model import Linear, Transformer, make_merge
from zen_jax.training import scoring
from zen_jax.training.format_study.formats import DEFAULT, FORMATS, store
from zen_jax.training.format_study.measure import Examiner, tensors_digest
from zen_jax.training.format_study.study import (
    SERVED,
    Results,
    Subject,
    marks_kept,
    subject_key,
)
from zen_jax.training.residual import file_digest, float32_params

# Kinds of weights, by what their inputs are.
KINDS = ("qkv", "o", "gate_up", "down", "head")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """What a decode step computes in.

    Attributes:
      dtype: of activations between weights, and of the cache.
      products: what they are rounded to before each weight; None leaves them. As
        `zen_jax.engine_state.EngineConfig.products`.
    """

    dtype: str
    products: str | None = None


ARITHMETICS = {
    "float32": Arithmetic("float32"),
    "products": Arithmetic("float32", "bfloat16"),
    "bfloat16": Arithmetic("bfloat16"),
}
# Those in which a fine-tune's own bfloat16 weights are measured -> by what name.
OWN = {"products": "own-products", "bfloat16": "own-bfloat16"}
# Rows of each fine-tune in a batch.
ROWS = 16

# As in pallas_kernels/bitdelta_matmul/cpu_tables.h: the error allowed, steps of a fine table in one
# of a coarse one, and inputs of a word.
_ERROR, _COARSE, _WORD = 0.015, 126.0, 32


def table_words(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of which words of 32 inputs the CPU kernel makes a coarse table as well, over a bfloat16
    base: `choose` in pallas_kernels/bitdelta_matmul/cpu_tables.h.

    Args:
      x: float[B, I], finite.

    Returns:
      bool[B, ceil(I / 32)]; and float32[B], the step of the fine tables.
    """
    size = x.shape[1]
    wide = jnp.pad(jnp.abs(x.astype(jnp.float32)), ((0, 0), (0, -size % _WORD)))
    eights = jnp.sum(wide.reshape(x.shape[0], -1, _WORD // 8, 8), axis=3)
    most = jnp.max(eights, axis=(1, 2))
    squares = jnp.sum(jnp.square(wide), axis=1)
    reach = _COARSE * _ERROR * jnp.sqrt(12 * squares / (size // 4 + 1))
    within = jnp.max(jnp.where(eights <= reach[:, None, None], eights, 0.0), axis=(1, 2))
    fine = jnp.where(most <= reach, most, jnp.maximum(within, most / _COARSE))
    listed = (jnp.max(eights, axis=2) > fine[:, None]) & (most >= 1e-30)[:, None]
    return listed, fine / _COARSE


class _Watched:
    """A weight of a layer in its place, which tells of what it is multiplied with."""

    def __init__(self, weight: Linear, kind: str, see: Callable[[str, jax.Array], None]) -> None:
        self.how = weight.how
        self._weight, self._kind, self._see = weight, kind, see

    def __call__(self, x: jax.Array) -> jax.Array:
        self._see(self._kind, x)
        return self._weight(x)


def watch(model: Transformer, see: Callable[[str, jax.Array], None]) -> None:
    """Has a model's layers tell `see` the kind and the inputs [B, T, I] of their weights, while a
    program is traced."""
    for layer in model.layers:
        for part, names in ((layer.attention, ("qkv", "o")), (layer.mlp, ("gate_up", "down"))):
            for name in names:
                setattr(part, name, _Watched(getattr(part, name), name, see))


@functools.lru_cache(maxsize=4)
def decoder(config: ModelConfig, arithmetic: Arithmetic) -> Callable[..., tuple[jax.Array, dict]]:
    """The decode steps of given tokens in one program.

    Args:
      config: the model.
      arithmetic: what it computes in.

    Returns:
      Jitted (params, deltas in a bank or None, slots int32[B], tokens int32[B, T + 1], lengths
      int32[B]) -> log-probabilities float32[B, T, V] of the next token, and for each of `KINDS`
      int32[B, 2], how many words of 32 inputs had one table and two, at positions below a row's
      length.
    """
    dtype, products = jnp.dtype(arithmetic.dtype), arithmetic.products
    merge = make_merge(config, None, products)

    def decode(
        params: Params, bank: Params | None, slots: jax.Array, tokens: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, dict]:
        rows, positions = tokens.shape[0], tokens.shape[1] - 1
        bound = params if bank is None else bind(params, bank, slots)

        # Fixed rows: a page each.
        own = InPages(own_pages(rows, 1))

        def step(cache: list[Pages], at: jax.Array) -> tuple[list[Pages], Any]:
            counts = {kind: jnp.zeros((rows, 2), jnp.int32) for kind in KINDS}

            def see(kind: str, x: jax.Array) -> None:
                met = x[:, 0] if products is None else x[:, 0].astype(products)
                listed, _ = table_words(met)
                found = jnp.stack([jnp.sum(~listed, axis=1), jnp.sum(listed, axis=1)], axis=1)
                counts[kind] += jnp.where(at < lengths[:, None], found, 0)

            model = merge(bound)
            watch(model, see)
            where = jnp.full((rows, 1), at)
            hidden, cache = model(tokens[:, at][:, None], where, cache, dtype, own)
            see("head", hidden)
            return cache, (jax.nn.log_softmax(model.logits(hidden)[:, 0]), counts)

        cache = make_cache(config, rows, positions, dtype)
        _, (found, counts) = jax.lax.scan(step, cache, jnp.arange(positions, dtype=jnp.int32))
        return jnp.swapaxes(found, 0, 1), {kind: c.sum(axis=0) for kind, c in counts.items()}

    return jax.jit(decode)


def mixed(sheets: Sequence[Sheet]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of all sheets together, rows in turn: row r belongs to sheet r mod n.

    Args:
      sheets: n of them, each with the same number of batches of the same size.

    Yields:
      Tokens int32[B, T + 1], padded to the longest; and int32[B], the inputs of a row up to its
      last one that counts.
    """
    length = max(sheet.tokens.shape[1] for sheet in sheets)
    for parts in zip(*(sheet.batches() for sheet in sheets), strict=True):
        tokens = [np.pad(t, ((0, 0), (0, length - t.shape[1]))) for t, _ in parts]
        lengths = [np.max(c * np.arange(1, c.shape[1] + 1), axis=1) for _, c in parts]
        together = np.stack(tokens, axis=1).reshape(-1, length)
        yield together, np.stack(lengths, axis=1).reshape(-1).astype(np.int32)


def make_bank(subjects: Sequence[Subject]) -> Params:
    """Fine-tunes of one base in the default format, stacked: a slot for each, in their order."""
    schema = BankSchema.covering(subjects[0].config, len(subjects))
    slots = [schema.fit(scoring.one_bit_deltas(s.base, s.tuned)).weights for s in subjects]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *slots)


def decode_all(
    config: ModelConfig,
    params: Params,
    bank: Params | None,
    sheets: Sequence[Sheet],
    arithmetic: Arithmetic,
) -> tuple[list[list[np.ndarray]], list[dict[str, list[int]]]]:
    """Takes sheets through decode steps.

    Args:
      config: the model.
      params: its weights.
      bank: what is added to them for each sheet, see `make_bank`; None for nothing.
      sheets: n of them; see `mixed`.
      arithmetic: what is computed in.

    Returns:
      For each sheet: log-probabilities float32[batch, T, V] of each batch; and for each of
      `KINDS` how many words of 32 inputs had one table and two.
    """
    n, params = len(sheets), jax.device_put(params)
    found: list[list[np.ndarray]] = [[] for _ in sheets]
    tables = np.zeros((n, len(KINDS), 2), int)
    for tokens, lengths in mixed(sheets):
        slots = np.arange(len(tokens), dtype=np.int32) % n
        predicted, counts = decoder(config, arithmetic)(params, bank, slots, tokens, lengths)
        for i, sheet in enumerate(sheets):
            found[i].append(np.asarray(predicted[i::n, : sheet.tokens.shape[1] - 1]))
            tables[i] += np.stack([np.asarray(counts[kind])[i::n].sum(axis=0) for kind in KINDS])
    return found, [dict(zip(KINDS, rows.tolist(), strict=True)) for rows in tables]


def measure_group(subjects: Sequence[Subject], rows: int) -> list[dict[str, Any]]:
    """Marks of the default format of fine-tunes that share a bank.

    Args:
      subjects: of one base.
      rows: of each sheet, at most.

    Returns:
      For each subject: "rows" and "tokens" that were examined; marks of "whole" float32 weights;
      of each of `ARITHMETICS`, with how many words had one and two "tables"; and by the names of
      `OWN` those of the fine-tune's own bfloat16 weights.

    Raises:
      ValueError: the subjects' bases differ.
    """
    if len({(s.config, tensors_digest(s.base)) for s in subjects}) > 1:
        raise ValueError(f"{', '.join(s.name for s in subjects)}: the bases differ; expected one")
    rows = min(rows, *(len(s.sheet.tokens) for s in subjects))
    sheets = [s.sheet.part(rows, ROWS) for s in subjects]
    examiners, made = [], []
    for subject, sheet in zip(subjects, sheets, strict=True):
        examine = Examiner(subject.config, sheet, float32_params(subject.config, subject.tuned))
        stored = store(FORMATS[DEFAULT], subject.base, subject.tuned)
        whole = examine(float32_params(subject.config, stored.tensors))
        examiners.append(examine)
        made.append({"rows": rows, "tokens": int(sheet.counted.sum()), "whole": marks_kept(whole)})
    config, base = subjects[0].config, fuse(subjects[0].config, subjects[0].base)
    bank = make_bank(subjects)
    for name, arithmetic in ARITHMETICS.items():
        found, tables = decode_all(config, base, bank, sheets, arithmetic)
        for i, examine in enumerate(examiners):
            made[i][name] = {**marks_kept(examine.judge(found[i])), "tables": tables[i]}
    for i, (subject, examine) in enumerate(zip(subjects, examiners, strict=True)):
        own = fuse(config, subject.tuned)
        for name, kept in OWN.items():
            (found,), _ = decode_all(config, own, None, sheets[i : i + 1], ARITHMETICS[name])
            made[i][kept] = marks_kept(examine.judge(found))
    return made


def run(
    subjects: Mapping[str, Callable[[], Subject]],
    results: Results,
    rows: int,
    progress: bool = True,
) -> None:
    """Measures fine-tunes as they are served and keeps it, those that give answers in one bank and
    those that learnt a text in another.

    Args:
      subjects: name -> how it is made; all formats of theirs are measured.
      results: where to keep measurements.
      rows: of each sheet, at most.
      progress: whether to show a bar.

    Raises:
      ValueError: the CPU kernel is not built.
    """
    if not cpu.available():
        raise ValueError("the CPU kernel is not built; run python -m pallas_kernels.cpu_build")
    kernel = cpu_build.library_path("bitdelta_matmul").name
    whole = [make() for make in subjects.values()]
    groups = [[s for s in whole if s.sheet.answers == answers] for answers in (True, False)]
    with Progress(disable=not progress) as bar:
        for group in bar.track([g for g in groups if g], description="as served"):
            wanted = group_key(group, rows, kernel)
            kept = [results.variants[s.name].get(SERVED, {}) for s in group]
            if all(found.get("key") == wanted for found in kept):
                continue
            for subject, found in zip(group, measure_group(group, rows), strict=True):
                results.variants[subject.name][SERVED] = {"key": wanted, **found}
            results.save()


def group_key(subjects: Sequence[Subject], rows: int, kernel: str) -> str:
    """Changes with the subjects, with this file and with the kernel's library, whose name does with
    its sources."""
    parts = [*map(subject_key, subjects), str(rows), kernel, file_digest(Path(__file__))]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
