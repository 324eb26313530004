"""Random schedules of the whole way, router to device, in virtual time.

The worker, its inbox, scheduler and cache are the real ones, ticked by hand; the loader is the
real one with tasks that run when the schedule says; only the device and the clock are stand-ins.
Requests come, are cancelled, run out of time and have callbacks that raise; loads fail, hang and
come too late; operators load, unload and pin. What an answer should be is known by hand, so a slot
that was written under a lease shows as a wrong token. The device looks at all pages of a row before
it writes to one, so a page that two write to, or that was filled with other weights, shows too.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from server import scheduler
from server.holdings import Holdings
from server.inbox import Inbox
from server.loader import Loader
from server.requests import Failure, InboxFull, Request, TokenEvent
from server.router import Router
from server.worker import Worker
from zen_jax import delta_cache, prefix_cache
from zen_jax.checkpoint.manifest import Variant, VariantCorrupt, VariantNotFound
from zen_jax.pages import PagePool
from zen_jax.residency import Absent, CacheConfig, Resident
from zen_jax.sampling import SamplingParams

SLOTS, ROWS, INBOX, MAX_LOADS = 2, 3, 8, 2
LOAD_TIMEOUT_S, WAIT_S = 6.0, 20.0
SCHEDULES = 200
SHAPES = ((1, 2), (1, 4), (3, 2))
# Requests have 12 tokens at most: 6 pages each. Three rows want 18.
PAGE_SIZE, PAGES = 2, 11

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
        return self.fake.variant(letter, self.versions[letter])


class WatchedLoader(Loader):
    """Sees that no variant is loaded twice at a time, and no more than allowed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.under_way: dict[int, str] = {}

    def connect(self, post: Callable[[Any], None]) -> None:
        def watched(event: Any) -> None:
            self.under_way.pop(event.attempt)
            post(event)

        super().connect(watched)

    def start(self, variant: Variant, attempt: int) -> None:
        assert variant.digest not in self.under_way.values(), "a second load of one variant"
        assert len(self.under_way) < MAX_LOADS
        self.under_way[attempt] = variant.digest
        super().start(variant, attempt)

    def abandon(self, attempt: int) -> None:
        self.under_way.pop(attempt, None)
        super().abandon(attempt)


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
            allowed = {"load_failed", "corrupt", "exhausted", "withdrawn"}
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
        self.loader = WatchedLoader(
            self.read, lambda tree: tree, clock=lambda: self.now, spawn=self.spawn
        )
        cache = CacheConfig(
            slots=SLOTS,
            max_loads=MAX_LOADS,
            load_timeout_s=LOAD_TIMEOUT_S,
            patience_s=1.0,
            wait_s=WAIT_S,
            forget_after_s=30.0,
        )
        self.worker = Worker(
            self.engine,
            self.loader,
            cache,
            fake.ByteTokenizer,
            INBOX,
            lambda: self.now,
        )

    def spawn(self, task: Callable[[], None]) -> None:
        takes = self.random.choice((0.0, 0.1, 1.0, 3.0, 3.0, LOAD_TIMEOUT_S + 4.0))
        self.tasks.append((self.now + takes, task))

    def read(self, variant: Variant) -> Any:
        luck = self.random.random()
        if luck < 0.1:
            raise OSError("no such disk")
        if luck < 0.2:
            raise VariantCorrupt(str(variant), "bits", "differs")
        return self.fake.read_number(variant)

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
        model = draw.choices(("base", "zen4-a", "zen4-b", "zen4-c", "zen4-d"), (2, 8, 4, 2, 1))[0]
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
            assert self.worker.snapshot().waiting == INBOX
        else:
            self.clients.append(client)

    def tick(self, jumps: tuple[float, ...] = (0.0, 0.01, 0.01, 0.3)) -> None:
        self.now += self.random.choice(jumps)
        due = [task for at, task in self.tasks if at <= self.now]
        self.tasks = [(at, task) for at, task in self.tasks if at > self.now]
        self.random.shuffle(due)
        for task in due:
            task()
        self.worker.tick()
        seen = self.worker.snapshot()
        assert seen.rows_in_use <= ROWS
        assert seen.pages_held + seen.pages_kept <= seen.pages == PAGES
        assert 0 <= seen.waiting <= INBOX
        assert len(self.loader.under_way) + self.loader.staged <= MAX_LOADS
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
        for _ in range(60):
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
    kinds["displaced"] = world.engine.resumed
    kinds["found"] = world.worker.snapshot().found_tokens
    return kinds


