"""The engine over pages: size, order and owners change no token; what they hold can be shared."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.delta.bank import BankSchema
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.engine_state import Chunk
from zen_jax.kv_cache import page_bytes, reach
from zen_jax.sampling import SamplingParams

ROWS, LENGTH, MADE = 3, 96, 20
SIZES = EngineConfig(ROWS, LENGTH, chunk_tokens=64, max_steps=4, page_size=16, pages=20)
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5)
PROMPT = np.random.default_rng(3).integers(0, 64, 70).tolist()
# (slot, prompt, sampling, seed); the last two begin alike.
REQUESTS = [
    (0, PROMPT[::-1][:41], SamplingParams(temperature=0), 0),
    (-1, PROMPT, SamplingParams(temperature=0.8), 1),
    (-1, [*PROMPT[:50], 1, 2, 3], PENALISED, 2),
]
# Pages of each row, none in order.
PAGES = [(19, 2, 11, 7, 0, 5), (4, 13, 1, 18, 9, 16), (8, 3, 17, 6, 12, 10)]


@pytest.fixture(scope="module")
def exact(config: Any, base: Any) -> Any:
    """In float32, where a product of few rows and one of many have the same bits."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), base)


def make(config: Any, params: Any, sizes: EngineConfig = SIZES) -> Engine:
    return Engine(place_params(config, params), sizes, BankSchema.covering(config, 1))


@pytest.fixture(scope="module")
def engine(config: Any, exact: Any) -> Engine:
    return make(config, exact)


def bank_of(engine: Engine, make_variant: Any) -> Any:
    return engine.write_slot(engine.init_bank(), 0, engine.stage(make_variant(0)))


@pytest.fixture(scope="module")
def bank(engine: Engine, make_variant: Any) -> Any:
    return bank_of(engine, make_variant)


def read(engine, bank, state, which: int, pages=None, found: int = 0) -> tuple[Any, int]:
    """Reads a request into its row behind `found` tokens that lie in its pages; the first token."""
    slot, prompt, sampling, seed = REQUESTS[which]
    whole = Chunk(
        which,
        slot,
        prompt[found:],
        found,
        sampling=sampling,
        seed=seed,
        prompt=len(prompt),
        pages=pages,
        before=prompt[:found],
    )
    sampled = None
    for part in whole.cut(32):
        state, sampled = engine.prefill(bank, state, [part])
    assert sampled is not None
    return state, int(np.asarray(sampled.token)[0])


def answers(engine, bank, state, first: dict[int, int], table=None) -> dict[int, list[int]]:
    """Goes on with rows until they have their tokens."""
    got = {row: [token] for row, token in first.items()}
    while len(min(got.values(), key=len)) < MADE:
        state, sampled = engine.decode(bank, state, 3, list(first), table)
        for row, tokens in got.items():
            tokens += [int(t) for t in np.asarray(sampled.token)[:, row] if t >= 0]
    return {row: tokens[:MADE] for row, tokens in got.items()}


def all_answers(engine, bank, pages=None, state=None) -> dict[int, list[int]]:
    state, first = engine.init_state() if state is None else state, {}
    for which in range(len(REQUESTS)):
        own = None if pages is None else pages[which]
        state, first[which] = read(engine, bank, state, which, own)
    table = None if pages is None else engine.sizes.table(dict(enumerate(pages)))
    return answers(engine, bank, state, first, table)


@pytest.fixture(scope="module")
def fixed(config: Any, exact: Any, make_variant: Any) -> dict[int, list[int]]:
    """Answers from fixed rows."""
    engine = make(config, exact, replace(SIZES, page_size=LENGTH, pages=None))
    assert (engine.sizes.columns, engine.sizes.all_pages) == (1, ROWS)
    return all_answers(engine, bank_of(engine, make_variant))


def spoilt(engine: Engine) -> Any:
    """A state whose cache is full of NaN."""
    state = engine.init_state()
    return replace(state, cache=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.cache))


def test_scattered_pages_full_of_anything_give_the_tokens_of_fixed_rows(
    engine, bank, fixed
) -> None:
    assert len({tuple(tokens) for tokens in fixed.values()}) == len(REQUESTS)
    assert all_answers(engine, bank, PAGES, spoilt(engine)) == fixed


