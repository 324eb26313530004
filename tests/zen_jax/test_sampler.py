"""The choice of a token against NumPy, step by step, and what its noise depends on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax import sampler
from zen_jax.sampler import RowSampling, Sampled
from zen_jax.sampling import SamplingParams

FREE = SamplingParams(max_tokens=1000)
GREEDY = replace(FREE, temperature=0)
SAMPLE = jax.jit(sampler.sample)
COUNT = jax.jit(sampler.count_tokens)
LONGEST = 64


class Row:
    """A request half-way: what it asks for, its prompt, its answer so far."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (1,),
        answer: Sequence[int] = (),
        stops: Sequence[int] = (),
        seed: int = 7,
        sample: int = 0,
    ) -> None:
        self.params, self.prompt, self.answer = params, list(prompt), list(answer)
        self.stops, self.seed, self.sample = frozenset(stops), seed, sample

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.answer)

    def settings(self) -> RowSampling:
        return RowSampling.of(
            self.params,
            self.seed,
            prompt=len(self.prompt),
            stops=self.stops | set(self.params.stop_token_ids),
            sample=self.sample,
        )


def batch(rows: Sequence[Row], vocab: int) -> tuple[RowSampling, jax.Array]:
    """Settings and counts of some rows, as an engine makes them."""
    each = [row.settings() for row in rows]
    settings = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
    seen = sampler.init_seen(len(rows), vocab)
    for i, row in enumerate(rows):
        tokens, made, at = (
            np.zeros(LONGEST, np.int32),
            np.zeros(LONGEST, bool),
            np.full(LONGEST, -1),
        )
        tokens[: row.position] = [*row.prompt, *row.answer]
        made[len(row.prompt) : row.position] = True
        at[: row.position] = i
        seen = COUNT(seen, settings, at.astype(np.int32), tokens, made)
    return settings, seen


def choose(logits: np.ndarray, rows: Sequence[Row]) -> Sampled:
    """One step over some rows, beside rows that ask for nothing if there are fewer than 8."""
    padded = [*rows, *[Row(GREEDY)] * (8 - len(rows))]
    logits = np.concatenate([logits, np.zeros((8 - len(rows), logits.shape[1]))])
    settings, seen = batch(padded, logits.shape[1])
    positions = np.array([row.position for row in padded], np.int32)
    got = SAMPLE(logits.astype(np.float32), settings, seen, positions)
    return jax.tree.map(lambda a: np.asarray(a)[: len(rows)], got)


# The oracle: one row, float64, loops, in vLLM's order.


def changed(logits: np.ndarray, row: Row) -> np.ndarray:
    """Logits after min_tokens, biases and penalties."""
    params, x = row.params, logits.astype(np.float64).copy()
    if len(row.answer) < params.min_tokens:
        for token in {*row.stops, *params.stop_token_ids}:
            x[token] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*row.prompt, *row.answer}:
        if x[token] > 0:
            x[token] /= params.repetition_penalty
        else:
            x[token] *= params.repetition_penalty
    for token in row.answer:
        x[token] -= params.frequency_penalty
    for token in set(row.answer):
        x[token] -= params.presence_penalty
    return x


def probabilities(logits: np.ndarray, row: Row) -> np.ndarray:
    """What a draw has to follow."""
    params, x = row.params, changed(logits, row)
    if params.temperature < 1e-5:
        return np.eye(len(x))[int(x.argmax())]
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        total = 0.0
        for i in order:
            p[i], total = (p[i] if total < params.top_p else 0.0), total + p[i]
    return p / p.sum()


EACH = {
    "plain": FREE,
    "cold": replace(FREE, temperature=0.5),
    "all": replace(FREE, top_k=-1),
    "top_k": replace(FREE, top_k=3),
    "top_k of 1": replace(FREE, top_k=1),
    "top_p": replace(FREE, top_p=0.7),
    "top_p of the rest": replace(FREE, top_k=6, top_p=0.6, temperature=1.5),
    "min_p": replace(FREE, min_p=0.2),
    "all filters": replace(FREE, min_p=0.05, top_k=7, top_p=0.9, temperature=1.3),
    "repetition": replace(FREE, repetition_penalty=1.8),
    "reward": replace(FREE, repetition_penalty=0.6),
    "presence": replace(FREE, presence_penalty=1.5),
    "frequency": replace(FREE, frequency_penalty=0.8),
    "encouraged": replace(FREE, presence_penalty=-1.0, frequency_penalty=-0.5),
    "bias": replace(FREE, logit_bias={0: 3.0, 4: -100.0, 5: 0.5}),
    "min_tokens": replace(FREE, min_tokens=6, stop_token_ids=(3,)),
    "min_tokens are over": replace(FREE, min_tokens=5, stop_token_ids=(3,)),
    "everything": replace(
        FREE,
        temperature=0.9,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={1: 1.0, 2: 2.0},
        min_tokens=9,
    ),
}
LOGITS = np.random.default_rng(4).normal(0, 1.5, 12).astype(np.float32)
PROMPT, ANSWER, STOPS = (1, 2, 2, 8), (5, 6, 5, 8, 5), (9,)


