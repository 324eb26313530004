"""A model whose answers can be worked out by hand, for all that schedules it.

Fixtures hand out classes and functions, since test modules cannot import one another.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server.inbox import InboxLimits
from server.loader import Loader, Stages
from server.requests import Failure, Request, TokenEvent
from server.worker import Worker
from zen_jax.checkpoint.manifest import Variant
from zen_jax.chunking import Shape, shape_for
from zen_jax.engine_state import Chunk
from zen_jax.residency import CacheConfig
from zen_jax.sampling import SamplingParams
from zen_jax.tokenizer import Tokenizer

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

    def is_deleted(self) -> bool:
        return self.donated


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
    """The rows, None where nobody was yet; and what lies in the cache: at a page and a place in it,
    a token and the number of what it was read with."""

    rows: list[FakeRow | None]
    cache: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    donated: bool = False


@dataclass
class FakeEngine:
    """An engine over `next_token`. It refuses donated values, as a device does.

    Attributes:
        log: what was asked of it, in order.
        broken: names of functions that raise.
        hangs: names of functions that wait for an event.
        state: the newest there is.
        bank: likewise.
        read: how many tokens of prompts each call read.
    """

    rows: int = 3
    max_length: int = 64
    slots: int = 2
    shapes: tuple[Shape, ...] = ((1, 16), (1, 64), (4, 16))
    max_steps: int = 4
    log: list[tuple[Any, ...]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    hangs: dict[str, threading.Event] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    compiles: int = 0
    page_size: int = 16
    pages: int | None = None
    reach: int | None = None

    @property
    def sizes(self) -> Any:
        return SimpleNamespace(
            rows=self.rows,
            max_length=self.max_length,
            shapes=self.shapes,
            max_steps=self.max_steps,
            page_size=self.page_size,
            all_pages=self.all_pages,
            table=dict,
        )

    @property
    def all_pages(self) -> int:
        return self.pages or self.rows * -(-self.max_length // self.page_size)

    def init_state(self) -> FakeState:
        self.state = FakeState([None] * self.rows)
        return self.state

    def init_bank(self) -> FakeBank:
        self.bank = FakeBank([None] * self.slots)
        return self.bank

    def write_slot(self, bank: FakeBank, slot: int, staged: Mapping[str, Any]) -> FakeBank:
        if "write_slot refused" in self.broken:
            raise ValueError("what is staged does not fit")
        bank = self._take(bank)
        self._called("write_slot", slot)
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
            held = list(chunk.before) if chunk.begins else held
            later = before is not None and not chunk.begins
            if len(held) != chunk.start or (later and before.active):
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
            assert chunk.pages is not None
            self._look(bank, state, row, chunk.pages, chunk.start)
            for place in range(chunk.start, len(row.tokens)):
                self._put(bank, state, row, chunk.pages, place)
            if chunk.last:
                tokens[i] = self._sample(bank, row)
                own[i] = logprob_of(tokens[i], len(row.tokens) - 1)
        self.state = state
        own, judged = as_logprobs(own), as_logprobs(judged)
        return state, SimpleNamespace(token=tokens, logprobs=own, prompt=judged)

    def decode(
        self, bank: FakeBank, state: FakeState, steps: int, rows: Sequence[int], table: Any
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
                    self._look(bank, state, row, table[i], len(row.tokens) - 1)
                    self._put(bank, state, row, table[i], len(row.tokens) - 1)
                    tokens[step, i] = self._sample(bank, row)
                    own[step, i] = logprob_of(tokens[step, i], len(row.tokens) - 1)
        self.state = state
        return state, SimpleNamespace(token=tokens, logprobs=as_logprobs(own))

    def _look(
        self, bank: FakeBank, state: FakeState, row: FakeRow, pages: Sequence[int], end: int
    ) -> None:
        """See that a row's pages hold its first `end` tokens, those that are still looked at."""
        number = self._number(bank, row.slot)
        for place in range(0 if self.reach is None else max(0, end + 1 - self.reach), end):
            page, within = pages[place // self.page_size], place % self.page_size
            found = state.cache.get((page, within))
            if found != (row.tokens[place], number):
                raise RuntimeError(f"page {page} holds {found} at {within}, of place {place}")

    def _put(
        self, bank: FakeBank, state: FakeState, row: FakeRow, pages: Sequence[int], place: int
    ) -> None:
        """Write a row's token to its page."""
        page = pages[place // self.page_size]
        assert 0 <= page < self.all_pages, "a page that is none"
        state.cache[page, place % self.page_size] = (
            row.tokens[place],
            self._number(bank, row.slot),
        )

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
        if call[0] in self.hangs:
            self.hangs[call[0]].wait(30.0)
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
        rows = [row and replace(row, tokens=list(row.tokens)) for row in value.rows]
        return FakeState(rows, dict(value.cache))


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


def stages(read: Any = read_number, verify: Any = lambda x: x, put: Any = lambda x: x) -> Stages:
    """The stages of a load, those that do nothing unless another is given."""
    return Stages(read, verify, put)


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
        stages=stages,
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
        share_prefixes: bool = True,
        **engine: Any,
    ) -> None:
        self.fake = fake
        self.engine = fake.Engine(slots=slots, **engine)
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.reads: list[str] = []
        cache = CacheConfig(slots=slots, slot_bytes=4, backoff_s=0.05, patience_s=0.05)
        self.loader = Loader(stages(self._read))
        self.worker = Worker(
            self.engine,
            self.loader,
            cache,
            fake.ByteTokenizer,
            InboxLimits(inbox),
            clock,
            share_prefixes=share_prefixes,
        )

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