@pytest.mark.parametrize("found", [16, 48])
def test_a_prompt_that_begins_as_another_reads_the_rest(engine, bank, fixed, found: int) -> None:
    """What is in shared pages counts for penalties too, and the first row goes on undisturbed."""
    state, first = spoilt(engine), {}
    state, first[1] = read(engine, bank, state, 1, PAGES[1])
    shared = PAGES[1][: found // 16] + PAGES[2][found // 16 :]
    state, first[2] = read(engine, bank, state, 2, shared, found)
    table = engine.sizes.table({1: PAGES[1], 2: shared})
    assert answers(engine, bank, state, first, table) == {i: fixed[i] for i in (1, 2)}


def test_without_what_was_before_penalties_would_differ(engine, bank, fixed) -> None:
    """The test above sees whether tokens of shared pages are counted."""
    prompt, sampling = REQUESTS[2][1], REQUESTS[2][2]
    state, _ = read(engine, bank, engine.init_state(), 1, PAGES[1])
    shared = PAGES[1][:3] + PAGES[2][3:]
    uncounted = [64 - 1] * 48
    chunk = Chunk(2, -1, prompt[48:], 48, True, sampling, 2, pages=shared, before=uncounted)
    state, sampled = engine.prefill(bank, state, [chunk])
    table = engine.sizes.table({2: shared})
    got = answers(engine, bank, state, {2: int(sampled.token[0])}, table)
    assert got[2] != fixed[2]


def test_pages_given_to_another_row_are_its_own(engine, bank, fixed) -> None:
    """A row is given up in the middle of its steps; its pages go to the next one at once."""
    state, _ = read(engine, bank, engine.init_state(), 1, PAGES[1])
    state, _ = engine.decode(bank, state, 4, [1], engine.sizes.table({1: PAGES[1]}))
    state, first = read(engine, bank, state, 0, PAGES[1][::-1])
    table = engine.sizes.table({0: PAGES[1][::-1]})
    assert answers(engine, bank, state, {0: first}, table) == {0: fixed[0]}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_fewer_bits_keep_what_matters(config, exact, make_variant, fixed, dtype: str) -> None:
    """Fixed rows and pages agree to the token, and the cache is as much smaller as is said."""
    engine = make(config, exact, replace(SIZES, kv_dtype=dtype))
    bank = bank_of(engine, make_variant)
    got = all_answers(engine, bank, PAGES)
    rows = make(config, exact, replace(SIZES, kv_dtype=dtype, page_size=LENGTH, pages=None))
    assert all_answers(rows, bank) == got
    same = sum(a == b for i in got for a, b in zip(got[i], fixed[i], strict=True))
    assert same >= MADE, "tokens follow from the prompt still"
    held = jax.tree.leaves(engine.init_state().cache)
    assert sum(x.nbytes for x in held) == 20 * page_bytes(config, 16, dtype)


def test_pages_behind_every_layers_window_are_given_up(config, exact, fixed) -> None:
    windowed = replace(config, windows=(24, 16))
    assert (reach(windowed), reach(config), reach(replace(config, windows=(24, None)))) == (
        24,
        None,
        None,
    )
    engine = make(windowed, exact)
    bank = engine.init_bank()
    whole = all_answers(engine, bank, PAGES)
    assert whole != fixed
    state, got = engine.init_state(), []
    prompt = REQUESTS[1][1]
    pages = list(PAGES[1])
    for start in range(0, 70, 16):
        # What lies further back than 24 positions goes, and is spoilt.
        pages[: max(0, start + 1 - 24) // 16] = [-1] * (max(0, start + 1 - 24) // 16)
        part = Chunk(
            1, -1, prompt[start : start + 16], start, start + 16 >= 70, REQUESTS[1][2], 1,
            prompt=70, pages=pages,
        )  # fmt: skip
        state, sampled = engine.prefill(bank, state, [part])
        got = [int(sampled.token[0])]
    assert pages.count(-1) == 2
    state = replace(
        state, cache=jax.tree.map(lambda x: x.at[jnp.array(PAGES[1][:2])].set(jnp.nan), state.cache)
    )
    assert answers(engine, bank, state, {1: got[0]}, engine.sizes.table({1: pages}))[1] == whole[1]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ((1, 2), "2 pages for 41 tokens; expected 3 to 6"),
        ((1, 2, 20), "a page is outside 0 to 19"),
        ((1, 2, -2), "a page is outside 0 to 19"),
        (range(7), "7 pages for 41 tokens"),
    ],
)
def test_bad_pages_are_refused(engine, bank, pages, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.prefill(bank, engine.init_state(), [Chunk(0, 0, [1] * 41, pages=pages)])
    small = replace(SIZES, pages=8)
    with pytest.raises(ValueError, match="3 rows of 6 pages have not each their own"):
        small.fixed_table()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_size": 24}, "page_size is 24; expected a multiple of 16"),
        ({"page_size": 0}, "page_size is 0"),
        ({"pages": 5}, "there are 5 pages of 16 tokens; a request of max_length 96 needs 6"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'; expected one of float32"),
    ],
)
def test_bad_sizes_are_refused(sizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SIZES, **sizes)
