"""The engine: any company, any form of the variant, any number of devices, the same tokens."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.delta.apply import bind, materialise
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.engine_state import Chunk
from zen_jax.layout import fuse_delta
from zen_jax.model import make_forward
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement, make_mesh

ROWS, STEPS, VARIANTS = 6, 8, 4
SIZES = EngineConfig(rows=ROWS, max_length=32, chunk_tokens=64, max_steps=4, page_size=16)
GREEDY, HOT = SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=20, top_p=0.95)
# (slot, prompt, sampling, seed) of each row; the last rows share a variant and differ in seed
REQUESTS = [
    (-1, [1, 2, 3], GREEDY, 0),
    (0, [1, 2, 3], GREEDY, 0),
    (1, [4] * 11, HOT, 1),
    (2, [9], HOT, 2),
    (3, [5, 6, 7, 8, 9, 10, 11, 12], HOT, 3),
    (3, [5, 6, 7, 8, 9, 10, 11, 12], HOT, 4),
]


def make_engine(config, base, mesh=None) -> Engine:
    placed = place_params(config, base, None if mesh is None else Placement.of(config, mesh))
    return Engine(placed, SIZES, BankSchema.covering(config, VARIANTS), mesh)


def fill_bank(engine: Engine, make_variant) -> Any:
    bank = engine.init_bank()
    for slot in range(VARIANTS):
        bank = engine.write_slot(bank, slot, engine.stage(make_variant(slot)))
    return bank


def generate(engine: Engine, bank: Any, requests: dict[int, tuple], steps: int = STEPS):
    """Runs requests in the rows given; returns tokens [rows, steps + 1], -1 in other rows."""
    state = engine.init_state()
    tokens = [np.full(ROWS, -1)]
    for row, request in requests.items():
        state, tokens[0][row] = engine.enter(bank, state, row, *request)
    for _ in range(steps):
        state, new = engine.decode(bank, state)
        tokens.append(np.asarray(new.token)[0])
    return np.stack(tokens, axis=1)


@pytest.fixture(scope="module")
def engine(config, base) -> Engine:
    return make_engine(config, base)


@pytest.fixture(scope="module")
def bank(engine: Engine, make_variant) -> Any:
    return fill_bank(engine, make_variant)


@pytest.fixture(scope="module")
def mixed(engine: Engine, bank: Any) -> np.ndarray:
    return generate(engine, bank, dict(enumerate(REQUESTS)))


@pytest.mark.parametrize("row", range(ROWS))
def test_a_mixed_batch_equals_solo_runs(engine, bank, mixed, row: int) -> None:
    alone = generate(engine, bank, {row: REQUESTS[row]})
    assert np.array_equal(alone[row], mixed[row])
    elsewhere = generate(engine, bank, {(row + 1) % ROWS: REQUESTS[row]})
    assert np.array_equal(elsewhere[(row + 1) % ROWS], mixed[row])


def test_rows_differ_where_they_should(mixed) -> None:
    assert not np.array_equal(mixed[0], mixed[1]), "a variant is not the base"
    assert not np.array_equal(mixed[4], mixed[5]), "another seed, other tokens"


def test_a_row_joins_and_leaves_at_any_step(engine, bank, mixed) -> None:
    state = engine.init_state()
    state, _ = engine.enter(bank, state, 0, *REQUESTS[4])
    state, _ = engine.decode(bank, state, 3)
    state, first = engine.enter(bank, state, 5, *REQUESTS[2])
    got = [first]
    for step in range(STEPS):
        rows = [5] if step in (4, 5) else None
        if step == 6:
            state, _ = engine.enter(bank, state, 0, *REQUESTS[1])
        state, sampled = engine.decode(bank, state, rows=rows)
        got.append(int(sampled.token[0, 5]))
    assert got == mixed[2].tolist()


def test_steps_in_one_call_are_steps_one_by_one(engine, bank, mixed) -> None:
    state = engine.init_state()
    for row, request in enumerate(REQUESTS):
        state, _ = engine.enter(bank, state, row, *request)
    parts = []
    for steps in (3, 1, 4):
        state, sampled = engine.decode(bank, state, steps)
        tokens = np.asarray(sampled.token)
        assert (tokens[steps:] == -1).all()
        parts.append(tokens[:steps])
    assert np.array_equal(np.concatenate(parts).T, mixed[:, 1:])
    assert np.asarray(state.lengths).tolist() == [len(r[1]) + STEPS for r in REQUESTS]


def test_the_device_stops_a_row_at_its_stop_tokens_and_its_end(engine, bank, mixed) -> None:
    prompt = len(REQUESTS[2][1])
    third = int(mixed[2, 2])
    count = mixed[2].tolist().index(third) + 1
    state = engine.init_state()
    state, _ = engine.enter(bank, state, 2, *REQUESTS[2], stops=[63, third])
    state, first = engine.enter(bank, state, 4, *REQUESTS[4], end=len(REQUESTS[4][1]) + 3)
    state, _ = engine.enter(bank, state, 0, *REQUESTS[0])
    got = []
    for _ in range(2):
        state, sampled = engine.decode(bank, state, 4)
        got.append(np.asarray(sampled.token))
    got = np.concatenate(got)
    assert got[: count - 1, 2].tolist() == mixed[2, 1:count].tolist()
    assert (got[count - 1 :, 2] == -1).all()
    assert [first, *got[:2, 4].tolist()] == mixed[4, :3].tolist() and (got[2:, 4] == -1).all()
    assert np.array_equal(got[:, 0], mixed[0, 1:]), "others go on"
    assert np.asarray(state.active).tolist() == [True, *[False] * 5]
    assert int(state.lengths[2]) == prompt + count - 1, "nothing is written behind the stop"
    state, first = engine.enter(bank, state, 1, *REQUESTS[1], stops=[int(mixed[1, 0])])
    assert first == mixed[1, 0] and not state.active[1], "the first token may be the last"


def test_greedy_rows_follow_a_full_forward_of_the_materialised_variant(
    config, base, make_variant, mixed
) -> None:
    forward = jax.jit(make_forward(config))
    for row, deltas in ((0, None), (1, make_variant(0))):
        params = jax.tree.map(lambda w: w.astype(jnp.float32), base)
        if deltas is not None:
            params = materialise(base, fuse_delta(config, deltas))
        sequence = REQUESTS[row][1] + mixed[row, :-1].tolist()
        logits = np.asarray(forward(params, jnp.array([sequence])))[0]
        want = logits[len(REQUESTS[row][1]) - 1 :].argmax(-1)
        assert np.array_equal(want, mixed[row])


def test_one_variants_tree_equals_the_materialised_and_swapping_compiles_nothing(
    config, base, make_variant
) -> None:
    forward: Any = jax.jit(make_forward(config))
    tokens = jnp.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    for seed in range(3):
        tree = jax.device_put(fuse_delta(config, make_variant(seed)))
        got = forward(bind(base, tree), tokens)
        want = make_forward(config)(materialise(base, tree), tokens)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert forward._cache_size() == 1


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """Everything that XLA compiles meanwhile, the engine's or not."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(kwargs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_warm_up(config, base, make_variant) -> None:
    engine = make_engine(config, base)
    told: list[tuple[str, int, int]] = []
    engine.warm_up(lambda *what: told.append(what))
    programs = len(SIZES.shapes) + 2
    assert [what[1:] for what in told] == [(i + 1, programs) for i in range(programs)]
    assert {what[0] for what in told} >= {"decode", "write a slot", "prefill 4 x 16"}
    bank = fill_bank(engine, make_variant)
    engine.init_state()
    before = engine.compiles
    with compiled_programs() as seen:
        generate(engine, bank, dict(enumerate(REQUESTS)))
        state = engine.init_state()
        many = [Chunk(row, row % 3 - 1, [row + 1] * (row + 1)) for row in range(4)]
        state, _ = engine.prefill(bank, state, many)
        bank = engine.write_slot(bank, 2, engine.stage(make_variant(9)))
        engine.decode(bank, state, 3, [0, 2])
    assert seen == [] and before == engine.compiles == programs
    with compiled_programs() as seen:  # the listener listens
        jax.jit(lambda x: x * 3)(jnp.zeros(7))
    assert seen


