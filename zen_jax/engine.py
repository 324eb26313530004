"""Prefill, insert, decode: compiled functions over explicit state, for rows of any variants.

The engine owns nothing that changes but its compiled functions: `DecodeState` and the bank go in
and come out, donated. One decode step takes all rows, each with the slot of its variant.

Letters: B rows, T prompt tokens in a bucket, S positions of a row, M slots, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zen_jax.config import ModelConfig
from zen_jax.delta.apply import bind
from zen_jax.delta.bank import BankSchema, DeltaBank, slot_axes, write_slot
from zen_jax.delta.format import WeightDelta
from zen_jax.kv_cache import KV_AXES, LayerCache, make_cache, write_row
from zen_jax.layout import Params, ParamSpec, map_specs
from zen_jax.model import Transformer, make_merge
from zen_jax.sampling import RowSampling, SamplingParams, sample
from zen_jax.sharding import Placement

# An array on host or device, or where one lies.
Array = Any

BASE_SLOT = -1


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that are fixed when the engine is made.

    Attributes:
      rows: B, requests that decode at once.
      max_length: S, the most tokens of a request, prompt and answer together.
      prefill_buckets: prompt lengths that are compiled; a prompt is padded to the next one.
      dtype: of activations, keys and values: "float32" or "bfloat16".
      products: what activations are rounded to before they meet a weight, "float32" or "bfloat16":
        as fast as bfloat16 activations, with sums and everything else in `dtype`.
    """

    rows: int = 16
    max_length: int = 1024
    prefill_buckets: tuple[int, ...] = (32, 128, 512, 1024)
    dtype: str = "float32"
    products: str = "float32"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.max_length < 2:
            raise ValueError(
                f"rows is {self.rows} and max_length {self.max_length}; "
                "expected at least 1 row and 2 tokens"
            )
        if any(b < 1 for b in self.prefill_buckets):
            raise ValueError(f"prefill_buckets are {self.prefill_buckets}; expected positive sizes")
        for name in ("dtype", "products"):
            value = getattr(self, name)
            if value not in ("float32", "bfloat16"):
                raise ValueError(f"{name} is {value!r}; expected 'float32' or 'bfloat16'")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets in use: sorted, none above max_length, which is always one."""
        return (*sorted({b for b in self.prefill_buckets if b < self.max_length}), self.max_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a decode step reads and writes.

    Attributes:
      cache: keys and values of every layer, [B, S, K, H].
      lengths: int32[B], tokens in the cache.
      tokens: int32[B], the newest token of a row, not yet in the cache.
      slots: int32[B], each row's variant; -1 is the base.
      active: bool[B], whether a request lives in the row.
      sampling: each row's settings.
    """

    cache: list[LayerCache]
    lengths: Array
    tokens: Array
    slots: Array
    active: Array
    sampling: RowSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A prompt that was read and waits for a row.

    Attributes:
      cache: keys and values of every layer, [1, T, K, H].
      length: int32[1], true tokens of the prompt.
      token: int32[1], the first token of the answer.
      slot: int32[1].
      sampling: the request's settings, B = 1.
    """

    cache: list[LayerCache]
    length: Array
    token: Array
    slot: Array
    sampling: RowSampling


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
          params: the base's arrays as held, placed by `place_params` on the same mesh.
          sizes: rows, lengths, buckets.
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
        self._params = params
        self._dtype = jnp.dtype(sizes.dtype)
        products = None if sizes.products == "float32" else jnp.bfloat16
        self._merge = make_merge(config, self.placement, products)
        state = self._state_shardings()
        bank = self._bank_shardings(stacked=True)
        # Partial functions, since equal functions would share their compiled programs, and counts.
        self._prefill: Any = jax.jit(self._prefill_step)
        self._insert: Any = jax.jit(
            functools.partial(_insert), donate_argnums=0, out_shardings=state
        )
        self._release: Any = jax.jit(
            functools.partial(_release), donate_argnums=0, out_shardings=state
        )
        self._decode: Any = jax.jit(
            self._decode_step, donate_argnums=2, out_shardings=(state, self._replicated())
        )
        self._write_slot: Any = jax.jit(
            functools.partial(write_slot), donate_argnums=0, out_shardings=bank
        )

    @property
    def compiles(self) -> int:
        """How many programs the engine's functions have been compiled to so far."""
        functions = (self._prefill, self._insert, self._release, self._decode, self._write_slot)
        return sum(function._cache_size() for function in functions)

    @property
    def params(self) -> Params:
        """The base's arrays."""
        return self._params

    def init_state(self) -> DecodeState:
        """A state without requests."""
        rows = self.sizes.rows
        state = DecodeState(
            cache=make_cache(self.config, rows, self.sizes.max_length, self._dtype, self.placement),
            lengths=jnp.zeros((rows,), jnp.int32),
            tokens=jnp.zeros((rows,), jnp.int32),
            slots=jnp.full((rows,), BASE_SLOT, jnp.int32),
            active=jnp.zeros((rows,), bool),
            sampling=RowSampling.empty(rows),
        )
        return state if self.placement is None else jax.device_put(state, self._state_shardings())

    def init_bank(self) -> DeltaBank:
        """A bank in which every slot reads as the base."""
        return self.schema.empty(self.placement)

    def stage(self, tensors: Mapping[str, WeightDelta]) -> DeltaBank:
        """Brings a variant's deltas into the bank's shapes and onto the device; from any thread.

        Args:
          tensors: by Hugging Face tensor name, in host memory.

        Raises:
          DoesNotFit: the bank has no room for one of its parts.
          ValueError: the tensors are not this model's.
        """
        fitted = self.schema.fit(tensors)
        return jax.block_until_ready(jax.device_put(fitted, self._bank_shardings(stacked=False)))

    def write_slot(self, bank: DeltaBank, slot: int, staged: DeltaBank) -> DeltaBank:
        """The bank with one slot replaced; `bank` is donated.

        Raises:
          ValueError: there is no such slot.
        """
        if not 0 <= slot < self.schema.slots:
            raise ValueError(f"slot is {slot}; the bank has slots 0 to {self.schema.slots - 1}")
        return self._write_slot(bank, np.int32(slot), staged)

    def prefill(
        self,
        bank: DeltaBank,
        slot: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        sample_index: int = 0,
    ) -> Prefilled:
        """Reads a prompt and chooses the first token of the answer.

        Args:
          bank: the resident variants.
          slot: the request's variant, -1 for the base.
          token_ids: 1 to max_length tokens.
          sampling: validated settings.
          seed: 0 to 2**64 - 1.
          sample_index: which of several samples of the request this is.

        Raises:
          ValueError: an invalid slot, an empty or too long prompt, or a token outside 0..V-1.
        """
        ids = np.asarray(token_ids, np.int64)
        if not BASE_SLOT <= slot < self.schema.slots:
            raise ValueError(f"slot is {slot}; expected -1 to {self.schema.slots - 1}")
        if not 1 <= ids.size <= self.sizes.max_length:
            raise ValueError(
                f"the prompt has {ids.size} tokens; expected 1 to {self.sizes.max_length}"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(f"a token id is outside 0 to {self.config.vocab_size - 1}")
        bucket = next(b for b in self.sizes.buckets if b >= ids.size)
        padded = np.zeros((1, bucket), np.int32)
        padded[0, : ids.size] = ids
        return self._prefill(
            self._params,
            bank,
            padded,
            np.array([ids.size], np.int32),
            np.array([slot], np.int32),
            RowSampling.of(sampling, seed),
            np.int32(sample_index),
        )

    def insert(self, state: DecodeState, prefilled: Prefilled, row: int) -> DecodeState:
        """Gives a prefilled request a row; `state` is donated.

        Raises:
          ValueError: there is no such row.
        """
        self._check_row(row)
        return self._insert(state, prefilled, np.int32(row))

    def decode(self, bank: DeltaBank, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """One token for every active row; `state` is donated.

        Returns:
          The new state, and int32[B] tokens (of inactive rows: anything).
        """
        return self._decode(self._params, bank, state)

    def release(self, state: DecodeState, row: int) -> DecodeState:
        """Makes a row inactive; `state` is donated.

        Raises:
          ValueError: there is no such row.
        """
        self._check_row(row)
        return self._release(state, np.int32(row))

    def warm_up(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compiles everything that serving needs, by running it once on a state of its own.

        Args:
          progress: told the name of what comes next, how many are done and how many there are.
        """
        buckets = self.sizes.buckets
        total = len(buckets) + 3
        tell = progress or (lambda name, done, total: None)
        tell("bank", 0, total)
        empty = fuse_empty(self.schema.held.base)
        bank = self.write_slot(self.init_bank(), 0, self.stage(empty))
        state = self.init_state()
        for i, bucket in enumerate(buckets):
            tell(f"prefill {bucket}", i + 1, total)
            done = self.prefill(bank, BASE_SLOT, [0] * bucket, SamplingParams(), 0)
            state = self.insert(state, done, 0)
        tell("decode", total - 2, total)
        state, tokens = self.decode(bank, state)
        tell("release", total - 1, total)
        jax.block_until_ready((self.release(state, 0), tokens))
        tell("ready", total, total)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.sizes.rows:
            raise ValueError(f"row is {row}; expected 0 to {self.sizes.rows - 1}")

    def _prefill_step(
        self,
        params: Params,
        bank: DeltaBank,
        tokens: jax.Array,
        length: jax.Array,
        slot: jax.Array,
        sampling: RowSampling,
        sample_index: jax.Array,
    ) -> Prefilled:
        model = self._merge(bind(params, bank.weights, slot))
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, cache = model(tokens, positions, dtype=self._dtype)
        last = jax.lax.dynamic_slice_in_dim(hidden, length[0] - 1, 1, axis=1)
        own = sampling.for_sample(sample_index)
        token = sample(self._logits(model, last, bank, slot), own, length)
        return Prefilled(cache, length, token, slot, own)

    def _decode_step(
        self, params: Params, bank: DeltaBank, state: DecodeState
    ) -> tuple[DecodeState, jax.Array]:
        model = self._merge(bind(params, bank.weights, state.slots))
        at = jnp.where(state.active, state.lengths, self.sizes.max_length)
        hidden, cache = model(state.tokens[:, None], at[:, None], state.cache, self._dtype)
        lengths = jnp.where(state.active, state.lengths + 1, state.lengths)
        logits = self._logits(model, hidden, bank, state.slots)
        tokens = sample(logits, state.sampling, lengths)
        new = dataclasses.replace(state, cache=cache, lengths=lengths, tokens=tokens)
        return new, tokens

    def _logits(
        self, model: Transformer, hidden: jax.Array, bank: DeltaBank, slots: jax.Array
    ) -> jax.Array:
        """Logits float32[B, V] of hidden states [B, 1, D], on a mesh brought together once, on
        every device; tokens that a row's variant does not have are at -inf."""
        logits = model.logits(hidden)[:, 0]
        where = self._replicated()
        if where is not None:
            logits = jax.lax.with_sharding_constraint(logits, where)
        if not self.schema.held.tail:
            return logits
        valid = (slots >= 0) & (slots < self.schema.slots)
        own = bank.vocab[jnp.where(valid, slots, 0)]
        size = jnp.where(valid, own, self.schema.held.base.vocab_size)
        return jnp.where(jnp.arange(logits.shape[1]) < size[:, None], logits, -jnp.inf)

    def _replicated(self) -> Any:
        return (
            None if self.placement is None else NamedSharding(self.placement.mesh, PartitionSpec())
        )

    def _state_shardings(self) -> DecodeState | None:
        if self.placement is None:
            return None
        kv, rest = self.placement.sharding(KV_AXES), self._replicated()
        return DecodeState(
            cache=[LayerCache(kv, kv) for _ in range(self.config.num_layers)],
            lengths=rest,
            tokens=rest,
            slots=rest,
            active=rest,
            sampling=RowSampling(rest, rest, rest, rest),
        )

    def _bank_shardings(self, *, stacked: bool) -> DeltaBank | None:
        """Where the parts of a slot lie, or of the bank when stacked."""
        place = self.placement
        if place is None:
            return None
        lead = (None,) if stacked else ()

        def parts(spec: ParamSpec) -> WeightDelta:
            return jax.tree.map(
                lambda axes: place.sharding((*lead, *axes)),
                slot_axes(self.schema, spec),
                is_leaf=lambda node: isinstance(node, tuple),
            )

        return DeltaBank(map_specs(parts, self.config), place.sharding(lead))


def fuse_empty(config: ModelConfig) -> dict[str, WeightDelta]:
    """A variant that is the base: an empty delta for every Hugging Face tensor."""
    names: list[str] = []
    map_specs(lambda spec: names.extend(spec.sources), config)
    return {name: WeightDelta() for name in names}


def _insert(state: DecodeState, prefilled: Prefilled, row: jax.Array) -> DecodeState:
    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(old, new[0].astype(old.dtype), row, 0)

    return DecodeState(
        cache=[
            write_row(old, new, row) for old, new in zip(state.cache, prefilled.cache, strict=True)
        ],
        lengths=put(state.lengths, prefilled.length),
        tokens=put(state.tokens, prefilled.token),
        slots=put(state.slots, prefilled.slot),
        active=state.active.at[row].set(True),
        sampling=jax.tree.map(put, state.sampling, prefilled.sampling),
    )


def _release(state: DecodeState, row: jax.Array) -> DecodeState:
    return dataclasses.replace(
        state,
        active=state.active.at[row].set(False),
        slots=state.slots.at[row].set(BASE_SLOT),
        sampling=dataclasses.replace(
            state.sampling, temperature=state.sampling.temperature.at[row].set(0.0)
        ),
    )
