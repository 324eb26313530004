"""A store opened without a server: what its members answer, and what they refuse."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zen_jax
from zen_jax.checkpoint.manifest import VariantNotFound
from zen_jax.convert import convert_base, convert_variant
from zen_jax.generate import Family
from zen_jax.sampling import InvalidSampling, SamplingParams
from zen_jax.training.family import write_full

DEMO = Path(zen_jax.__file__).parents[1] / "family"
NAMES = ["zen4-math", "zen4-upper"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The demo family's base and two variants."""
    work = tmp_path_factory.mktemp("family")
    convert_base(DEMO / "base", work / "store")
    write_full(DEMO, work / "full", NAMES)
    for name in NAMES:
        convert_variant(work / "full" / name, work / "store", name)
    return zen_jax.load(work / "store", rows=2, max_length=48)


def test_members_say_what_they_are(family: Family) -> None:
    assert family.variants == NAMES and list(family) == ["base", *NAMES] and len(family) == 3
    assert "2,4" in repr(family) and "zen4-math" in repr(family)
    assert "version 1" in repr(family["zen4-math"]) and "bytes" in repr(family["zen4-math"])
    assert repr(family["base"]).startswith("<base")
    assert family["zen4-math"] is family["zen4-math"]


def test_each_member_does_its_own_work(family: Family) -> None:
    prompts = ["12+34\n", "table\n", "52+46\n", "river\n", "78+11\n"]  # more than there are rows
    upper = [answer.text for answer in family["zen4-upper"].generate(prompts)]
    assert upper[1] == "TABLE" and upper[3] == "RIVER"
    sums = [answer.text for answer in family["zen4-math"].generate(prompts)]
    assert [sums[i].rsplit("=")[-1] for i in (0, 2, 4)] == ["46", "98", "89"]
    one = family["zen4-math"].generate("12+34\n")
    assert one.text == str(one) == sums[0] and one.reason == "stop"
    assert family["base"].generate("12+34\n").text != sums[0]


def test_seeds_decide_and_are_reported(family: Family) -> None:
    member = family["base"]
    hot = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    first, again = member.generate("The ", hot), member.generate("The ", hot)
    assert first == again and first.seed == 5 and len(first.token_ids) <= 12
    free = member.generate(["The "] * 2, SamplingParams(max_tokens=12, temperature=1.0))
    assert free[0].seed != free[1].seed
    fixed = SamplingParams(max_tokens=12, temperature=1.0, seed=free[1].seed)
    assert member.generate("The ", fixed).token_ids == free[1].token_ids


def test_samples_differ_and_each_can_be_had_again(family: Family) -> None:
    member = family["base"]
    hot = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=3)
    ((first, *others),) = member.samples(["The "], hot)
    assert len({answer.token_ids for answer in (first, *others)}) == 3
    assert member.generate("The ", hot) == first
    assert member.samples(["The "] * 2, hot) == [[first, *others]] * 2


def test_a_stop_string_ends_the_text_in_front_of_it(family: Family) -> None:
    member = family["zen4-upper"]
    greedy = SamplingParams(max_tokens=20, temperature=0.0, stop=("XYZ", "BL"))
    answer = member.generate("table\n", greedy)
    assert (answer.text, answer.reason, answer.matched) == ("TA", "stop", "BL")
    assert member.tokenizer.decode(answer.token_ids) == "TABL"
    held = SamplingParams(max_tokens=3, temperature=0.0, stop=("BLx",))
    assert member.generate("table\n", held).text == "TAB"
    whole = member.generate("table\n", SamplingParams(max_tokens=20, temperature=0.0))
    assert whole.matched in member.tokenizer.eos_ids


def test_logprobs_are_those_of_the_logits(family: Family) -> None:
    member = family["zen4-upper"]
    asks = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1)
    answer = member.generate("table\n", asks)
    prompt = member.tokenizer.encode("table\n")
    tokens = [*prompt, *answer.token_ids]
    exact = np.asarray(member.logits([tokens])[0], np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    entries = [*answer.prompt_logprobs, *answer.logprobs]
    assert [entry.token_id for entry in entries] == tokens
    assert entries[0].logprob is None
    for entry, at in zip(entries[1:], exact, strict=False):
        assert entry.logprob == pytest.approx(at[entry.token_id], abs=0.05)
        assert entry.top_ids[0] == at.argmax()
    assert [len(entry.top_ids) for entry in entries[1:]] == [1] * (len(prompt) - 1) + [2] * 4
    assert not member.generate("table\n").logprobs


def test_answers_end_with_the_context(family: Family) -> None:
    long = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    answer = family["zen4-upper"].generate("table\n", long)
    prompt = family["zen4-upper"].tokenizer.encode("table\n")
    assert answer.reason == "length" and len(prompt) + len(answer.token_ids) == 48


def test_logits_are_those_of_the_weights_made_whole(family: Family) -> None:
    member = family["zen4-upper"]
    tokens = [member.tokenizer.encode("table\n")]
    got = member.logits(tokens)
    want = family.forward(member.materialise(), jnp.asarray(tokens))
    assert got.shape == (1, len(tokens[0]), 264)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


def test_bad_requests_are_named(family: Family) -> None:
    member = family["base"]
    with pytest.raises(VariantNotFound, match="zen4-none"):
        family["zen4-none"]
    with pytest.raises(ValueError, match="expected 1 to 47"):
        member.generate("x" * 60)
    with pytest.raises(InvalidSampling, match="top_p"):
        member.generate("x", SamplingParams(top_p=0))
    with pytest.raises(ValueError, match=r"whole numbers \[B, T\]"):
        member.logits([[0.5]])
    with pytest.raises(ValueError, match="outside 0 to 263"):
        member.logits([[264]])
    with pytest.raises(ValueError, match="has 1025 tokens; the model has 1024 positions"):
        member.logits(np.zeros((2, 1025), int))
    with pytest.raises(ValueError, match="manifest"):
        zen_jax.load(DEMO)