# Chunks: a prompt in parts, parts of several in one call.

LONG = [int(t) for t in np.random.default_rng(7).integers(0, 64, 30)]
LONGS = [
    (-1, LONG, GREEDY, 0),
    (0, LONG[::-1], HOT, 1),
    (2, LONG[5:28], HOT, 2),
    (2, LONG[2:4], GREEDY, 3),
]


def rows_of(engine: Engine, state: Any, rows: dict[int, int]) -> list[np.ndarray]:
    """Keys and values of so many positions of these rows, of every layer."""
    return [
        np.asarray(part).reshape(engine.sizes.rows, -1, *part.shape[2:])[row, :length]
        for layer in state.cache
        for part in (layer.k, layer.v)
        for row, length in rows.items()
    ]


def read_in_parts(engine, bank, order: list[list[tuple[int, int]]], state=None, at=(0, 1, 2, 3)):
    """Reads LONGS into rows `at`, call by call of (request, tokens); returns state and tokens."""
    state = engine.init_state() if state is None else state
    done, first = [0] * len(LONGS), {}
    for call in order:
        chunks = []
        for which, size in call:
            slot, prompt, sampling, seed = LONGS[which]
            start, end = done[which], min(done[which] + size, len(prompt))
            chunks.append(
                Chunk(
                    at[which],
                    slot,
                    prompt[start:end],
                    start,
                    end == len(prompt),
                    sampling,
                    seed,
                    prompt=len(prompt),
                )
            )
            done[which] = end
        state, sampled = engine.prefill(bank, state, chunks)
        for (which, _), token in zip(call, np.asarray(sampled.token), strict=False):
            if done[which] == len(LONGS[which][1]):
                first[which] = int(token)
            else:
                assert token == -1
    return state, [first[i] for i in range(len(LONGS))]


