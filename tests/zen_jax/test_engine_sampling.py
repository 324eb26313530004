"""Penalties, log-probabilities and ends through the engine: in chunks, again, in any company."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.delta.apply import materialise
from zen_jax.delta.bank import BankSchema
from zen_jax.engine import Engine, EngineConfig, place_params
from zen_jax.engine_state import BASE_SLOT, Chunk
from zen_jax.layout import fuse_delta
from zen_jax.model import make_forward
from zen_jax.sampling import SamplingParams
from zen_jax.sharding import Placement, make_mesh

ROWS, MADE = 4, 9
PROMPT = [3, 9, 3, 27, 41, 5, 5, 60, 12, 33, 2]
GREEDY = SamplingParams(
    temperature=0.0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=1.1
)
HOT = replace(GREEDY, temperature=1.2, min_p=0.01, top_p=0.97, logit_bias={7: 2.0, 5: -100.0})


def make(config: Any, base: Any, mesh: Any = None) -> Engine:
    sizes = EngineConfig(rows=ROWS, max_length=32, chunk_tokens=16, max_steps=4)
    placed = place_params(config, base, None if mesh is None else Placement.of(config, mesh))
    return Engine(placed, sizes, BankSchema.covering(config, 2), mesh)


def fill(engine: Engine, make_variant: Any) -> Any:
    bank = engine.init_bank()
    for slot in range(2):
        bank = engine.write_slot(bank, slot, engine.stage(make_variant(slot)))
    return bank


@pytest.fixture(scope="module")
def engine(config: Any, base: Any) -> Engine:
    return make(config, base)


@pytest.fixture(scope="module")
def bank(engine: Engine, make_variant: Any) -> Any:
    return fill(engine, make_variant)


def run(
    engine: Engine, bank: Any, chunk: Chunk, *others: Chunk, size: int = 16, made: int = MADE
) -> tuple[list[int], dict[str, list[Any]]]:
    """Tokens of one request beside others, its prompt read in parts; and its log-probabilities."""
    state, told = engine.init_state(), {"own": [], "top": [], "prompt": []}
    for other in others:
        for part in other.cut(16):
            state, _ = engine.prefill(bank, state, [part])
    tokens: list[int] = []
    for part in chunk.cut(size):
        state, sampled = engine.prefill(bank, state, [part])
        assert sampled.prompt is not None
        told["prompt"] += np.asarray(sampled.prompt.own)[0, : len(part.targets)].tolist()
        if part.last:
            tokens.append(int(sampled.token[0]))
            told["own"].append(float(sampled.logprobs.own[0]))
            told["top"].append(np.asarray(sampled.logprobs.top)[0])
    while len(tokens) < made:
        state, sampled = engine.decode(bank, state, 4)
        new = np.asarray(sampled.token)[:, chunk.row]
        tokens += new[new >= 0].tolist()
        told["own"] += np.asarray(sampled.logprobs.own)[new >= 0, chunk.row].tolist()
        told["top"] += list(np.asarray(sampled.logprobs.top)[new >= 0, chunk.row])
        if (new < 0).any():
            break
    return tokens[:made], told


def logits_of(config: Any, base: Any, deltas: Any, sequence: list[int]) -> np.ndarray:
    """A full forward of the weights made whole, float64[T, V]."""
    params = jax.tree.map(lambda w: w.astype(jnp.float32), base)
    if deltas is not None:
        params = materialise(base, fuse_delta(config, deltas))
    return np.asarray(make_forward(config)(params, jnp.array([sequence])), np.float64)[0]


@pytest.fixture(scope="module")
def whole(engine: Engine, bank: Any) -> list[int]:
    return run(engine, bank, Chunk(1, 0, PROMPT, sampling=HOT, seed=3))[0]


def test_greedy_with_penalties_follows_a_full_forward(
    config, base, make_variant, engine, bank
) -> None:
    got, _ = run(engine, bank, Chunk(2, 0, PROMPT, sampling=GREEDY))
    logits = logits_of(config, base, make_variant(0), [*PROMPT, *got[:-1]])[len(PROMPT) - 1 :]
    for i, x in enumerate(logits):
        for token in {*PROMPT, *got[:i]}:
            x[token] = x[token] / 1.4 if x[token] > 0 else x[token] * 1.4
        for token in set(got[:i]):
            x[token] -= 0.7 + 1.1 * got[:i].count(token)
        assert got[i] == x.argmax()
    plain, _ = run(engine, bank, Chunk(2, 0, PROMPT, sampling=replace(HOT, temperature=0)))
    bare, _ = run(engine, bank, Chunk(2, 0, PROMPT, sampling=SamplingParams(temperature=0)))
    assert plain != bare != got


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("row", [0, 3])
def test_the_row_and_the_parts_do_not_matter(engine, bank, whole, size: int, row: int) -> None:
    others = [Chunk((row + i) % ROWS, i - 2, PROMPT[i:], sampling=s) for i, s in OTHERS]
    got, _ = run(engine, bank, Chunk(row, 0, PROMPT, sampling=HOT, seed=3), *others, size=size)
    assert got == whole


OTHERS = [
    (1, GREEDY),
    (2, SamplingParams(temperature=1.0, top_k=5, logprobs=3)),
    (3, SamplingParams(temperature=0)),
]


@pytest.mark.parametrize("lost", [1, 4, 8])
def test_a_row_that_was_taken_away_goes_on_as_if_it_had_not(engine, bank, whole, lost: int) -> None:
    """Its prompt and what it made are read again, in another row that others used before."""
    state = engine.init_state()
    used = Chunk(2, 1, PROMPT[::-1], sampling=GREEDY)
    state, _ = engine.prefill(bank, state, [used])
    again = Chunk(2, 0, [*PROMPT, *whole[:lost]], sampling=HOT, seed=3, prompt=len(PROMPT))
    tokens = whole[:lost]
    for part in again.cut(5):
        state, sampled = engine.prefill(bank, state, [part])
        if part.last:
            tokens.append(int(sampled.token[0]))
    while len(tokens) < MADE:
        state, sampled = engine.decode(bank, state, 1)
        tokens.append(int(sampled.token[0, 2]))
    assert tokens == whole


def test_logprobs_are_those_of_a_full_forward(config, base, make_variant, engine, bank) -> None:
    """Of chosen tokens by raw logits though penalties change them, and of prompts in any parts.

    Steps of a variant over a base in bfloat16 have products with signs in 8 bits.
    """
    for slot, deltas, close in ((BASE_SLOT, None, 1e-3), (1, make_variant(1), 0.05)):
        asks = replace(HOT, logprobs=5, prompt_logprobs=0)
        chunk = Chunk(0, slot, PROMPT, sampling=asks, seed=5, targets=PROMPT[1:])
        tokens, told = run(engine, bank, chunk)
        exact = logits_of(config, base, deltas, [*PROMPT, *tokens[:-1]])
        exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
        judged, made = exact[: len(PROMPT) - 1], exact[len(PROMPT) - 1 :]
        own = made[np.arange(MADE), tokens]
        np.testing.assert_allclose(told["own"][:MADE], own, atol=close)
        top = -np.sort(-made, axis=-1)[:, :20]
        np.testing.assert_allclose(told["top"][:MADE], top, atol=close)
        prompt = judged[np.arange(len(PROMPT) - 1), PROMPT[1:]]
        np.testing.assert_allclose(told["prompt"], prompt, atol=close)
        for size in (1, 4):
            _, parts = run(engine, bank, chunk, size=size, made=1)
            np.testing.assert_allclose(parts["prompt"], prompt, atol=close)


def test_no_logprobs_come_unless_asked_for(engine, bank) -> None:
    _, told = run(engine, bank, Chunk(0, 0, PROMPT, sampling=HOT))
    assert not np.any(told["own"]) and not np.any(told["top"])


def test_min_tokens_keep_the_end_away(engine, bank, whole) -> None:
    stop = Chunk(0, 0, PROMPT, sampling=HOT, seed=3, stops=[whole[0]])
    assert run(engine, bank, stop)[0] == whole[:1]
    later = replace(HOT, min_tokens=4)
    got, _ = run(engine, bank, replace(stop, sampling=later))
    assert whole[0] not in got[:4] and len(got) > 4


def test_too_many_ends_are_refused(engine, bank) -> None:
    chunk = Chunk(0, 0, PROMPT, stops=range(129))
    with pytest.raises(ValueError, match="129 tokens end the answer; expected 128 at most"):
        engine.prefill(bank, engine.init_state(), [chunk])


def test_samples_differ_and_are_the_same_again(engine, bank, whole) -> None:
    each = [
        run(engine, bank, Chunk(1, 0, PROMPT, sampling=HOT, seed=3, sample_index=i))[0]
        for i in (0, 1, 2, 1)
    ]
    assert each[0] == whole and each[1] == each[3]
    assert len({tuple(tokens) for tokens in each}) == 3


def test_a_mesh_gives_the_same_with_all_that_can_be_asked_for(
    config, base, make_variant, devices
) -> None:
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), base)
    asks = replace(HOT, top_k=9, logprobs=2, prompt_logprobs=2)
    chunk = Chunk(1, 0, PROMPT, sampling=asks, seed=3, targets=PROMPT[1:])
    got = []
    for mesh in (None, make_mesh(4, 2)):
        engine = make(config, exact, mesh)
        got.append(run(engine, fill(engine, make_variant), chunk))
    assert got[0][0] == got[1][0]
    for name in ("own", "top", "prompt"):
        np.testing.assert_allclose(got[0][1][name], got[1][1][name], atol=1e-3)
