"""The engine: any company, any form of the variant, any number of devices, the same tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.delta.apply import bind, materialise
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.layout import fuse_delta
from zen_jax.model import make_forward
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement, make_mesh

ROWS, STEPS, VARIANTS = 6, 8, 4
SIZES = EngineConfig(rows=ROWS, max_length=32, prefill_buckets=(8,))
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
    """Runs requests in the rows given; returns tokens [rows, steps + 1]."""
    state = engine.init_state()
    for row, (slot, prompt, sampling, seed) in requests.items():
        state = engine.insert(state, engine.prefill(bank, slot, prompt, sampling, seed), row)
    tokens = [np.asarray(state.tokens)]
    for _ in range(steps):
        state, new = engine.decode(bank, state)
        tokens.append(np.asarray(new))
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
    state = engine.insert(state, engine.prefill(bank, *REQUESTS[4]), 0)
    for _ in range(3):
        state, _ = engine.decode(bank, state)
    state = engine.insert(state, engine.prefill(bank, *REQUESTS[2]), 5)
    got = [int(state.tokens[5])]
    for step in range(STEPS):
        if step == 4:
            state = engine.release(state, 0)
        if step == 6:
            state = engine.insert(state, engine.prefill(bank, *REQUESTS[1]), 0)
        state, tokens = engine.decode(bank, state)
        got.append(int(tokens[5]))
    assert got == mixed[2].tolist()


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


def test_nothing_compiles_after_warm_up(config, base, make_variant) -> None:
    engine = make_engine(config, base)
    told: list[tuple[str, int, int]] = []
    engine.warm_up(lambda *what: told.append(what))
    assert told[-1] == ("ready", len(SIZES.buckets) + 3, len(SIZES.buckets) + 3)
    before = engine.compiles
    bank = fill_bank(engine, make_variant)
    generate(engine, bank, dict(enumerate(REQUESTS)))
    assert before == engine.compiles == len(SIZES.buckets) * 2 + 3


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
    program = engine._decode.lower(engine.params, engine.init_bank(), engine.init_state())
    text = program.compile().as_text()
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
    sizes = EngineConfig(rows=4, max_length=32, prefill_buckets=(16,))
    engine = Engine(base, sizes, BankSchema.covering(wide, 3))
    bank, state = engine.init_bank(), engine.init_state()
    memory = engine._decode.lower(base, bank, state).compile().memory_analysis()
    largest = 2 * 2048 * 1024  # gate_up, elements
    assert memory.temp_size_in_bytes < largest * 4 / 2
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state.cache))


@pytest.mark.parametrize(
    ("slot", "prompt", "message"),
    [
        (4, [1], "slot is 4"),
        (-2, [1], "slot is -2"),
        (0, [], "0 tokens"),
        (0, [1] * 33, "33 tokens"),
        (0, [64], "outside 0 to 63"),
        (0, [-1], "outside 0 to 63"),
    ],
)
def test_bad_prefills_are_refused(engine, bank, slot: int, prompt: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.prefill(bank, slot, prompt, GREEDY, 0)


def test_bad_sizes_are_refused(config, base, engine) -> None:
    with pytest.raises(ValueError, match="max_length is 256; the model has 128"):
        Engine(base, EngineConfig(max_length=256), BankSchema.covering(config, 1))
    with pytest.raises(ValueError, match="rows is 0"):
        EngineConfig(rows=0)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        EngineConfig(dtype="int8")
    with pytest.raises(ValueError, match="slot is 9"):
        engine.write_slot(engine.init_bank(), 9, None)
    with pytest.raises(ValueError, match="row is 6"):
        engine.release(engine.init_state(), 6)
    with pytest.raises(ValueError, match="there are 8 devices"):
        make_mesh(16)