@pytest.mark.parametrize("name", EACH)
def test_shares_follow_the_oracle(name: str) -> None:
    """4,000 draws at as many positions beyond the answer's, all but the last in other rows."""
    draws = 4000
    row = Row(EACH[name], PROMPT, ANSWER, STOPS)
    settings, seen = batch([row], LOGITS.size)
    settings, seen = (jax.tree.map(lambda a: jnp.repeat(a, draws, 0), x) for x in (settings, seen))
    keys = jnp.arange(draws, dtype=jnp.int32)  # other samples, so that the position is the same
    settings = replace(settings, whole=settings.whole.at[:, 3].set(keys))
    positions = jnp.full((draws,), row.position, jnp.int32)
    tokens = SAMPLE(jnp.tile(LOGITS, (draws, 1)), settings, seen, positions).token
    got = np.bincount(np.asarray(tokens), minlength=LOGITS.size) / draws
    want = probabilities(LOGITS, row)
    np.testing.assert_allclose(got, want, atol=4 * 0.5 / np.sqrt(draws))
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("name", EACH)
def test_greedy_takes_the_likeliest_of_the_changed_logits(name: str) -> None:
    rng = np.random.default_rng(len(name))
    rows = [
        Row(replace(EACH[name], temperature=0), rng.integers(0, 300, 9), rng.integers(0, 300, n))
        for n in range(8)
    ]
    logits = rng.normal(0, 2, (8, 300)).astype(np.float32)
    got = choose(logits, rows)
    want = [changed(x, row).argmax() for x, row in zip(logits, rows, strict=True)]
    assert got.token.tolist() == want


def test_each_change_of_the_logits_is_the_oracles() -> None:
    rng = np.random.default_rng(1)
    rows = [
        Row(params, rng.integers(0, 40, 12), rng.integers(0, 40, 3 * i), (7, 11))
        for i, params in enumerate(EACH.values())
    ]
    logits = rng.normal(0, 3, (len(rows), 40)).astype(np.float32)
    settings, seen = batch(rows, 40)
    positions = jnp.array([row.position for row in rows])
    got = jax.jit(sampler._change)(logits, settings, seen, positions)
    want = [changed(x, row) for x, row in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [5, 300, 2000])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_the_likeliest_are_exact_with_ties_and_beyond_the_candidates(
    size: int, spread: float
) -> None:
    rng = np.random.default_rng(size)
    cases = [(k, p) for k in (0, 1, 2, 255, 256, 257, 1500) for p in (1e-6, 0.3, 0.9, 0.9999, 1.0)]
    x = np.round(rng.normal(0, spread, (len(cases), size)), 1).astype(np.float32)  # many ties
    k, p = (np.array(column) for column in zip(*cases, strict=True))
    got = jax.jit(sampler._likeliest)(x, k.astype(np.int32), p.astype(np.float32))
    for row, (top_k, top_p) in enumerate(cases):
        wanted = Row(SamplingParams(top_k=top_k, top_p=top_p), ())
        want = probabilities(x[row], wanted) > 0
        kept = np.isfinite(np.asarray(got[row]))
        off = np.flatnonzero(kept != want)
        # The sums of float32 may end a token earlier or later: only at the edge, and only one.
        assert len(off) <= (1 if 0 < top_p < 1 else 0), (top_k, top_p, off)
        assert (got[row][kept] == x[row][kept]).all()


def test_min_p_leaves_what_is_near_the_likeliest() -> None:
    x = np.log(np.array([[0.5, 0.26, 0.24], [0.5, 0.26, 0.24]], np.float32))
    got = np.isfinite(np.asarray(sampler._min_p(jnp.asarray(x), jnp.array([0.5, 0.0]))))
    assert got.tolist() == [[True, True, False], [True, True, True]]


# What a row's choice depends on.


