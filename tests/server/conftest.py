"""A model whose answers can be worked out by hand, for all that schedules it.

Fixtures hand out classes and functions, since test modules cannot import one another.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import save_file

from server.loader import Loader
from server.requests import Failure, Request, TokenEvent
from server.worker import Worker
from zen_jax.checkpoint.manifest import Variant
from zen_jax.chunking import Shape, shape_for
from zen_jax.config import ModelConfig
from zen_jax.convert import convert_base, convert_variant
from zen_jax.engine_state import Chunk
from zen_jax.layout import tensor_shapes
from zen_jax.residency import CacheConfig
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer
from zen_jax.training.bytes_tokenizer import VOCAB_SIZE, write_tokenizer

VOCABULARY = 256
EOS = 0


def make_variant(letter: str, version: int = 1) -> Variant:
    """zen4-a, zen4-b and so on."""
    return Variant(f"zen4-{letter}", version, f"digest-{letter}{version}", Path("/store"))


def number_of(variant: Variant | None) -> int:
    """All that a variant's weights say: 0 for the base, 1 for a, 2 for b; version 2 adds 50."""
    return 0 if variant is None else ord(variant.name[-1]) - 96 + 50 * (variant.version - 1)


def next_token(last: int, number: int, seed: int, position: int) -> int:
    """The hand-computable model: the token at `position` of an answer."""
    return (5 * last + 7 * number + seed + 3 * position + 1) % VOCABULARY


def logprob_of(token: int, position: int) -> float:
    """What the model gives for the log-probability of a token at a position of its sequence."""
    return -(token + position / 128)


def as_logprobs(own: Any) -> Any:
    """As `zen_jax.sampler.Logprobs`: the likeliest tokens are 0 to 19, i of them -i."""
    top = np.broadcast_to(np.arange(20), (*np.shape(own), 20))
    return SimpleNamespace(own=np.asarray(own, np.float32), top_ids=top, top=-top.astype(float))


def answer_of(request: Request, count: int) -> list[int]:
    """The first `count` tokens of the request's answer, as if it were alone in the world."""
    tokens: list[int] = []
    for position in range(count):
        last = tokens[-1] if tokens else request.token_ids[-1]
        tokens.append(next_token(last, number_of(request.variant), request.seed, position))
    return tokens


@dataclass
class FakeBank:
    """The number in each slot; None reads as the base."""

    numbers: list[int | None]
    donated: bool = False


@dataclass
class FakeRow:
    """A request in a row.

    Attributes:
        tokens: prompt and answer, all that the row holds.
        prompt: how many of them the caller gave.
        active: whether the row decodes.
    """

    tokens: list[int]
    slot: int
    seed: int
    prompt: int
    end: int
    stops: tuple[int, ...]
    active: bool


@dataclass
class FakeState:
    """The rows, None where nobody was yet."""

    rows: list[FakeRow | None]
    donated: bool = False


