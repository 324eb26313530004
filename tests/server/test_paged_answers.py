"""Mixed requests with beginnings in common, too few pages and callers who leave, on a real engine:
the tokens of fixed rows, and nothing left."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from server.app import make_worker, tokenizers_of
from server.requests import Request
from server.serve_options import ServeOptions
from server.worker import Worker
from zen_jax.checkpoint.load import bank_schema, read_base
from zen_jax.checkpoint.store import Store
from zen_jax.engine import Engine, EngineConfig
from zen_jax.pages import NO_PAGE
from zen_jax.sampling import SamplingParams

LENGTH, COUNT = 192, 100
# 26 pages of 16 where six rows at their longest want 72.
PAGED = EngineConfig(6, LENGTH, 64, 4, page_size=16, pages=26)
FIXED = EngineConfig(6, LENGTH, 64, 4, page_size=LENGTH)


@pytest.fixture(scope="module")
def engines(tiny_store: Path, compiled: Path) -> dict[bool, Engine]:
    store = Store(tiny_store)
    schema = bank_schema(store, 3)
    base = read_base(store, schema.held)
    made = {paged: Engine(base, PAGED if paged else FIXED, schema) for paged in (True, False)}
    for engine in made.values():
        engine.warm_up()
    return made


def drawn(store: Store, count: int, seed: int) -> list[Request]:
    """Requests of every kind; most begin as others do."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(64, 128) for _ in range(size)] for size in (20, 40, 70, 130)]
    variants = [None, *(store.variant(f"tiny-{letter}") for letter in "abc")]
    made: list[Request] = []
    while len(made) < count:
        shared = draw.choice([[], *beginnings])
        shared = shared[: draw.choice((len(shared), draw.randint(0, len(shared))))]
        prompt = (*shared, *(draw.randrange(64, 128) for _ in range(draw.randint(1, 12))))
        penalised = draw.random() < 0.2
        sampling = SamplingParams(
            max_tokens=draw.choice((1, 4, 20, 50)),
            temperature=draw.choice((0.0, 0.9)),
            repetition_penalty=1.3 if penalised else 1.0,
            frequency_penalty=0.5 if penalised else 0.0,
            prompt_logprobs=0 if draw.random() < 0.05 else None,
            ignore_eos=draw.random() < 0.9,
            stop_token_ids=tuple(draw.sample(range(256), draw.choice((0, 0, 10)))),
        )
        limit = min(sampling.max_tokens, LENGTH - len(prompt))
        sampling = SamplingParams(**{**vars(sampling), "max_tokens": limit})
        variant, seed, priority = draw.choice(variants), draw.randrange(99), draw.choice((0, 0, 2))
        tenant = draw.choice(("", "", "other"))
        for sample in range(draw.choice((1, 1, 1, 3))):
            name = f"r{len(made)}"
            request = Request(name, variant, prompt, sampling, seed, None, priority, sample, tenant)
            made.append(request)
    return made[:count]


class Calls:
    """Requests on their way through a worker that is ticked by hand."""

    def __init__(self, store: Store, engine: Engine, shares: bool, fake: Any) -> None:
        self.fake = fake
        options = ServeOptions(inbox=100_000, prefix_cache=shares)
        self.worker: Worker = make_worker(store, engine, options, tokenizers_of(store))
        self.callers: dict[str, Any] = {}

    def submit(self, request: Request) -> None:
        self.callers[request.id] = self.fake.Caller()
        self.worker.submit(request, self.callers[request.id])

    @property
    def running(self) -> list[str]:
        return [name for name, caller in self.callers.items() if not caller.ended]

    def end(self) -> None:
        while self.running:
            self.worker.tick(0.001)
        for _ in range(3):
            self.worker.tick()


