"""Our engine as a worker's model: one row, the base and a synthetic 1-bit variant of it."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from zen_jax.benchmark_decode import random_bank
from zen_jax.checkpoint.load import read_base
from zen_jax.checkpoint.store import Store
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import Engine
from zen_jax.engine_state import BASE_SLOT, EngineConfig
from zen_jax.sampler import Sampled
from zen_jax.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Ours:
    """A store's base in our engine, with the sizes that serving has but for one row.

    Attributes:
      versions: of what computes.
    """

    def __init__(self, store: str, threads: int, length: int, products: str) -> None:
        """Reads the base and makes the variant.

        Args:
          store: its folder.
          threads: as many as this process has processors; see `zen_jax.peers.worker.pin`.
          length: tokens of a prompt and its answer together.
          products: what activations are rounded to at weights, "float32" or "bfloat16".

        Raises:
          ValueError: it is no store, or damaged, or the model has fewer positions.
        """
        opened = Store(Path(store))
        schema = BankSchema.covering(opened.base().config, slots=1)
        sizes = EngineConfig(rows=1, max_length=length, products=products)
        self._engine = Engine(read_base(opened, schema.held), sizes, schema)
        self._bank = random_bank(self._engine)
        self._state = self._engine.init_state()
        self.versions = {"jax": jax.__version__}

    def read(self, prompt: Sequence[int], variant: bool) -> int:
        """Reads a prompt into the row and gives the token that follows."""
        slot = 0 if variant else BASE_SLOT
        self._state, token = self._engine.enter(
            self._bank, self._state, 0, slot, prompt, _GREEDY, 0
        )
        return token

    def go_on(self, token: int, steps: int) -> list[int]:
        """The tokens after the newest one; a call is made before the last one's tokens are read,
        as in serving."""
        made: list[Sampled] = []
        tokens: list[int] = []
        for start in range(0, steps, self._engine.sizes.max_steps):
            count = min(self._engine.sizes.max_steps, steps - start)
            self._state, sampled = self._engine.decode(self._bank, self._state, count)
            made.append(sampled)
            if start:
                tokens += _read(made.pop(0))
        return tokens + [token for sampled in made for token in _read(sampled)]


def _read(sampled: Sampled) -> list[int]:
    """The row's tokens of one call, brought to the host."""
    tokens = np.asarray(sampled.token)[:, 0]
    return tokens[tokens >= 0].tolist()