@dataclass
class FakeEngine:
    """An engine over `next_token`. It refuses donated values, as a device does.

    Attributes:
        log: what was asked of it, in order.
        broken: names of functions that raise.
        state: the newest there is.
        bank: likewise.
        read: how many tokens of prompts each call read.
        resumed: how often a request was read with a part of its answer.
    """

    rows: int = 3
    max_length: int = 64
    slots: int = 2
    shapes: tuple[Shape, ...] = ((1, 16), (1, 64), (4, 16))
    max_steps: int = 4
    log: list[tuple[Any, ...]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    read: list[int] = field(default_factory=list)
    resumed: int = 0
    compiles: int = 0

    @property
    def sizes(self) -> Any:
        return SimpleNamespace(
            rows=self.rows,
            max_length=self.max_length,
            shapes=self.shapes,
            max_steps=self.max_steps,
        )

    def init_state(self) -> FakeState:
        self.state = FakeState([None] * self.rows)
        return self.state

    def init_bank(self) -> FakeBank:
        self.bank = FakeBank([None] * self.slots)
        return self.bank

    def write_slot(self, bank: FakeBank, slot: int, staged: Mapping[str, Any]) -> FakeBank:
        self._called("write_slot", slot)
        bank = self._take(bank)
        bank.numbers[slot] = int(staged["number"])
        self.bank = bank
        return bank

    def check(self, chunk: Chunk) -> None:
        if max(chunk.token_ids) >= VOCABULARY:
            raise ValueError(f"token ids {chunk.token_ids} are outside the vocabulary")

    def prefill(
        self, bank: FakeBank, state: FakeState, chunks: Sequence[Chunk]
    ) -> tuple[FakeState, Any]:
        self._called("prefill", *((chunk.row, chunk.slot, chunk.start) for chunk in chunks))
        self._usable(bank)
        state = self._take(state)
        sizes = [len(chunk.token_ids) for chunk in chunks]
        places, _ = shape_for(sizes, self.shapes)
        self.read.append(sum(sizes))
        tokens, own = np.full(places, -1, np.int32), np.zeros(places)
        judged = np.zeros((places, max(sizes)))
        for i, chunk in enumerate(chunks):
            for j, target in enumerate(chunk.targets):
                judged[i, j] = logprob_of(target, chunk.start + j + 1)
            before = state.rows[chunk.row]
            held = [] if before is None or not chunk.start else before.tokens
            if len(held) != chunk.start or (before is not None and chunk.start and before.active):
                raise RuntimeError(f"row {chunk.row} holds {len(held)}, not {chunk.start} tokens")
            assert chunk.prompt is not None and chunk.end is not None
            row = FakeRow(
                [*held, *chunk.token_ids],
                chunk.slot,
                chunk.seed,
                chunk.prompt,
                chunk.end,
                tuple(chunk.stops),
                chunk.last,
            )
            state.rows[chunk.row] = row
            self.resumed += chunk.last and len(row.tokens) > chunk.prompt
            if chunk.last:
                tokens[i] = self._sample(bank, row)
                own[i] = logprob_of(tokens[i], len(row.tokens) - 1)
        self.state = state
        sampled = SimpleNamespace(
            token=tokens, logprobs=as_logprobs(own), prompt=as_logprobs(judged)
        )
        return state, sampled

    def decode(
        self, bank: FakeBank, state: FakeState, steps: int, rows: Sequence[int]
    ) -> tuple[FakeState, Any]:
        self._called("decode", steps, tuple(rows))
        self._usable(bank)
        state = self._take(state)
        assert 1 <= steps <= self.max_steps
        tokens = np.full((self.max_steps, self.rows), -1, np.int32)
        own = np.zeros(tokens.shape)
        for i, row in enumerate(state.rows):
            if row is not None:
                row.active = row.active and i in rows
        for step in range(steps):
            for i, row in enumerate(state.rows):
                if row is not None and row.active:
                    tokens[step, i] = self._sample(bank, row)
                    own[step, i] = logprob_of(tokens[step, i], len(row.tokens) - 1)
        self.state = state
        return state, SimpleNamespace(token=tokens, logprobs=as_logprobs(own))

    def _sample(self, bank: FakeBank, row: FakeRow) -> int:
        """One more token in a row, which may end it."""
        position = len(row.tokens) - row.prompt
        token = next_token(row.tokens[-1], self._number(bank, row.slot), row.seed, position)
        row.tokens.append(token)
        if len(row.tokens) > self.max_length:
            raise RuntimeError("a row ran past the context")
        row.active = token not in row.stops and len(row.tokens) < row.end
        return token

    def count(self, name: str) -> int:
        """How often a function was called."""
        return sum(call[0] == name for call in self.log)

    def _called(self, *call: Any) -> None:
        self.log.append(call)
        if call[0] in self.broken:
            raise RuntimeError(f"{call[0]} broke on a prompt that says: my secret")

    def _number(self, bank: FakeBank, slot: int) -> int:
        number = 0 if slot < 0 else bank.numbers[slot]
        if number is None:
            raise RuntimeError(f"slot {slot} was never written")
        return number

    def _usable(self, value: FakeBank | FakeState) -> None:
        if value.donated:
            raise RuntimeError("a donated value was used")

    def _take[T: (FakeBank, FakeState)](self, value: T) -> T:
        self._usable(value)
        value.donated = True
        if isinstance(value, FakeBank):
            return FakeBank(list(value.numbers))
        return FakeState([row and replace(row, tokens=list(row.tokens)) for row in value.rows])


class ByteTokenizer(Tokenizer):
    """Token i is byte i; `EOS` ends an answer, of variants with a version above 1 also 1."""

    def __init__(self, variant: Variant | None) -> None:
        """Needs none of what a tokenizer is made of."""
        later = variant is not None and variant.version > 1
        self.eos_ids = frozenset({EOS, 1} if later else {EOS})
        self.spelling: Any = SimpleNamespace(spaces=0)

    def token_bytes(self, token_id: int, first: bool = False) -> bytes | None:
        """The byte, or nothing for the end."""
        return None if token_id in self.eos_ids else bytes([token_id])


def read_number(variant: Variant) -> dict[str, Any]:
    """A reader for the loader: the weights are the variant's number, in 4 bytes."""
    return {"number": np.int32(number_of(variant))}


class Caller:
    """What came back for one request, in order."""

    def __init__(self) -> None:
        self.events: list[TokenEvent | Failure] = []

    def __call__(self, event: TokenEvent | Failure) -> None:
        assert not self.ended, "an event after the last"
        self.events.append(event)

    @property
    def ended(self) -> bool:
        return bool(self.events) and (
            isinstance(self.events[-1], Failure) or self.events[-1].finish is not None
        )

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, TokenEvent) for t in e.token_ids]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TokenEvent))

    @property
    def failure(self) -> Failure | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Failure) else None