def test_mixed_requests_have_the_tokens_of_fixed_rows_and_leave_no_page(
    tiny_store: Path, engines: dict[bool, Engine], fake: Any, scale: int, record_property: Any
) -> None:
    count = COUNT if scale == 1 else 10 * COUNT
    store, draw = Store(tiny_store), random.Random(5)
    requests = drawn(store, count, 1)
    plain = Calls(store, engines[False], False, fake)
    for request in requests:
        plain.submit(request)
    plain.end()
    compiled = engines[True].compiles
    paged = Calls(store, engines[True], True, fake)
    left, waiting = set(), list(requests)
    while waiting:
        for _ in range(draw.choice((0, 0, 1, 3))):
            if waiting:
                paged.submit(waiting.pop(0))
        if draw.random() < 0.08 and paged.running:
            name = draw.choice(paged.running)
            left.add(name)
            paged.worker.cancel(name)
        paged.worker.tick()
        seen = paged.worker.snapshot()
        assert seen.pages_held + seen.pages_kept <= 26
    paged.end()
    kinds: Counter[str] = Counter()
    for request in requests:
        got, want = paged.callers[request.id], plain.callers[request.id]
        if got.failure is not None:
            assert request.id in left and got.failure.kind == "cancelled"
            assert got.tokens == want.tokens[: len(got.tokens)]
            kinds["cancelled"] += 1
            continue
        kinds["parted"] += got.tokens != want.tokens
        finish = got.events[-1].finish
        assert (finish.reason, finish.prompt_tokens) == (
            want.events[-1].finish.reason,
            len(request.token_ids),
        ) or got.tokens != want.tokens
        kinds["found"] += finish.cached_tokens > 0
    seen = paged.worker.snapshot()
    pool = paged.worker._plan.pages
    assert (seen.pages_held, seen.rows_in_use, seen.waiting) == (0, 0, 0)
    assert all(pool.holders(page) == 0 for page in range(pool.size)), "a reference is left"
    kinds["lost rows"] = seen.rows_lost
    record_property("kinds", dict(kinds))
    tokens = {"tokens found": seen.found_tokens, "tokens read": seen.read_tokens}
    print(f"{count} requests: {dict(kinds) | tokens}")
    assert kinds["parted"] == 0, kinds
    for kind in ("cancelled", "found", "lost rows"):
        assert kinds[kind] >= count / 50, kinds
    assert engines[True].compiles == compiled, "nothing compiles meanwhile"
    for calls in (plain, paged):
        calls.worker.stop()


def between_two(store: Store, count: int, seed: int) -> list[Request]:
    """Requests of two tenants that ask for the same on purpose, each of its own variants."""
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(64, 128) for _ in range(size)) for size in (18, 40, 70, 130)]
    own = {"one": ("a", "c"), "two": ("b", "c")}
    made: list[Request] = []
    for i in range(count):
        tenant, prompt = draw.choice(("one", "two")), draw.choice(prompts)
        prompt = prompt[: draw.choice((len(prompt), draw.randint(1, len(prompt))))]
        letter = draw.choice((*own[tenant], None))
        variant = None if letter is None else store.variant(f"tiny-{letter}")
        sampling = SamplingParams(max_tokens=draw.choice((1, 3, 8)), ignore_eos=True)
        made.append(Request(f"{tenant}/{i}", variant, prompt, sampling, 0, None, 0, 0, tenant))
    return made


def test_two_tenants_who_ask_the_same_share_neither_page_nor_token(
    tiny_store: Path, engines: dict[bool, Engine], fake: Any, scale: int
) -> None:
    count = 500 if scale == 1 else 10_000
    store, draw = Store(tiny_store), random.Random(7)
    requests = between_two(store, count, 3)
    alike = list(dict.fromkeys((request.variant, request.token_ids) for request in requests))
    plain = Calls(store, engines[False], False, fake)
    truth: dict[Any, list[int]] = {}
    most = SamplingParams(max_tokens=8, ignore_eos=True)
    for number, (variant, prompt) in enumerate(alike):
        plain.submit(Request(f"t{number}", variant, prompt, most, 0, None, 0, 0, ""))
    plain.end()
    for number, key in enumerate(alike):
        truth[key] = plain.callers[f"t{number}"].tokens
    paged = Calls(store, engines[True], True, fake)
    owners: dict[bytes, str] = {}
    waiting = list(requests)
    while waiting or paged.running:
        for _ in range(draw.choice((0, 1, 2, 4))):
            if waiting and len(paged.running) < 24:
                paged.submit(waiting.pop(0))
        paged.worker.tick(0.001)
        no_page_is_of_two(paged.worker, owners)
    found: Counter[str] = Counter()
    for request in requests:
        caller = paged.callers[request.id]
        want = truth[request.variant, request.token_ids]
        assert caller.tokens == want[: len(caller.tokens)] and caller.tokens, request.id
        found[request.tenant] += caller.events[-1].finish.cached_tokens > 0
    assert min(found["one"], found["two"]) > count / 20, found
    for calls in (plain, paged):
        calls.worker.stop()


def no_page_is_of_two(worker: Worker, owners: dict[bytes, str]) -> None:
    """Whoever holds a page, or held it first under the key that it is kept by, is of one tenant.

    Args:
        owners: by key; kept from call to call.
    """
    holders: dict[int, str] = {}
    pool = worker._plan.pages
    for job in worker._plan.jobs.values():
        for page in job.pages:
            if page == NO_PAGE:
                continue
            tenant, key = job.request.tenant, pool._key_of.get(page)
            assert holders.setdefault(page, tenant) == tenant
            assert key is None or owners.setdefault(key, tenant) == tenant
