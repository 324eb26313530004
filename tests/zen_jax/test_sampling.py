"""What a request may ask for."""

import pytest

from zen_jax.sampling import InvalidSampling, SamplingParams


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
