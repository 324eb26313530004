"""A store in one process, without a server: for notebooks and scripts.

`load` gives a `Family`; a `Member` of it generates, scores tokens, or hands out its weights whole.
All members share the base's arrays; another member is another tree of deltas for the same compiled
functions.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax.answers import Generation, answer_prompts, check_prompts
from zen_jax.checkpoint.load import bank_schema, read_base
from zen_jax.checkpoint.manifest import BASE, Variant
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import bind, materialise
from zen_jax.engine import BASE_SLOT, Engine, EngineConfig, fuse_empty
from zen_jax.layout import Params
from zen_jax.model import make_forward
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer


class Member:
    """The base, or one of its variants.

    Attributes:
      name: "base", or the variant's name.
      variant: name, version and digest; None for the base.
      tokenizer: the member's own.
    """

    def __init__(self, family: "Family", variant: Variant | None) -> None:
        self.name = BASE if variant is None else variant.name
        self.variant = variant
        self.tokenizer = Tokenizer.from_folder(family.store.tokenizer_folder(variant))
        self._family = family

    def __repr__(self) -> str:
        if self.variant is None:
            return f"<base: {self._family.config.parameters:,} parameters>"
        size = self._family.store.manifest(self.variant).bytes_on_disk
        return f"<{self.name} version {self.variant.version}: a delta of {size:,} bytes>"

    @functools.cached_property
    def deltas(self) -> Params:
        """What the member adds, a tree of `WeightDelta` on the device; all empty for the base."""
        store, held = self._family.store, self._family.held
        if self.variant is None:
            return held.fuse_variant(fuse_empty(held.base))
        tensors = store.read_variant(self.variant)
        return jax.device_put(held.fuse_variant(tensors))

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The member's own architecture."""
        if self.variant is None:
            return self._family.held.base
        return self._family.store.manifest(self.variant).config

    @property
    def vocab_size(self) -> int:
        """V, the tokens that the member itself has."""
        return self.config.vocab_size

    @property
    def params(self) -> Params:
        """The base's arrays with the deltas beside them, as the model's functions take them."""
        return bind(self._family.params, self.deltas)

    def materialise(self) -> Params:
        """The member's weights whole, in float32."""
        return materialise(self._family.params, self.deltas)

    def logits(self, tokens: Sequence[Sequence[int]] | np.ndarray) -> jax.Array:
        """int32[B, T] -> float32[B, T, V], every sequence from position 0.

        Raises:
          ValueError: not a rectangle of tokens of the vocabulary, or more of them than the model
            has positions.
        """
        ids = np.asarray(tokens)
        vocab = self.vocab_size
        if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens have shape {ids.shape}; expected whole numbers [B, T]")
        positions = self.config.max_position
        if ids.shape[1] > positions:
            raise ValueError(
                f"a sequence has {ids.shape[1]} tokens; the model has {positions} positions"
            )
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"a token id is outside 0 to {vocab - 1}")
        return self._family.forward(self.params, jnp.asarray(ids, jnp.int32))[..., :vocab]

    @overload
    def generate(
        self, prompts: str, sampling: SamplingParams | None = None, *, chat: bool = False
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool = False,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool = False,
    ) -> Generation | list[Generation]:
        """Answers a prompt, or several in one batch.

        Args:
          prompts: a text, or texts.
          sampling: greedy with 64 tokens when None. Without a seed, one is drawn for each prompt.
          chat: each prompt is a user's message, put into the member's chat template.

        Returns:
          One `Generation`, or a list in the order of the prompts; of several samples the first.

        Raises:
          ValueError: a prompt is empty or too long, or a setting is out of range.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        answers = [samples[0] for samples in self.samples(several, sampling, chat=chat)]
        return answers[0] if isinstance(prompts, str) else answers

    def samples(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool = False,
    ) -> list[list[Generation]]:
        """All `n` samples of each prompt's answer; the rest as for `generate`."""
        return self._family.run(self, [self._tokens(text, chat) for text in prompts], sampling)

    def _tokens(self, text: str, chat: bool) -> list[int]:
        if chat:
            return self.tokenizer.chat([{"role": "user", "content": text}])
        return self.tokenizer.encode(text)


class Family:
    """A store's base in memory, and its variants by name.

    Attributes:
      store: where the members come from.
      config: the architecture as held; see `zen_jax.delta.widen`.
      held: the base's own and the held architecture.
      params: the base's arrays.
      forward: jitted (params, int32[B, T]) -> float32[B, T, V]; one program for all members of one
        kind and shape.
    """

    def __init__(self, store: Store, rows: int = 8, max_length: int | None = None) -> None:
        self.store = store
        self._schema = bank_schema(store, slots=1)
        self.held = self._schema.held
        self.config: ModelConfig = self.held.config
        self.params = read_base(store, self.held)
        self.forward = jax.jit(make_forward(self.config))
        length = min(1024, self.config.max_position) if max_length is None else max_length
        self._sizes = EngineConfig(rows=rows, max_length=length)
        self._members: dict[str, Member] = {}

    @property
    def variants(self) -> list[str]:
        """The names of the store's variants."""
        return self.store.names()

    def __getitem__(self, name: str) -> Member:
        """A variant's newest version, or "base".

        Raises:
          VariantNotFound: the store has no such variant.
        """
        variant = None if name == BASE else self.store.variant(name)
        key = BASE if variant is None else variant.digest
        if key not in self._members:
            self._members[key] = Member(self, variant)
        return self._members[key]

    def __iter__(self) -> Iterator[str]:
        return iter([BASE, *self.variants])

    def __len__(self) -> int:
        return 1 + len(self.variants)

    def __repr__(self) -> str:
        names = ", ".join(self.variants) or "no variants"
        return f"<family of {self.config.parameters:,} parameters: {names}>"

    @functools.cached_property
    def _engine(self) -> Engine:
        """An engine with one slot, for `run`."""
        return Engine(self.params, self._sizes, self._schema)

    def run(
        self, member: Member, prompts: Sequence[list[int]], sampling: SamplingParams | None = None
    ) -> list[list[Generation]]:
        """`Member.samples` for prompts of tokens, as many answers at once as there are rows.

        Raises:
          ValueError: as `Member.generate`.
        """
        sampling = sampling or SamplingParams(max_tokens=64, temperature=0.0)
        sampling.validate(member.vocab_size)
        engine = self._engine
        check_prompts(prompts, self._sizes.max_length)
        slot = BASE_SLOT if member.variant is None else 0
        bank = engine.init_bank()
        if member.variant is not None:
            staged = engine.stage(self.store.read_variant(member.variant))
            bank = engine.write_slot(bank, slot, staged)
        return answer_prompts(engine, bank, slot, member.tokenizer, prompts, sampling)


def load(store: str | Path, *, rows: int = 8, max_length: int | None = None) -> Family:
    """Opens a store and reads its base into memory.

    Args:
      store: its folder.
      rows: prompts that are answered at once.
      max_length: tokens of a prompt and its answer together; 1,024 or the model's limit if None.

    Raises:
      ValueError: the folder is no store, or the base is damaged.
    """
    return Family(Store(Path(store)), rows, max_length)