@pytest.fixture(scope="module")
def company() -> tuple[np.ndarray, list[Row], list[int]]:
    """Rows that ask for all sorts of things, and what each takes when it is alone."""
    rng = np.random.default_rng(2)
    rows = [
        Row(params, rng.integers(0, 300, 9), rng.integers(0, 300, i), (3,), i % 3)
        for i, params in enumerate(
            [*EACH.values(), *(replace(p, temperature=0) for p in EACH.values())]
        )
    ]
    logits = rng.normal(0, 1, (len(rows), 300)).astype(np.float32)
    alone = [int(choose(x[None], [row]).token[0]) for x, row in zip(logits, rows, strict=True)]
    return logits, rows, alone


def test_a_row_takes_the_same_token_in_any_row_of_any_batch(company: Any) -> None:
    logits, rows, alone = company
    for seed in range(6):
        order = np.random.default_rng(seed).permutation(len(rows))[:8]
        got = choose(logits[order], [rows[i] for i in order])
        assert got.token.tolist() == [alone[i] for i in order]


def test_a_few_rows_of_a_batch_take_what_they_take_in_it(company: Any) -> None:
    """As when the prompts of some rows end, of the counts of all."""
    logits, rows, alone = company
    settings, seen = batch(rows, logits.shape[1])
    for at in (np.array([16, 9, 30], np.int32), np.array([11, 17, 2], np.int32)):
        positions = np.array([rows[i].position for i in at], np.int32)
        some = RowSampling(settings.reals[at], settings.whole[at])
        got = SAMPLE(logits[at], some, seen, positions, at)
        assert got.token.tolist() == [alone[i] for i in at]


def test_a_row_depends_on_seed_sample_and_position() -> None:
    logits = np.zeros((1, 300), np.float32)
    row = Row(FREE, (1, 2), seed=5)
    others = [
        Row(FREE, (1, 2), seed=6),
        Row(FREE, (1, 2), seed=5 + 2**40),
        Row(FREE, (1, 2), seed=5, sample=1),
        Row(FREE, (1, 2), seed=5, sample=2),
        Row(FREE, (1, 2), (3,), seed=5),
    ]
    tokens = [int(choose(logits, [r]).token[0]) for r in [row, *others]]
    assert len(set(tokens)) == len(tokens)
    assert tokens[0] == int(choose(logits, [Row(FREE, (9, 9), seed=5)]).token[0])


def test_the_key_is_seed_then_sample_then_position() -> None:
    """The contract, worked out beside the code; with one block, its share decides nothing."""
    logits = np.random.default_rng(0).normal(0, 1, (1, 100)).astype(np.float32)
    row = Row(FREE, (1,) * 11, seed=3, sample=4)
    key = jax.random.wrap_key_data(jnp.array([0, 3], jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, 4), 11)
    noise = jax.random.gumbel(key, (1 + 128,))[1:101]
    assert int(choose(logits, [row]).token[0]) == int(jnp.argmax(logits[0] + noise))


def test_temperature_0_takes_the_first_of_the_likeliest() -> None:
    logits = np.zeros((2, 300), np.float32)
    logits[:, [200, 130, 290]] = 3.0
    rows = [Row(GREEDY), Row(replace(FREE, temperature=1e-6, top_k=5))]
    assert choose(logits, rows).token.tolist() == [130, 130]


# Counts and ends.


def test_counts_leave_other_rows_alone_and_start_afresh() -> None:
    penalised = replace(FREE, repetition_penalty=1.1)
    settings, seen = batch([Row(penalised, (4, 4, 5), (5, 6, 6)), Row(FREE, (4,), (4,))], 10)
    assert seen[0].tolist() == [0, 0, 0, 0, 1, 3, 4, 0, 0, 0]
    assert not seen[1].any(), "nothing is counted without penalties"
    nowhere = jnp.array([-1, 2, 7])
    assert (COUNT(seen, settings, nowhere, jnp.array([1, 2, 3]), nowhere > 0) == seen).all()
    assert (sampler.clear_counts(seen, nowhere) == seen.at[2:].set(0)).all()
    assert not sampler.clear_counts(seen, jnp.array([0])).any()


def test_counting_again_after_a_row_was_taken_away_gives_the_same() -> None:
    """In chunks of other lengths, in another row."""
    row = Row(replace(FREE, frequency_penalty=1.0), (1, 2, 3, 2), (2, 4, 4, 1, 0))
    _, want = batch([row], 6)
    settings, seen = batch([Row(FREE), Row(FREE), row], 6)
    seen = sampler.clear_counts(seen, jnp.array([2]))
    tokens = jnp.array([*row.prompt, *row.answer])
    made = jnp.arange(9) >= 4
    for part in (slice(0, 3), slice(3, 6), slice(6, 9)):
        at = jnp.full_like(tokens[part], 2)
        seen = COUNT(seen, settings, at, tokens[part], made[part])
    assert seen[2].tolist() == want[0].tolist()


