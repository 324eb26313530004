"""The choice of a token against NumPy, and what its noise depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.sampling import InvalidSampling, RowSampling, SamplingParams, sample

RUN = jax.jit(sample)
LOGITS = np.array([2.0, 0.5, 1.0, -1.0, 1.5], np.float32)


def rows(*params: tuple[SamplingParams, int]) -> RowSampling:
    """Settings of several rows."""
    each = [RowSampling.of(p, seed) for p, seed in params]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)


def drawn(params: SamplingParams, count: int = 4000) -> np.ndarray:
    """Shares of the tokens over many positions."""
    settings = jax.tree.map(lambda leaf: np.repeat(leaf, count, axis=0), RowSampling.of(params, 7))
    tokens = RUN(np.tile(LOGITS, (count, 1)), settings, np.arange(count, dtype=np.int32))
    return np.bincount(np.asarray(tokens), minlength=LOGITS.size) / count


def oracle(temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Probabilities after temperature, top_k and top_p, in float64."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k > 0:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, -1, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (1.5, 4, 0.8), (1.0, 1, 1.0)],
)
def test_shares_follow_the_oracle(temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    want = oracle(temperature, top_k, top_p)
    got = drawn(params)
    np.testing.assert_allclose(got, want, atol=4 * 0.5 / np.sqrt(4000))
    assert (got[want == 0] == 0).all()


def test_temperature_0_takes_the_first_of_the_likeliest() -> None:
    settings = rows((SamplingParams(temperature=0), 1))
    token = sample(jnp.array([[0.0, 3.0, 3.0]]), settings, jnp.array([5]))
    assert token.tolist() == [1]


def test_a_row_depends_on_seed_and_position_alone() -> None:
    logits = jnp.tile(jnp.zeros(1000), (3, 1))
    hot, cold = SamplingParams(temperature=1.0), SamplingParams(temperature=0)
    position = jnp.array([9, 9, 9])
    mixed = sample(logits, rows((hot, 5), (cold, 5), (hot, 6)), position)
    again = sample(logits, rows((cold, 1), (hot, 6), (hot, 5)), position)
    assert mixed[0] == again[2] and mixed[2] == again[1] and mixed[0] != mixed[2]
    filtered = SamplingParams(temperature=1.0, top_k=5)
    beside = sample(logits, rows((hot, 5), (filtered, 5), (cold, 6)), position)
    assert beside[0] == mixed[0]
    later = sample(logits, rows((hot, 5), (cold, 5), (hot, 6)), position + 1)
    assert later[0] != mixed[0]


def test_all_64_bits_of_a_seed_count() -> None:
    low, high = (RowSampling.of(SamplingParams(), seed).key for seed in (3, 3 + 2**40))
    assert not np.array_equal(low, high)


def test_samples_of_one_request_differ() -> None:
    row = RowSampling.of(SamplingParams(), 3)
    keys = [np.asarray(row.for_sample(jnp.int32(i)).key) for i in range(3)]
    assert len({tuple(key.ravel()) for key in keys}) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids[1]", (3, 10)),
        ("stop_token_ids[0]", (-1,)),
        ("stop_token_ids", (1,) * 65),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("logit_bias", {10: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("logit_bias[3]", {3: 101.0}),
        ("logit_bias[3]", {3: float("nan")}),
        ("logit_bias[3]", {3: float("-inf")}),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("stop", ("a",) * 17),
        ("stop[1]", ("a", "")),
        ("stop[0]", ("é" * 128 + "a",)),
        ("stop[0]", ("\ud800",)),
        ("n", 0),
        ("n", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value) -> None:
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**{field.split("[")[0]: value}).validate(vocab_size=10)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} ") and "expected" in str(caught.value)


def test_every_field_at_fault_is_told() -> None:
    params = SamplingParams(max_tokens=2, min_tokens=3, top_p=0, stop=("",), logit_bias={9: 200})
    fields = [error.field for error in params.problems()]
    assert fields == ["top_p", "min_tokens", "stop[0]", "logit_bias[9]"]


def test_the_largest_values_are_accepted() -> None:
    SamplingParams(
        max_tokens=5,
        min_tokens=5,
        stop=("é" * 128,) * 16,
        stop_token_ids=(9,) * 64,
        logit_bias=dict.fromkeys(range(1024), -100.0),
        n=16,
        logprobs=20,
        prompt_logprobs=0,
        seed=2**64 - 1,
    ).validate(vocab_size=2048)


def test_defaults_are_valid() -> None:
    SamplingParams().validate()
