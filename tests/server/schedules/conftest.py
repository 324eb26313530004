"""Random schedules of the whole way, router to device, in virtual time.

The worker, its inbox, scheduler and cache are the real ones, ticked by hand; the loader is the
real one with tasks that run when the schedule says; only the device and the clock are stand-ins.
Requests come, are cancelled, run out of time and have callbacks that raise; loads fail, hang and
come too late; operators load, unload and pin. What an answer should be is known by hand, so a slot
that was written under a lease shows as a wrong token. The device looks at all pages of a row before
it writes to one, so a page that two write to, or that was filled with other weights, shows too.
"""

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from server.events import Advanced, Committed, Fetched
from server.inbox import InboxLimits
from server.loader import Loader, Stages
from server.requests import Failure, InboxFull, Request, TokenEvent
from server.router import Router
from server.worker import Worker
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt, VariantNotFound
from zen_jax.eviction import Policy
from zen_jax.residency import CacheConfig
from zen_jax.sampling import SamplingParams

SLOTS, ROWS, INBOX, MAX_LOADS, MAX_STAGED = 2, 3, 8, 2, 2
STAGE_S, COMMIT_S, WAIT_S = 4.0, 2.0, 20.0
SHAPES = ((1, 2), (1, 4), (3, 2))
# Requests have 12 tokens at most: 6 pages each. Three rows want 18.
PAGE_SIZE, PAGES = 2, 11
# Bytes: of a variant's files, in the bank's shapes, while it is loaded; for host memory.
FILES, SLOT = 6, 4
LOAD = FILES + 2 * SLOT
HOST = 2 * LOAD + 2 * SLOT

# From arrival to the end: a load and a wait for a slot and for rows, all at their longest.
LONGEST_S = 90.0


class Store:
    """Has zen4-a to zen4-d, in versions that are raised while it serves."""

    def __init__(self, fake: Any) -> None:
        self.fake = fake
        self.versions = dict.fromkeys("abcd", 1)

    def variant(self, name: str) -> Variant:
        letter = name[-1]
        if letter not in self.versions:
            raise VariantNotFound(name)
        return replace(self.fake.variant(letter, self.versions[letter]), bytes=FILES)