def test_rows_that_do_not_run_ask_for_nothing() -> None:
    settings, _ = batch([Row(p, PROMPT, ANSWER) for p in EACH.values()], 12)
    none = settings.only(jnp.zeros(len(EACH), bool))
    empty = RowSampling.empty(len(EACH))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), none, empty))
    one = settings.only(jnp.arange(len(EACH)) == 3)
    assert (one.whole[3] == settings.whole[3]).all() and one.top_k.sum() == settings.top_k[3] == 3


def test_an_answer_ends_at_a_stop_token_or_its_last() -> None:
    logits = np.zeros((5, 300), np.float32)
    logits[:, 3] = 1.0
    short = replace(GREEDY, max_tokens=3)
    rows = [
        Row(short, (1, 2), (4,)),
        Row(short, (1, 2), (4, 4)),
        Row(GREEDY, (1, 2), (4,), stops=(7, 3)),
        Row(replace(GREEDY, stop_token_ids=(3,)), (1, 2)),
        Row(replace(GREEDY, max_tokens=2**31 - 1), (1, 2)),
    ]
    assert choose(logits, rows).ended.tolist() == [False, True, True, True, False]


def test_an_answer_ends_where_there_is_no_more_room() -> None:
    row = RowSampling.of(GREEDY, 0, prompt=10, stops=set(), end=12)
    logits, seen = np.zeros((1, 300), np.float32), sampler.init_seen(1, 300)
    ended = [bool(SAMPLE(logits, row, seen, np.array([at], np.int32)).ended[0]) for at in (10, 11)]
    assert ended == [False, True]


def test_too_many_ends_are_refused() -> None:
    with pytest.raises(ValueError, match="129 tokens end the answer; expected 128"):
        RowSampling.of(FREE, 0, prompt=1, stops=set(range(129)))


# Log-probabilities.


def test_logprobs_are_of_the_raw_logits() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (3, 300)).astype(np.float32)
    row = Row(replace(EACH["everything"], logprobs=0), PROMPT, ANSWER)
    got = choose(logits, [row, Row(FREE), Row(GREEDY)])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    own = exact[np.arange(3), np.asarray(got.token)]
    np.testing.assert_allclose(got.logprobs.own, own, atol=1e-5)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :20]
    assert np.array_equal(got.logprobs.top_ids, order)
    np.testing.assert_allclose(got.logprobs.top, np.take_along_axis(exact, order, 1), atol=1e-5)
    without = choose(logits, [Row(FREE)] * 3)
    assert not without.logprobs.own.any() and not without.logprobs.top.any()


def test_a_small_vocabulary_has_fewer_likeliest() -> None:
    got = choose(np.zeros((1, 7), np.float32), [Row(replace(GREEDY, logprobs=20))])
    assert got.logprobs.top_ids.tolist() == [list(range(7))]
    np.testing.assert_allclose(got.logprobs.top, np.full((1, 7), -np.log(7)), atol=1e-6)


@pytest.mark.parametrize("length", [5, 16, 37])
def test_a_prompts_logprobs_are_those_of_a_full_forward(length: int) -> None:
    rng = np.random.default_rng(length)
    hidden = rng.normal(0, 1, (2, length, 6)).astype(np.float32)
    head = rng.normal(0, 1, (6, 50)).astype(np.float32)
    targets = rng.integers(0, 50, (2, length)).astype(np.int32)
    got = jax.jit(lambda h, t: sampler.prompt_logprobs(lambda x: x @ head, h, t))(hidden, targets)
    exact = hidden.astype(np.float64) @ head
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    own = np.take_along_axis(exact, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(got.own, own, atol=1e-5)
    order = np.argsort(-exact, axis=-1, kind="stable")[..., :20]
    assert np.array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top, np.take_along_axis(exact, order, -1), atol=1e-5)


# What a plain step does not do.


def branches(rows: Sequence[Row], vocab: int) -> str:
    """The operations outside all conditions of the program."""
    settings, seen = batch(rows, vocab)
    positions = jnp.zeros((len(rows),), jnp.int32)
    args = (jnp.zeros((len(rows), vocab)), settings, seen, positions)
    equations = jax.make_jaxpr(sampler.sample)(*args).eqns
    return " ".join(str(e.primitive) for e in equations)


def test_a_step_sorts_and_draws_only_inside_conditions() -> None:
    outside = branches([Row(FREE)], 300)
    assert "cond" in outside
    for costly in ("sort", "top_k", "scatter", "random_bits", "threefry2x32", "exp"):
        assert costly not in outside.split()