ALONE = [[(0, 16)], [(0, 16)], [(1, 16)], [(1, 16)], [(2, 16)], [(2, 16)], [(3, 16)]]


@pytest.mark.parametrize(
    "order",
    [
        [[(0, 16), (1, 16), (2, 16), (3, 16)], [(0, 16), (1, 16), (2, 16)]],
        [[(2, 5), (0, 1), (1, 15)], [(1, 15), (0, 13)], [(0, 16), (2, 16)], [(2, 16), (3, 2)]],
        [[(which, 1)] for which in range(4) for _ in LONGS[which][1]],
    ],
    ids=["together", "by fits and starts", "token by token"],
)
def test_however_prompts_are_cut_and_mixed_their_cache_and_first_tokens_are_the_same(
    engine, bank, order
) -> None:
    """To the last bits: XLA sums a norm in another order where rows are few."""
    want, tokens = read_in_parts(engine, bank, ALONE)
    got, again = read_in_parts(engine, bank, order)
    rows = {i: len(request[1]) for i, request in enumerate(LONGS)}
    for a, b in zip(rows_of(engine, got, rows), rows_of(engine, want, rows), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert tokens == again
    assert np.asarray(got.lengths)[:4].tolist() == list(rows.values())


def test_a_chunk_has_the_same_bits_in_any_row_and_company(engine, bank) -> None:
    together = [[(0, 16), (1, 16), (2, 16), (3, 16)], [(0, 16), (1, 16), (2, 16)]]
    want, tokens = read_in_parts(engine, bank, together)
    moved, again = read_in_parts(engine, bank, together, at=(3, 5, 0, 1))
    apart = [[(2, 16), (0, 16), (3, 16)], [(2, 16), (1, 16), (0, 16)], [(1, 16)]]
    mixed, _ = read_in_parts(engine, bank, apart)
    for which, request in enumerate(LONGS):
        here = rows_of(engine, want, {which: len(request[1])})
        there = rows_of(engine, moved, {(3, 5, 0, 1)[which]: len(request[1])})
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    for which, length in ((0, 30), (2, 23), (1, 16)):
        here, there = (rows_of(engine, s, {which: length}) for s in (want, mixed))
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    assert tokens == again


def test_chunks_leave_rows_that_decode_as_they_are(engine, bank, mixed) -> None:
    state = engine.init_state()
    state, first = engine.enter(bank, state, 4, *REQUESTS[4])
    got = [first]
    for call in range(4):
        state, sampled = engine.decode(bank, state)
        got.append(int(sampled.token[0, 4]))
        chunk = Chunk(2, 1, LONG[call * 5 : call * 5 + 5], call * 5, last=False)
        state, _ = engine.prefill(bank, state, [chunk])
    assert got == mixed[4, :5].tolist()
    alone = engine.prefill(bank, engine.init_state(), [Chunk(2, 1, LONG[:16], last=False)])[0]
    same = zip(rows_of(engine, state, {2: 16}), rows_of(engine, alone, {2: 16}), strict=True)
    assert all(np.array_equal(a, b) for a, b in same), "and decoding leaves them as they are"


def test_no_whole_cache_is_copied_in_any_program(monkeypatch) -> None:
    from zen_jax.config import ModelConfig
    from zen_jax.model import init_params

    wide = ModelConfig(512, 64, 128, 2, 8, 8, 8, 2048, tie_word_embeddings=True)
    base = init_params(wide, jax.random.key(0), jnp.bfloat16)
    sizes = EngineConfig(rows=16, max_length=1024, chunk_tokens=64)
    engine = Engine(base, sizes, BankSchema.covering(wide, 2))
    layer = 16 * 1024 * 8 * 8 * 4  # bytes of one layer's keys
    for key in ("decode", *sizes.shapes):
        memory = engine.programs.lowered(key).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 4 * layer
        if key != "decode":
            assert memory.temp_size_in_bytes < layer / 2, key


@pytest.fixture(scope="module")
def exact(config, base) -> Any:
    """The base in float32: over one in bfloat16 each shard has its own steps of 8 bits in the sums
    with signs, which is within the precision allowed but may turn a token that was nearly even."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), base)


@pytest.fixture(scope="module")
def exact_mixed(config, exact, make_variant) -> np.ndarray:
    engine = make_engine(config, exact)
    return generate(engine, fill_bank(engine, make_variant), dict(enumerate(REQUESTS)))


@pytest.mark.parametrize(("model", "data"), [(8, 1), (4, 2), (2, 1)])
def test_eight_devices_give_the_tokens_of_one(
    config, exact, make_variant, exact_mixed, devices, model: int, data: int
) -> None:
    """With 4 kv heads, 8-way replicates attention and shards the rest; 4- and 2-way shard all."""
    engine = make_engine(config, exact, make_mesh(model, data))
    bank = fill_bank(engine, make_variant)
    got = generate(engine, bank, dict(enumerate(REQUESTS)))
    assert np.array_equal(got, exact_mixed)
    split = "model" if model <= 4 else None
    assert bank.weights["layers"][0]["qkv"].bits.sharding.spec[2] == split
    assert bank.weights["layers"][0]["down"].bits.sharding.spec[-1] == "model"


def test_no_weight_is_gathered_on_a_mesh(config, base, make_variant, devices) -> None:
    engine = make_engine(config, base, make_mesh(4))
    text = engine.programs.lowered("decode").compile().as_text()
    gathered = [line for line in text.splitlines() if "all-gather(" in line]
    shapes = [line.split("= ")[1].split("{")[0] for line in gathered]
    assert shapes == [f"f32[{ROWS},1,{config.vocab_size}]"], "the logits, to choose tokens from"
    reduced = text.count(" all-reduce(") + text.count(" all-reduce-start(")
    assert reduced == 2 * config.num_layers + 1, "two a layer, and one for the embedding"


def test_temporaries_of_a_step_are_bounded(monkeypatch) -> None:
    """A step's temporaries stay below one weight in float32, though 4 rows mix variants."""
    from zen_jax.config import ModelConfig
    from zen_jax.model import init_params

    wide = ModelConfig(512, 1024, 2048, 1, 8, 8, 128, 64, tie_word_embeddings=True)
    base = init_params(wide, jax.random.key(0), jnp.bfloat16)
    sizes = EngineConfig(rows=4, max_length=32, chunk_tokens=16)
    engine = Engine(base, sizes, BankSchema.covering(wide, 3))
    state = engine.init_state()
    memory = engine.programs.lowered("decode").compile().memory_analysis()
    largest = 2 * 2048 * 1024  # gate_up, elements
    assert memory.temp_size_in_bytes < largest * 4 / 2
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state.cache))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(0, 4, [1]), "slot is 4"),
        (Chunk(0, -2, [1]), "slot is -2"),
        (Chunk(0, 0, []), "has 0 tokens"),
        (Chunk(0, 0, [1] * 33), "33 tokens"),
        (Chunk(0, 0, [1] * 3, start=30), "33 tokens, 3 of them"),
        (Chunk(0, 0, [1], start=-1), "expected 1 to 32"),
        (Chunk(0, 0, [64]), "outside 0 to 63"),
        (Chunk(0, 0, [-1]), "outside 0 to 63"),
        (Chunk(6, 0, [1]), "row is 6"),
        (Chunk(0, 0, [1] * 17), "chunks of \\[17\\] tokens"),
    ],
)
def test_bad_chunks_are_refused(engine, bank, chunk: Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.prefill(bank, engine.init_state(), [chunk])


def test_bad_calls_are_refused(config, base, engine, bank) -> None:
    with pytest.raises(ValueError, match="max_length is 256; the model has 128"):
        Engine(base, EngineConfig(max_length=256), BankSchema.covering(config, 1))
    with pytest.raises(ValueError, match="rows is 0"):
        EngineConfig(rows=0)
    with pytest.raises(ValueError, match="chunk_tokens is 1"):
        EngineConfig(chunk_tokens=1)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        EngineConfig(dtype="int8")
    with pytest.raises(ValueError, match="slot is 9"):
        engine.write_slot(engine.init_bank(), 9, None)
    with pytest.raises(ValueError, match="steps is 5; expected 1 to 4"):
        engine.decode(bank, engine.init_state(), 5)
    with pytest.raises(ValueError, match="of one row"):
        engine.prefill(bank, engine.init_state(), [Chunk(1, 0, [1]), Chunk(1, 0, [2])])
    with pytest.raises(ValueError, match="there are 8 devices"):
        make_mesh(16)
