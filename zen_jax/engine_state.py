"""What the engine is made for, what it keeps between two calls, and what a call brings.

Letters: B rows, S positions of a row, N pages of P positions, J pages of a row at most, C chunks of
T tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.pages import BLOCK, DTYPES, Pages
from zen_jax.chunking import Shape, chunk_shapes
from zen_jax.config import ModelConfig
from zen_jax.kv_cache import own_pages, page_bytes, pages_for
from zen_jax.pages import NO_PAGE
from zen_jax.sampler import RowSampling, count_tokens, init_seen
from zen_jax.sampling import SamplingParams

# An array on host or device, or where one lies.
Array = Any

BASE_SLOT = -1

_GREEDY = SamplingParams(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that are fixed when the engine is made.

    Attributes:
      rows: B, requests that decode at once.
      max_length: the most tokens of a request, prompt and answer together.
      chunk_tokens: prompt tokens that one call reads at most, which is what a long prompt holds
        the decoding of others up by.
      max_steps: decode steps that one call makes at most.
      dtype: of activations: "float32" or "bfloat16".
      products: what activations are rounded to before they meet a weight, "float32" or "bfloat16":
        as fast as bfloat16 activations, with sums and everything else in `dtype`.
      page_size: P, positions of a page, a multiple of 16; `max_length` or more makes fixed rows.
      pages: N; None has as many as all rows need at their longest.
      kv_dtype: of keys and values, one of `pallas_kernels.paged_attention.pages.DTYPES`; None takes
        `dtype`.
      signs: the order in which the bank holds them, "packed" as in the store or "hopper" as the
        kernels for those cards read them; "auto" takes the second on such a card.
    """

    rows: int = 16
    max_length: int = 1024
    chunk_tokens: int = 512
    max_steps: int = 8
    dtype: str = "float32"
    products: str = "float32"
    page_size: int = 32
    pages: int | None = None
    kv_dtype: str | None = None
    signs: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("max_length", 2), ("chunk_tokens", 2), ("max_steps", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        for name in ("dtype", "products"):
            value = getattr(self, name)
            if value not in ("float32", "bfloat16"):
                raise ValueError(f"{name} is {value!r}; expected 'float32' or 'bfloat16'")
        if self.signs not in ("auto", "packed", "hopper"):
            raise ValueError(f"signs is {self.signs!r}; expected 'auto', 'packed' or 'hopper'")
        if self.held_as not in DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; expected one of {', '.join(DTYPES)}")
        if self.page_size < 1 or (self.page_size % BLOCK and self.columns > 1):
            raise ValueError(
                f"page_size is {self.page_size}; expected a multiple of {BLOCK}, or max_length, "
                f"{self.max_length}, for fixed rows"
            )
        if self.all_pages < self.columns:
            raise ValueError(
                f"there are {self.pages} pages of {self.page_size} tokens; a request of max_length "
                f"{self.max_length} needs {self.columns}: give the cache more bytes, or shorten it"
            )

    @property
    def held_as(self) -> str:
        """The dtype of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def columns(self) -> int:
        """J, pages of a row at its longest."""
        return pages_for(self.max_length, self.page_size)

    @property
    def all_pages(self) -> int:
        """N."""
        return self.rows * self.columns if self.pages is None else self.pages

    def within(self, config: ModelConfig, budget: int) -> "EngineConfig":
        """The same with as many pages as go into so many bytes.

        Args:
          config: the model.
          budget: bytes of keys and values in all layers, on all devices together.

        Raises:
          ValueError: not even one request at its longest goes into them.
        """
        one = page_bytes(config, self.page_size, self.held_as)
        if budget < one * self.columns:
            raise ValueError(
                f"{budget} bytes hold the keys and values of {budget // one * self.page_size} "
                f"tokens; one request of {self.max_length} needs {one * self.columns}: give more, "
                "or a shorter max_length, or keep them in fewer bits"
            )
        return dataclasses.replace(self, pages=budget // one)

    def table(self, pages: Mapping[int, Sequence[int]]) -> np.ndarray:
        """Page tables of all rows, int32[B, J]; rows that are not among `pages` have none."""
        table = np.full((self.rows, self.columns), NO_PAGE, np.int32)
        for row, own in pages.items():
            table[row, : len(own)] = own
        return table

    def fixed_table(self) -> np.ndarray:
        """The table in which each row has pages of its own, int32[B, J].

        Raises:
          ValueError: there are too few pages for that.
        """
        if self.all_pages < self.rows * self.columns:
            raise ValueError(
                f"{self.rows} rows of {self.columns} pages have not each their own: there are "
                f"{self.all_pages}; say which pages each row has"
            )
        return own_pages(self.rows, self.columns)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes (C, T) of a call that reads prompts."""
        return chunk_shapes(self.chunk_tokens, self.rows, self.max_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a call reads and writes.

    Attributes:
      cache: keys and values of every layer, [N, P, K, H].
      lengths: int32[B], tokens in the cache.
      tokens: int32[B], the newest token of a row, not yet in the cache.
      slots: int32[B], each row's variant; -1 is the base.
      active: bool[B], whether the row decodes: its prompt is read and it has not stopped.
      sampling: each row's settings, its ends among them.
      seen: int32[B, V], which tokens stand in the row, for penalties; see `zen_jax.sampler`.
    """

    cache: list[Pages]
    lengths: Array
    tokens: Array
    slots: Array
    active: Array
    sampling: RowSampling
    seen: Array

    @classmethod
    def empty(cls, cache: list[Pages], rows: int, vocab_size: int) -> "DecodeState":
        """A state without requests."""

        def full(value: int) -> jax.Array:
            return jnp.full((rows,), value, jnp.int32)

        return cls(
            cache=cache,
            lengths=full(0),
            tokens=full(0),
            slots=full(BASE_SLOT),
            active=jnp.zeros((rows,), bool),
            sampling=RowSampling.empty(rows),
            seen=init_seen(rows, vocab_size),
        )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of one request's prompt, and what the request asks for.

    Attributes:
      row: where it goes.
      slot: the request's variant, -1 for the base.
      token_ids: this part's tokens.
      start: the position of the first; all before it are in the row already.
      last: whether the prompt ends here, so that the first token of the answer is chosen.
      sampling: validated settings.
      seed: 0 to 2**64 - 1.
      sample_index: which of several samples of the request this is.
      stops: tokens after which the row stops, at most 128.
      end: tokens of prompt and answer together at which it stops; None is the engine's most.
      prompt: tokens of the caller's prompt, when some of the answer is read with it; None when all
        that is read is the prompt.
      targets: the token that comes after each of this part's, to give their log-probabilities; of
        the last of a prompt it is not known, and there is none. Empty: they are not wanted.
      pages: of the row, from position 0 on, `NO_PAGE` where none is needed any more; None takes the
        row's own, see `EngineConfig.fixed_table`.
      before: the sequence's first tokens, whose keys and values another request has left in these
        pages; given with the first chunk of a row, which then begins behind them.
    """

    row: int
    slot: int
    token_ids: Sequence[int]
    start: int = 0
    last: bool = True
    sampling: SamplingParams = _GREEDY
    seed: int = 0
    sample_index: int = 0
    stops: Sequence[int] = ()
    end: int | None = None
    prompt: int | None = None
    targets: Sequence[int] = ()
    pages: Sequence[int] | None = None
    before: Sequence[int] = ()

    @property
    def begins(self) -> bool:
        """Whether it is the first of its row's."""
        return self.start == len(self.before)

    @property
    def total(self) -> int:
        """Tokens in the row once this is read."""
        return self.start + len(self.token_ids)

    def cut(self, size: int) -> list["Chunk"]:
        """The same in parts of at most `size` tokens, in their order."""
        count = len(self.token_ids)
        return [
            dataclasses.replace(
                self,
                token_ids=self.token_ids[at : at + size],
                start=self.start + at,
                last=self.last and at + size >= count,
                prompt=self.total if self.prompt is None else self.prompt,
                targets=self.targets[at : at + size],
                before=() if at else self.before,
            )
            for at in range(0, count, size)
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkBatch:
    """Chunks as one call takes them.

    Attributes:
      tokens: int32[C, T], padded.
      rows: int32[C]; B is nobody's.
      slots: int32[C].
      starts: int32[C].
      lengths: int32[C], true tokens.
      last: bool[C].
      prompts: int32[C].
      sampling: settings, C rows.
      targets: int32[C, T], the token after each.
      wanted: bool, whether some chunk's log-probabilities are.
      table: int32[C, J].
      begins: bool[C].
      before: int32[C, S], where their counts matter; -1 elsewhere.
    """

    tokens: Array
    rows: Array
    slots: Array
    starts: Array
    lengths: Array
    last: Array
    prompts: Array
    sampling: RowSampling
    targets: Array
    wanted: Array
    table: Array
    begins: Array
    before: Array

    @classmethod
    def of(cls, chunks: Sequence[Chunk], shape: Shape, sizes: EngineConfig) -> "ChunkBatch":
        """Puts chunks side by side, padded to a shape that takes them, as NumPy arrays."""
        nobody = Chunk(sizes.rows, BASE_SLOT, ())
        padded = [*chunks, *[nobody] * (shape[0] - len(chunks))]
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        table = np.full((shape[0], sizes.columns), NO_PAGE, np.int32)
        before = np.full((shape[0], sizes.max_length), -1, np.int32)
        for i, chunk in enumerate(chunks):
            tokens[i, : len(chunk.token_ids)] = chunk.token_ids
            targets[i, : len(chunk.targets)] = chunk.targets
            pages = sizes.fixed_table()[chunk.row] if chunk.pages is None else chunk.pages
            table[i, : len(pages)] = pages
            if chunk.before and chunk.sampling.penalised:
                before[i, : len(chunk.before)] = chunk.before

        def each(values: list[int]) -> np.ndarray:
            return np.array(values, np.int32)

        settings = [_settings(chunk, sizes) for chunk in padded]
        return cls(
            tokens=tokens,
            rows=each([c.row for c in padded]),
            slots=each([c.slot for c in padded]),
            starts=each([c.start for c in padded]),
            lengths=each([len(c.token_ids) for c in padded]),
            last=np.array([c.last and bool(c.token_ids) for c in padded]),
            prompts=each([_prompt(c) for c in padded]),
            sampling=jax.tree.map(lambda *leaves: np.concatenate(leaves), *settings),
            targets=targets,
            wanted=np.array(any(chunk.targets for chunk in chunks)),
            table=table,
            begins=np.array([c.begins for c in padded]),
            before=before,
        )

    def count_before(self, seen: jax.Array, rows: RowSampling) -> jax.Array:
        """Counts of tokens, int32[B, V], with those that were in the rows' pages already.

        Args:
          seen: the counts.
          rows: settings of the B rows.
        """
        places = jnp.arange(self.before.shape[1])

        def count() -> jax.Array:
            at = jnp.where(self.before >= 0, self.rows[:, None], -1)
            made = places >= self.prompts[:, None]
            return count_tokens(seen, rows, at.ravel(), self.before.ravel(), made.ravel())

        return jax.lax.cond(jnp.any(self.before >= 0), count, lambda: seen)


def _prompt(chunk: Chunk) -> int:
    return chunk.total if chunk.prompt is None else chunk.prompt


def _settings(chunk: Chunk, sizes: EngineConfig) -> RowSampling:
    return RowSampling.of(
        chunk.sampling,
        chunk.seed,
        prompt=_prompt(chunk),
        stops=frozenset(chunk.stops),
        sample=chunk.sample_index,
        end=sizes.max_length if chunk.end is None else chunk.end,
    )