@pytest.fixture(scope="session")
def fake() -> Any:
    """The hand-computable model's world as one namespace."""
    return SimpleNamespace(
        VOCABULARY=VOCABULARY,
        EOS=EOS,
        ByteTokenizer=ByteTokenizer,
        Caller=Caller,
        Engine=FakeEngine,
        answer_of=answer_of,
        logprob_of=logprob_of,
        next_token=next_token,
        number_of=number_of,
        read_number=read_number,
        variant=make_variant,
    )


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """Requests with short ways to say what matters; ids count up."""
    count = 0

    def make(
        variant: Variant | None = None,
        *,
        prompt: Sequence[int] = (10,),
        max_tokens: int = 4,
        seed: int = 3,
        deadline: float | None = None,
        priority: int = 0,
        id: str | None = None,
        **sampling: Any,
    ) -> Request:
        nonlocal count
        count += 1
        settings = SamplingParams(max_tokens=max_tokens, **sampling)
        name = id or f"r{count}"
        return Request(name, variant, tuple(prompt), settings, seed, deadline, priority=priority)

    return make


class World:
    """A worker with its fake device and a store whose variants can be made to hang or fail.

    Attributes:
        gates: a variant's read waits for its event if it has one.
        errors: a variant's read raises its error if it has one.
        reads: names in the order in which they were read.
    """

    def __init__(
        self,
        fake: Any,
        *,
        inbox: int = 8,
        slots: int = 2,
        clock: Callable[[], float] = time.monotonic,
        **engine: Any,
    ) -> None:
        self.fake = fake
        self.engine = fake.Engine(slots=slots, **engine)
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.reads: list[str] = []
        self.loader = Loader(self._read, lambda tree: tree)
        cache = CacheConfig(slots=slots, backoff_s=0.05, patience_s=0.05)
        self.worker = Worker(self.engine, self.loader, cache, fake.ByteTokenizer, inbox, clock)

    def _read(self, variant: Variant) -> Any:
        self.reads.append(variant.name)
        if variant.name in self.gates:
            self.gates[variant.name].wait(30.0)
        if variant.name in self.errors:
            raise self.errors[variant.name]
        return self.fake.read_number(variant)

    @staticmethod
    def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for what another thread does."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.001)

    def submit(self, request: Request) -> Any:
        caller = self.fake.Caller()
        self.worker.submit(request, caller)
        return caller

    def answer(self, request: Request) -> Any:
        caller = self.submit(request)
        self.until(lambda: caller.ended)
        return caller

    def run(self, *callers: Any) -> None:
        """Tick by hand until all have ended; loads are threads all the same."""
        self.until(lambda: self.worker.tick(0.001) or all(caller.ended for caller in callers))

    def left(self) -> tuple[int, ...]:
        """What nobody may hold once all requests have ended."""
        seen = self.worker.snapshot()
        leases = sum(status.leases + status.waiting for status in seen.variants)
        return seen.rows_in_use, seen.waiting, leases, self.loader.staged


@pytest.fixture
def worlds(fake: Any) -> Iterator[Callable[..., World]]:
    """Makes worlds, and ends them."""
    made: list[World] = []

    def make(*, start: bool = True, **settings: Any) -> World:
        world = World(fake, **settings)
        made.append(world)
        if start:
            world.worker.start()
        return world

    yield make
    for world in made:
        for gate in world.gates.values():
            gate.set()
        assert world.worker.stop()
        assert world.loader.close(10.0)


# A model of random weights, in files.

TINY = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What XLA compiles is kept for the session, for every engine of the same sizes."""
    folder = tmp_path_factory.mktemp("compiled")
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of a base and of its fine-tunes tiny-a, tiny-b and tiny-c."""
    rng = np.random.default_rng(3)
    root = tmp_path_factory.mktemp("tiny")
    base = {
        name: np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)
        for name, shape in tensor_shapes(TINY).items()
    }
    folders = {}
    for name in ("base", "tiny-a", "tiny-b", "tiny-c"):
        size = 0.0 if name == "base" else 0.1
        tensors = {
            key: (w + rng.normal(0, size, w.shape)).astype(ml_dtypes.bfloat16)
            for key, w in base.items()
        }
        folders[name] = root / name
        folders[name].mkdir()
        save_file(tensors, folders[name] / "model.safetensors")
        (folders[name] / "config.json").write_text(json.dumps(TINY.to_hf()))
        write_tokenizer(folders[name], TINY.max_position)
    return folders


@pytest.fixture(scope="session")
def tiny_store(tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of them; not to be changed."""
    store = tmp_path_factory.mktemp("store") / "tiny"
    convert_base(tiny_folders["base"], store)
    for name in ("tiny-a", "tiny-b", "tiny-c"):
        convert_variant(tiny_folders[name], store, name)
    return store
