"""Prefill and decode: compiled functions over explicit state, for rows of any variants.

The engine owns nothing that changes but its compiled programs: `DecodeState` and the bank go in
and come out, donated. One call reads chunks of several prompts straight into their rows; another
makes decode steps over all rows, each with the slot of its variant.

Letters: B rows, N pages of P positions, J pages of a row at most, C chunks of T tokens, M slots,
V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zen_jax.chunking import Shape, shape_for
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import bind
from zen_jax.delta.bank import BankSchema, DeltaBank, write_slot
from zen_jax.delta.format import WeightDelta
from zen_jax.delta.resident import ResidentBank
from zen_jax.engine_state import (
    BASE_SLOT,
    Chunk,
    ChunkBatch,
    DecodeState,
    EngineConfig,
)
from zen_jax.kv_cache import KV_AXES, InPages, make_cache, pages_for, reach
from zen_jax.layout import Params, ParamSpec, map_specs
from zen_jax.model import Transformer, make_merge
from zen_jax.pages import NO_PAGE
from zen_jax.programs import Programs, Progress
from zen_jax.sampler import (
    MAX_STOPS,
    Logprobs,
    Sampled,
    clear_counts,
    count_tokens,
    prompt_logprobs,
    sample,
)
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement

# An array on host or device, or where one lies.
Array = Any

_WRITE, _DECODE, _ORDER = "write_slot", "decode", "kernel_order"


def place_params(config: ModelConfig, params: Params, placement: Placement | None = None) -> Params:
    """Puts parameters on the devices where they belong, in the dtype that they have.

    Args:
      config: the model.
      params: NumPy or JAX arrays.
      placement: the mesh, or None for one device.
    """

    def put(spec: ParamSpec, value: Any) -> jax.Array:
        return jax.device_put(value, None if placement is None else placement.sharding(spec.axes))

    return map_specs(put, config, params)


class Engine:
    """The compiled functions of one base model and its bank.

    Attributes:
      config: the architecture as held; see `zen_jax.delta.widen`.
      sizes: what was fixed at start.
      schema: the shapes of the bank.
      programs: what is compiled, or will be.
      params: the base's arrays; their shapes will do to compile, and are replaced before a call.
    """

    def __init__(
        self,
        params: Params,
        sizes: EngineConfig,
        schema: BankSchema,
        mesh: Mesh | None = None,
    ) -> None:
        """Takes the base's parameters; compiles nothing yet.

        Args:
          params: the base's arrays as held, placed by `place_params` on the same mesh, or
            `jax.ShapeDtypeStruct` with their shardings.
          sizes: rows, lengths, chunks.
          schema: the shapes of the bank and of the model.
          mesh: axes (data, model), or None for one device.

        Raises:
          ValueError: max_length is above the model's positions.
        """
        config = schema.held.config
        if sizes.max_length > config.max_position:
            raise ValueError(
                f"max_length is {sizes.max_length}; the model has {config.max_position} positions"
            )
        self.config, self.sizes, self.schema = config, sizes, schema
        self.placement = None if mesh is None else Placement.of(config, mesh)
        self.params = params
        self._dtype = jnp.dtype(sizes.dtype)
        products = None if sizes.products == "float32" else jnp.bfloat16
        self._merge = make_merge(config, self.placement, products)
        self._resident = ResidentBank.of(schema, params, mesh, sizes.signs)
        self.programs = Programs()
        self._add_programs()

    @property
    def compiles(self) -> int:
        """How many programs have been compiled so far."""
        return self.programs.compiles

    @property
    def reach(self) -> int | None:
        """How many of its last positions a row needs; None: all of them."""
        return reach(self.config)

    def init_state(self) -> DecodeState:
        """A state without requests."""
        state = self._empty_state()
        return state if self.placement is None else jax.device_put(state, self._state_shardings())

    def init_bank(self) -> DeltaBank:
        """A bank in which every slot reads as the base."""
        return self._resident.empty()

    def stage(self, tensors: Mapping[str, WeightDelta]) -> DeltaBank:
        """Brings a variant's deltas into the bank's shapes and onto the device; from any thread.

        Args:
          tensors: by Hugging Face tensor name, in host memory.

        Raises:
          DoesNotFit: the bank has no room for one of its parts.
          ValueError: the tensors are not this model's.
        """
        return self.put(self.schema.fit(tensors))

    def put(self, fitted: DeltaBank) -> DeltaBank:
        """A variant in the shapes of a slot, as `BankSchema.fit` makes it or in pinned host memory,
        onto the device, ready for `write_slot`; from any thread."""
        put = jax.device_put(fitted, self._resident.packed_shardings(stacked=False))
        if self._resident.ordered:
            put = self.programs(_ORDER, self.params, put)
        return jax.block_until_ready(put)

    def write_slot(self, bank: DeltaBank, slot: int, staged: DeltaBank) -> DeltaBank:
        """The bank with one slot replaced; `bank` is donated.

        Raises:
          ValueError: there is no such slot.
        """
        if not 0 <= slot < self.schema.slots:
            raise ValueError(f"slot is {slot}; the bank has slots 0 to {self.schema.slots - 1}")
        return self.programs(_WRITE, bank, np.int32(slot), staged)

    def check(self, chunk: Chunk) -> None:
        """Sees whether a chunk can be read.

        Raises:
          ValueError: an invalid row, slot or place in the row, no tokens or too many, a token
            outside 0..V-1, or pages that are not there or not enough.
        """
        sizes, count = self.sizes, len(chunk.token_ids)
        if not 0 <= chunk.row < sizes.rows:
            raise ValueError(f"row is {chunk.row}; expected 0 to {sizes.rows - 1}")
        if not BASE_SLOT <= chunk.slot < self.schema.slots:
            raise ValueError(f"slot is {chunk.slot}; expected -1 to {self.schema.slots - 1}")
        if chunk.start < 0 or count < 1 or chunk.total > sizes.max_length:
            raise ValueError(
                f"the prompt has {chunk.total} tokens, {count} of them in this part; expected 1 to "
                f"{sizes.max_length}"
            )
        ids = np.asarray(chunk.token_ids, np.int64)
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(f"a token id is outside 0 to {self.config.vocab_size - 1}")
        if len(set(chunk.stops)) > MAX_STOPS:
            raise ValueError(
                f"{len(set(chunk.stops))} tokens end the answer; expected {MAX_STOPS} at most"
            )
        if chunk.pages is not None:
            needed = pages_for(chunk.total, sizes.page_size)
            if not needed <= len(chunk.pages) <= sizes.columns:
                raise ValueError(
                    f"{len(chunk.pages)} pages for {chunk.total} tokens; expected {needed} to "
                    f"{sizes.columns}"
                )
            if any(not NO_PAGE <= page < sizes.all_pages for page in chunk.pages):
                raise ValueError(f"a page is outside 0 to {sizes.all_pages - 1}")

    def prefill(
        self, bank: DeltaBank, state: DecodeState, chunks: Sequence[Chunk]
    ) -> tuple[DecodeState, Sampled]:
        """Reads chunks of several prompts into their rows; `state` is donated.

        A row whose last chunk this is decodes from now on, unless its first token stops it.

        Args:
          bank: the resident variants.
          state: rows of the chunks have their prompts' earlier tokens, and do not decode.
          chunks: of different rows, no more and no longer than one of `sizes.shapes` takes.

        Returns:
          The new state, and what was sampled for each of C >= len(chunks) chunks, the first token
          of the answer after a last one and -1 after others.

        Raises:
          ValueError: a chunk is invalid, see `check`; two are of one row; or no shape takes them.
        """
        for chunk in chunks:
            self.check(chunk)
        if len({chunk.row for chunk in chunks}) < len(chunks):
            raise ValueError("two chunks are of one row; expected one of each row in a call")
        shape = shape_for([len(chunk.token_ids) for chunk in chunks], self.sizes.shapes)
        batch = ChunkBatch.of(chunks, shape, self.sizes)
        return self.programs(shape, self.params, bank, state, batch)

    def enter(
        self,
        bank: DeltaBank,
        state: DecodeState,
        row: int,
        slot: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        **options: Any,
    ) -> tuple[DecodeState, int]:
        """Reads a whole prompt into a row, chunk after chunk; `state` is donated.

        Args:
          bank, state, row, slot, sampling, seed: as in `prefill` and `Chunk`.
          token_ids: the prompt, 1 to max_length tokens.
          options: further fields of `Chunk`.

        Returns:
          The new state and the first token of the answer.

        Raises:
          ValueError: as `check` does.
        """
        whole = Chunk(row, slot, token_ids, sampling=sampling, seed=seed, **options)
        self.check(whole)
        sampled = None
        for chunk in whole.cut(max(t for _, t in self.sizes.shapes)):
            state, sampled = self.prefill(bank, state, [chunk])
        assert sampled is not None
        return state, int(np.asarray(sampled.token)[0])

    def decode(
        self,
        bank: DeltaBank,
        state: DecodeState,
        steps: int = 1,
        rows: Sequence[int] | None = None,
        table: np.ndarray | None = None,
    ) -> tuple[DecodeState, Sampled]:
        """Makes decode steps over the rows that are active; `state` is donated.

        Args:
          bank: the resident variants.
          state: of the rows.
          steps: 1 to max_steps. A row that stops on the way makes no more of them.
          rows: those that go on; all others are given up. None: all.
          table: int32[B, J], the rows' pages, enough for these steps; not to be changed before they
            are done. None: each has its own, see `EngineConfig.fixed_table`.

        Returns:
          The new state, and what was sampled, [max_steps, B] each; a token is -1 where a row did
          not decode.

        Raises:
          ValueError: too many steps, or none.
        """
        if not 1 <= steps <= self.sizes.max_steps:
            raise ValueError(f"steps is {steps}; expected 1 to {self.sizes.max_steps}")
        kept = np.full((self.sizes.rows,), rows is None)
        if rows is not None:
            kept[list(rows)] = True
        table = self.sizes.fixed_table() if table is None else table
        return self.programs(_DECODE, self.params, bank, state, np.int32(steps), kept, table)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles everything that serving needs, several programs at a time.

        Args:
          progress: told the name of what was compiled, how many are done and how many there are.
        """
        self.programs.compile_all(progress)

    # What is compiled.

    def _add_programs(self) -> None:
        """Says which programs there are; each gets shapes, not arrays, to be compiled from."""
        state, rest = self._state_shardings(), self._replicated()
        resident = self._resident
        bank = resident.shardings(stacked=True)
        slot = resident.shardings(stacked=False)

        def like(tree: Any, where: Any = None) -> Any:
            shardings = where or jax.tree.map(lambda _: rest, tree)
            return jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
            )

        @functools.cache
        def device() -> tuple[Any, Any, Any]:
            own = jax.tree.map(lambda a: a if rest is None else a.sharding, self.params)
            params = like(self.params, None if rest is None else own)
            return (
                params,
                like(resident.shapes(), bank),
                like(jax.eval_shape(self._empty_state), state),
            )

        def written() -> tuple[Any, ...]:
            stacked, one = device()[1], resident.slot_shapes(packed=False)
            return stacked, like(np.int32(0)), like(one, slot)

        def packed() -> tuple[Any, ...]:
            one = resident.slot_shapes(packed=True)
            return device()[0], like(one, resident.packed_shardings(stacked=False))

        if resident.ordered:
            order: Any = jax.jit(resident.order, out_shardings=slot)
            self.programs.add(_ORDER, "order signs", order, packed)
        # Partial functions, since equal functions would share their compiled programs, and counts.
        write: Any = jax.jit(functools.partial(write_slot), donate_argnums=0, out_shardings=bank)
        self.programs.add(_WRITE, "write a slot", write, written)
        step: Any = functools.partial(jax.jit, donate_argnums=2, out_shardings=(state, rest))
        kept, table = np.zeros((self.sizes.rows,), bool), self.sizes.table({})
        self.programs.add(
            _DECODE,
            "decode",
            step(self._decode_steps),
            lambda: (*device(), like(np.int32(0)), like(kept), like(table)),
        )
        chunk_step = step(self._chunk_step)

        def read(shape: Shape) -> tuple[Any, ...]:
            return (*device(), like(ChunkBatch.of((), shape, self.sizes)))

        for count, length in self.sizes.shapes:
            name = f"prefill {count} x {length}"
            arguments = functools.partial(read, (count, length))
            self.programs.add((count, length), name, chunk_step, arguments)

    def _chunk_step(
        self, params: Params, bank: DeltaBank, state: DecodeState, batch: ChunkBatch
    ) -> tuple[DecodeState, Sampled]:
        model = self._merge(bind(params, bank.weights, batch.slots))
        offsets = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
        where = InPages(batch.table, batch.lengths)
        positions = batch.starts[:, None] + offsets
        hidden, cache = model(batch.tokens, positions, state.cache, self._dtype, where)
        last = jnp.maximum(batch.lengths - 1, 0)[:, None, None]
        logits = self._logits(model, jnp.take_along_axis(hidden, last, 1), bank, batch.slots)
        total = batch.starts + batch.lengths

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[batch.rows].set(new.astype(old.dtype), mode="drop")

        settings = jax.tree.map(put, state.sampling, batch.sampling)
        seen = clear_counts(state.seen, jnp.where(batch.begins, batch.rows, -1))
        seen = batch.count_before(seen, settings)
        at = jnp.where(offsets < batch.lengths[:, None], batch.rows[:, None], -1)
        made = positions >= batch.prompts[:, None]
        seen = count_tokens(seen, settings, at.ravel(), batch.tokens.ravel(), made.ravel())
        own = batch.sampling.only(batch.last)
        sampled = sample(logits[:, 0], own, seen, total, batch.rows)
        chosen = jnp.where(batch.last, batch.rows, -1)
        new = DecodeState(
            cache=cache,
            lengths=put(state.lengths, total),
            tokens=put(state.tokens, sampled.token),
            slots=put(state.slots, batch.slots),
            active=put(state.active, batch.last & ~sampled.ended),
            sampling=settings,
            seen=count_tokens(seen, settings, chosen, sampled.token, chosen >= 0),
        )
        read = jax.lax.cond(
            batch.wanted,
            lambda: prompt_logprobs(
                lambda part: self._logits(model, part, bank, batch.slots), hidden, batch.targets
            ),
            lambda: Logprobs.zeros(batch.tokens.shape, logits.shape[-1]),
        )
        return new, _only(batch.last, dataclasses.replace(sampled, prompt=read))

    def _decode_steps(
        self,
        params: Params,
        bank: DeltaBank,
        state: DecodeState,
        steps: jax.Array,
        kept: jax.Array,
        table: jax.Array,
    ) -> tuple[DecodeState, Sampled]:
        state = dataclasses.replace(state, active=state.active & kept)
        shapes = jax.eval_shape(self._decode_step, params, bank, state, table)[1]
        room = jax.tree.map(lambda a: jnp.zeros((self.sizes.max_steps, *a.shape), a.dtype), shapes)
        room = dataclasses.replace(room, token=jnp.full_like(room.token, -1))

        def more(carry: tuple[jax.Array, DecodeState, Sampled]) -> jax.Array:
            return (carry[0] < steps) & jnp.any(carry[1].active)

        def step(carry: tuple[jax.Array, DecodeState, Sampled]) -> Any:
            i, state, room = carry
            state, sampled = self._decode_step(params, bank, state, table)
            return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), room, sampled)

        _, state, room = jax.lax.while_loop(more, step, (jnp.int32(0), state, room))
        return state, room

    def _decode_step(
        self, params: Params, bank: DeltaBank, state: DecodeState, table: jax.Array
    ) -> tuple[DecodeState, Sampled]:
        active = state.active
        slots = jnp.where(active, state.slots, BASE_SLOT)
        model = self._merge(bind(params, bank.weights, slots))
        at = jnp.where(active, state.lengths, -1)[:, None]
        where = InPages(table)
        hidden, cache = model(state.tokens[:, None], at, state.cache, self._dtype, where)
        lengths = state.lengths + active
        logits = self._logits(model, hidden, bank, slots)[:, 0]
        sampled = sample(logits, state.sampling.only(active), state.seen, lengths)
        chosen = jnp.where(active, jnp.arange(active.size), -1)
        new = dataclasses.replace(
            state,
            cache=cache,
            lengths=lengths,
            tokens=jnp.where(active, sampled.token, state.tokens),
            active=active & ~sampled.ended,
            seen=count_tokens(state.seen, state.sampling, chosen, sampled.token, active),
        )
        return new, _only(active, sampled)

    def _logits(
        self, model: Transformer, hidden: jax.Array, bank: DeltaBank, slots: jax.Array
    ) -> jax.Array:
        """Logits float32[B, T, V] of hidden states [B, T, D], on a mesh brought together once, on
        every device; tokens that a row's variant does not have are at -inf."""
        logits = model.logits(hidden)
        where = self._replicated()
        if where is not None:
            logits = jax.lax.with_sharding_constraint(logits, where)
        if not self.schema.held.tail:
            return logits
        valid = (slots >= 0) & (slots < self.schema.slots)
        own = bank.vocab[jnp.where(valid, slots, 0)]
        size = jnp.where(valid, own, self.schema.held.base.vocab_size)
        return jnp.where(jnp.arange(logits.shape[2]) < size[:, None, None], logits, -jnp.inf)

    # Where things lie.

    def _empty_state(self) -> DecodeState:
        sizes = self.sizes
        cache = make_cache(self.config, sizes.all_pages, sizes.page_size, sizes.held_as)
        return DecodeState.empty(cache, sizes.rows, self.config.vocab_size)

    def _replicated(self) -> Any:
        return (
            None if self.placement is None else NamedSharding(self.placement.mesh, PartitionSpec())
        )

    def _state_shardings(self) -> DecodeState | None:
        if self.placement is None:
            return None
        kv, rest = self.placement.sharding(KV_AXES), self._replicated()
        others = jax.tree.map(lambda _: rest, jax.eval_shape(self._empty_state))
        return dataclasses.replace(others, cache=jax.tree.map(lambda _: kv, others.cache))


def fuse_empty(config: ModelConfig) -> dict[str, WeightDelta]:
    """A variant that is the base: an empty delta for every Hugging Face tensor."""
    names: list[str] = []
    map_specs(lambda spec: names.extend(spec.sources), config)
    return {name: WeightDelta() for name in names}


def _only(ran: jax.Array, sampled: Sampled) -> Sampled:
    """What was sampled, with token -1 in the rows that did not run."""
    return dataclasses.replace(sampled, token=jnp.where(ran, sampled.token, -1))