class WatchedLoader(Loader):
    """Sees that no variant is loaded twice at a time, that no more run than allowed, and that what
    they take of host memory, with the copies, stays within the budget."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reads: dict[int, str] = {}
        self.puts: dict[int, str] = {}
        self.given_up: set[int] = set()
        self.copies: set[str] = set()

    def connect(self, post: Callable[[Any], None]) -> None:
        def watched(event: Any) -> None:
            if not isinstance(event, Advanced):
                brought = self.reads.pop(event.attempt, None)
                self.puts.pop(event.attempt, None)
                self.given_up.discard(event.attempt)
                if isinstance(event, Fetched) and brought is not None:
                    self.copies.add(brought)
            post(event)

        super().connect(watched)

    def under_way(self) -> list[str]:
        loads = [*self.reads.items(), *self.puts.items()]
        return [digest for attempt, digest in loads if attempt not in self.given_up]

    def start(self, variant: Variant, attempt: int) -> None:
        assert variant.digest not in self.under_way(), "a second load of one variant"
        assert variant.digest not in self.copies, "read though it is in host memory"
        self.reads[attempt] = variant.digest
        assert len(self.reads.keys() - self.given_up) <= MAX_LOADS
        self.check()
        super().start(variant, attempt)

    def put(self, variant: Variant, attempt: int) -> None:
        assert variant.digest not in self.under_way(), "a second load of one variant"
        self.puts[attempt] = variant.digest
        assert len(self.puts) + self.staged <= MAX_STAGED
        super().put(variant, attempt)

    def drop_host(self, digest: str) -> None:
        assert digest not in self.puts.values(), "dropped while it is read from"
        self.copies.discard(digest)
        super().drop_host(digest)

    def abandon(self, attempt: int) -> None:
        if attempt in self.reads or attempt in self.puts:
            self.given_up.add(attempt)
        super().abandon(attempt)
        self.copies &= self.held

    def check(self) -> None:
        assert len(self.reads) * LOAD + len(self.copies) * SLOT <= HOST, "the budget was passed"


class Client:
    """One request, what was done to it and what came back."""

    def __init__(self, world: "World", request: Request, raises: bool) -> None:
        self.world, self.request, self.raises = world, request, raises
        self.submitted_at = self.ended_at = world.now
        self.cancelled = False
        self.tokens: list[int] = []
        self.last: TokenEvent | Failure | None = None

    def __call__(self, event: TokenEvent | Failure) -> None:
        assert self.last is None, "an event after the last"
        self.ended_at = self.world.now
        if isinstance(event, Failure) or event.finish is not None:
            self.last = event
        if isinstance(event, TokenEvent):
            self.tokens += event.token_ids
        if self.raises and len(self.tokens) > 1:
            self.last = event
            raise OSError("the client is gone")

    def check(self, answer: list[int]) -> None:
        """The answer is what it would have been alone, and it ended for a reason that was."""
        assert self.last is not None, f"{self.request.id} was never answered"
        assert self.tokens == answer[: len(self.tokens)]
        assert self.ended_at - self.submitted_at <= LONGEST_S
        if isinstance(self.last, TokenEvent) and self.last.finish is not None:
            finish = self.last.finish
            assert finish.completion_tokens == len(self.tokens)
            assert finish.reason == "stop" or self.tokens == answer
        elif isinstance(self.last, Failure):
            deadline = self.request.deadline
            allowed = {"load_failed", "timed_out", "corrupt", "exhausted", "withdrawn"}
            allowed |= {"cancelled"} if self.cancelled else set()
            allowed |= {"deadline"} if deadline is not None and deadline <= self.ended_at else set()
            if self.request.variant is None:
                allowed &= {"cancelled", "deadline"}
            assert self.last.kind in allowed, self.last


class World:
    """One schedule: everything that happens is drawn from `seed`."""

    def __init__(self, fake: Any, seed: int) -> None:
        self.fake, self.random = fake, random.Random(seed)
        self.now = 0.0
        self.tasks: list[tuple[float, Callable[[], None]]] = []
        self.clients: list[Client] = []
        self.calls: list[Future[None]] = []
        self.kept: set[Variant] = set()
        self.let_go: set[str] = set()
        self.store = Store(fake)
        self.router = Router(self.store)
        self.engine = fake.Engine(rows=ROWS, slots=SLOTS, max_length=12, shapes=SHAPES)
        self.engine.page_size, self.engine.pages = PAGE_SIZE, PAGES
        self.engine.reach = self.random.choice((None, None, 3))
        stages = Stages(self.read, self.stage, self.stage)
        self.loader = WatchedLoader(stages, clock=lambda: self.now, spawn=self.spawn)
        cache = CacheConfig(
            slots=SLOTS,
            policy=Policy(half_life_s=5.0, recency_s=5.0, pinned=1, idle_after_s=20.0),
            max_loads=MAX_LOADS,
            max_staged=MAX_STAGED,
            slot_bytes=SLOT,
            host_bytes=HOST,
            read_s=STAGE_S,
            verify_s=STAGE_S,
            put_s=STAGE_S,
            commit_s=COMMIT_S,
            patience_s=1.0,
            wait_s=WAIT_S,
            forget_after_s=30.0,
        )
        self.worker = Worker(
            self.engine,
            self.loader,
            cache,
            fake.ByteTokenizer,
            InboxLimits(INBOX),
            lambda: self.now,
        )
        self.post = self.worker._inbox.put
        self.worker._inbox.put = self.put

    def put(self, event: Any) -> None:
        """What goes into the inbox; that a slot is written may be told late, or too late."""
        if isinstance(event, Committed) and self.random.random() < 0.1:
            late = self.random.choice((0.5, COMMIT_S + 1.0))
            self.tasks.append((self.now + late, lambda: self.post(event)))
        else:
            self.post(event)

    def spawn(self, task: Callable[[], None]) -> None:
        takes = self.random.choice((0.0, 0.0, 0.0, 0.1, 0.1, 0.3, 0.3, 1.0, 3.0, STAGE_S + 4.0))
        self.tasks.append((self.now + takes, task))

    def read(self, variant: Variant) -> Any:
        """The first stage; like the others it may fail, and `spawn` may have it hang."""
        self.stage(None)
        return self.fake.read_number(variant)

    def stage(self, what: Any) -> Any:
        luck = self.random.random()
        if luck < 0.05:
            raise OSError("no such disk")
        if luck < 0.1:
            raise VariantCorrupt("zen4-a/1", "bits", "differs")
        return what

    def act(self) -> None:
        """One thing that somebody outside does."""
        draw = self.random
        match draw.choices(("submit", "cancel", "operate", "publish"), (10, 4, 2, 0.3))[0]:
            case "submit":
                self.submit()
            case "cancel" if self.clients:
                client = draw.choice(self.clients)
                client.cancelled = True
                self.worker.cancel(client.request.id)
            case "operate":
                used = [c.request.variant for c in self.clients if c.last is None]
                named = [v for v in used if v is not None] or [self.fake.variant("d")]
                variant = self.router.resolve(draw.choice(named).name)
                assert variant is not None
                verbs = (self.worker.load, self.unload, self.pin, self.unpin)
                for verb in draw.choices(verbs, k=draw.choice((1, 2, 4))):
                    self.calls.append(verb(variant))
            case "publish":
                self.store.versions[draw.choice("abcd")] += 1

    def pin(self, variant: Variant) -> Future[None]:
        return self.worker.pin(variant, True)

    def unpin(self, variant: Variant) -> Future[None]:
        self.let_go.add(variant.name)
        return self.worker.pin(variant, False)

    def unload(self, variant: Variant) -> Future[None]:
        self.let_go.add(variant.name)
        return self.worker.unload(variant)

    def submit(self) -> None:
        draw = self.random
        model = draw.choices(("base", "zen4-a", "zen4-b", "zen4-c", "zen4-d"), (6, 8, 4, 2, 1))[0]
        request = Request(
            f"r{len(self.clients)}",
            self.router.resolve(model),
            (
                *([7, 8, 9, 10, 11, 12][: draw.randint(0, 6)]),
                *draw.choices(range(2, 200), k=draw.randint(1, 3)),
            ),
            SamplingParams(
                max_tokens=draw.randint(1, 9),
                stop_token_ids=tuple(draw.sample(range(256), k=draw.choice((0, 0, 20)))),
                ignore_eos=draw.random() < 0.8,
            ),
            draw.randrange(100),
            self.now + draw.choice((0.0, 0.3, 2.0)) if draw.random() < 0.2 else None,
            priority=draw.choice((0, 1, 3)),
            tenant=draw.choice(("", "", "other")),
        )
        client = Client(self, request, raises=draw.random() < 0.1)
        try:
            self.worker.submit(request, client)
        except InboxFull:
            assert self.worker.snapshot().waiting >= INBOX
        else:
            self.clients.append(client)

    def tick(self, jumps: tuple[float, ...] = (0.0, 0.01, 0.01, 0.3)) -> None:
        self.now += self.random.choice(jumps)
        due = [task for at, task in self.tasks if at <= self.now]
        self.tasks = [(at, task) for at, task in self.tasks if at > self.now]
        self.random.shuffle(due)
        for task in due:
            task()
        self.engine.broken = {"write_slot refused"} if self.random.random() < 0.1 else set()
        self.worker.tick()
        seen = self.worker.snapshot()
        assert seen.rows_in_use <= ROWS
        assert seen.pages_held + seen.pages_kept <= seen.pages == PAGES
        # Who lost its row for want of pages waits again, and was accepted before.
        assert 0 <= seen.waiting <= INBOX + ROWS
        self.loader.check()
        assert seen.host_used <= HOST
        slots = [status.slot for status in seen.variants if status.slot is not None]
        assert len(set(slots)) == len(slots) <= SLOTS
        assert all(0 <= slot < SLOTS for slot in slots)
        resident = {s.variant for s in seen.variants if s.slot is not None}
        pinned = {s.variant for s in seen.variants if s.pinned}
        # A newer version may have taken the pin over.
        free = self.let_go | {variant.name for variant in pinned - self.kept}
        assert {v for v in self.kept - resident if v.name not in free} == set(), "a pinned one left"
        assert len({variant.name for variant in pinned}) == len(pinned) < SLOTS
        self.let_go.clear()
        self.kept = pinned & resident

    def run(self) -> None:
        for _ in range(40):
            while self.random.random() < 0.4:
                self.act()
            self.tick()
        for _ in range(400):
            answered = all(client.last is not None for client in self.clients)
            if answered and all(call.done() for call in self.calls) and not self.tasks:
                break
            self.tick((0.01, 0.3, 1.0))
        self.end()

    def end(self) -> None:
        """Every request and every operator was answered, and nothing is held by anybody."""
        assert all(call.done() for call in self.calls), "an operator was never answered"
        for client in self.clients:
            room = 12 - len(client.request.token_ids)
            limit = min(client.request.sampling.max_tokens, room)
            client.check(self.fake.answer_of(client.request, limit))
        for _ in range(3):  # cancellations that callbacks caused, tokens on their way
            self.tick()
        seen = self.worker.snapshot()
        assert (seen.rows_in_use, seen.waiting, seen.pages_held) == (0, 0, 0)
        assert [s.leases + s.waiting for s in seen.variants] == [0] * len(seen.variants)
        assert self.loader.staged == 0
        self.worker.stop()


def how_it_ended(client: Client) -> str:
    if isinstance(client.last, Failure):
        return client.last.kind
    finish = client.last.finish if client.last is not None else None
    return "gone" if finish is None else finish.reason


def what_was_launched(world: World) -> Counter[str]:
    """How often a prompt was read on, several were read in one call, a call had several steps, and
    a row was taken from a request that had tokens."""
    kinds: Counter[str] = Counter()
    for name, *what in world.engine.log:
        if name == "decode":
            kinds["steps together"] += what[0] > 1
        elif name == "prefill":
            kinds["later parts"] += any(start for _, _, start in what)
            kinds["prompts together"] += len(what) > 1
    kinds["writes"] = world.engine.count("write_slot")
    kinds["displaced"] = world.worker.snapshot().rows_lost
    kinds["found"] = world.worker.snapshot().found_tokens
    return kinds


@pytest.fixture
def new_world(fake: Any) -> Callable[[int], World]:
    """Makes the world of a schedule from its number."""
    return lambda seed: World(fake, seed)


@pytest.fixture
def what_happened() -> Callable[[World], Counter[str]]:
    """How a schedule's requests ended, and what was launched for them."""
    return lambda world: Counter(map(how_it_ended, world.clients)) + what_was_launched(world)