def test_any_schedule_answers_everyone_rightly_and_leaves_nothing(
    fake: Any, scale: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    reached: Counter[str] = Counter()
    for seed in range(SCHEDULES * scale):
        world = World(fake, seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"in schedule {seed}")
            raise
        reached.update(map(how_it_ended, world.clients))
        reached["writes"] += world.engine.count("write_slot")
        reached.update(what_was_launched(world))
    # The schedules are of use only while they reach all this.
    assert reached["length"] > 5 * SCHEDULES
    assert reached["writes"] > 1.2 * SLOTS * SCHEDULES
    for kind in ("stop", "cancelled", "deadline", "load_failed", "corrupt", "withdrawn", "gone"):
        assert reached[kind] > SCHEDULES / 10, reached
    for kind in ("later parts", "prompts together", "steps together", "displaced", "found"):
        assert reached[kind] > SCHEDULES / 10, reached


# Faults that such systems have had, each put in by hand: the schedules have to find every one.


def evicts_under_lease(patch: pytest.MonkeyPatch) -> None:
    def victim(draft: Any) -> str | None:
        residents = [d for d, e in draft.entries.items() if isinstance(e.place, Resident)]
        return min(residents, key=lambda d: draft.entries[d].used, default=None)

    def evict(draft: Any, digest: str) -> None:
        entry = draft.entries[digest]
        draft.entries[digest] = replace(entry, place=Absent())

    patch.setattr(delta_cache._Draft, "_victim", victim)
    patch.setattr(delta_cache._Draft, "_evict", evict)


def forgets_who_waits_behind_the_first(patch: pytest.MonkeyPatch) -> None:
    grant = delta_cache._Draft._grant

    def first_only(draft: Any, digest: str) -> None:
        count = len(draft.actions)
        grant(draft, digest)
        del draft.actions[count + 1 :]

    patch.setattr(delta_cache._Draft, "_grant", first_only)


def loads_end_with_their_first_asker(patch: pytest.MonkeyPatch) -> None:
    release = delta_cache._Draft.release

    def and_gives_up(draft: Any, holder: int) -> None:
        digest = draft.holders[holder]
        first = next(iter(draft.entries[digest].waiting), None)
        release(draft, holder)
        if holder == first and not isinstance(draft.entries[digest].place, Resident):
            draft.entries[digest] = replace(draft.entries[digest], place=Absent())

    patch.setattr(delta_cache._Draft, "release", and_gives_up)


def keeps_the_lease_of_who_cancels(patch: pytest.MonkeyPatch) -> None:
    fail = scheduler._Draft.fail

    def and_leaks(draft: Any, ticket: int, kind: Any, *rest: Any, **named: Any) -> None:
        step, draft.cache_step = draft.cache_step, lambda step: None
        fail(draft, ticket, kind, *rest, **named)
        draft.cache_step = step

    patch.setattr(scheduler._Draft, "fail", and_leaks)


def pins_what_is_to_be_unloaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler._Draft, "withdraw_unloads", lambda draft, pinned: None)


def forgets_the_answer_of_who_is_displaced(patch: pytest.MonkeyPatch) -> None:
    give = scheduler._Draft.give

    def prompt_alone(draft: Any, ticket: int, row: int) -> None:
        give(draft, ticket, row)
        job = draft.jobs[draft.rows[row]]
        draft.jobs[draft.rows[row]] = replace(job, unread=job.request.token_ids, tokens=())

    patch.setattr(scheduler._Draft, "give", prompt_alone)


def shares_pages_between_variants(patch: pytest.MonkeyPatch) -> None:
    root = prefix_cache.root
    patch.setattr(prefix_cache, "root", lambda tenant, variant, *rest: root(tenant, "", *rest))


def keeps_pages_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    admit = Holdings.admit

    def at_once(held: Holdings, job: Any) -> Any:
        job = admit(held, job)
        return held.confirm(replace(job, tokens=(*job.tokens, 0)))

    patch.setattr(Holdings, "admit", at_once)


def gives_a_page_back_that_another_holds(patch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def uncounted(pool: PagePool, pages: Any) -> None:
        pages = list(pages)
        share(pool, pages)
        for page in pages:
            pool._holders[page] = 1

    patch.setattr(PagePool, "share", uncounted)


def reserves_pages_for_one_step_of_several(patch: pytest.MonkeyPatch) -> None:
    grow = Holdings.grow

    def one(held: Holdings, job: Any, position: int, end: int) -> Any:
        return grow(held, job, position, end if job.unread else position + 1)

    patch.setattr(Holdings, "grow", one)


def forgets_the_pages_of_who_ends(patch: pytest.MonkeyPatch) -> None:
    forget = scheduler._Draft.forget

    def without(draft: Any, ticket: int) -> Any:
        return replace(forget(draft, ticket), pages=())

    patch.setattr(scheduler._Draft, "forget", without)


def makes_no_room_in_the_inbox(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "settle", lambda inbox, requests: None)


@pytest.mark.parametrize(
    "plant, schedules",
    [
        (evicts_under_lease, 20),
        (forgets_who_waits_behind_the_first, 20),
        (loads_end_with_their_first_asker, 20),
        (keeps_the_lease_of_who_cancels, 20),
        (makes_no_room_in_the_inbox, 20),
        (forgets_the_answer_of_who_is_displaced, 100),
        (shares_pages_between_variants, 50),
        (keeps_pages_before_they_are_read, 50),
        (gives_a_page_back_that_another_holds, 50),
        (reserves_pages_for_one_step_of_several, 20),
        (forgets_the_pages_of_who_ends, 20),
        (pins_what_is_to_be_unloaded, 200),  # operators seldom meet
    ],
)
def test_the_schedules_find_a_fault_that_is_planted(
    plant: Callable[[pytest.MonkeyPatch], None],
    schedules: int,
    fake: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.CRITICAL)
    plant(monkeypatch)
    found = 0
    for seed in range(schedules):
        try:
            World(fake, seed).run()
        except (AssertionError, RuntimeError, LookupError, ValueError):
            found += 1
    assert found >= 5, f"found in {found} of {schedules} schedules"
