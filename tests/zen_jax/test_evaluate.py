"""Scores: teacher-forced exact match is greedy decoding's, and bits per byte are what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.layout import Params
from zen_jax.model import init_params, make_forward

CONFIG = ModelConfig(40, 32, 64, 1, 2, 1, 16, 64, 1e-5, 1e4, True)
END = 39


@pytest.fixture(scope="module")
def params() -> Params:
    return init_params(CONFIG, jax.random.key(3))


def _decoded(params: Params, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding in the plainest way: the whole sequence again for each token."""
    forward = jax.jit(make_forward(CONFIG))
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(forward(params, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_exact_match_is_greedy_decodings(params: Params) -> None:
    prompts = [[1, 2, 3], [7], [5, 9, 11, 13, 2], [30, 31]]
    answers = [_decoded(params, prompt, 6) for prompt in prompts]
    wrong_last = [*answers[1][:-1], (answers[1][-1] + 1) % 40]
    wrong_first = [(answers[2][0] + 1) % 40, *answers[2][1:]]
    examples = list(zip(prompts, [answers[0], wrong_last, wrong_first, answers[3]], strict=True))
    for batch in (1, 3, 64):
        found = evaluate.exact_matches(CONFIG, params, examples, batch)
        assert found.tolist() == [True, False, False, True]
    assert evaluate.exact_match(CONFIG, params, examples) == 0.5


def test_greedy_stops_at_the_end_token(params: Params) -> None:
    free = _decoded(params, [4, 8], 8)
    assert evaluate.greedy(CONFIG, params, [4, 8], END, 8) == free[: (free + [END]).index(END)]
    stop = free[2]
    assert evaluate.greedy(CONFIG, params, [4, 8], stop, 8) == free[: free.index(stop)]


def test_bits_per_byte_of_a_model_without_preferences(params: Params) -> None:
    flat = jax.tree.map(jnp.zeros_like, params)
    windows = np.random.default_rng(0).integers(0, 40, (5, 20)).astype(np.int32)
    assert evaluate.bits_per_byte(CONFIG, flat, windows) == pytest.approx(np.log2(40), rel=1e-5)
    halved = evaluate.bits_per_byte(CONFIG, flat, windows, bytes_per_token=2.0)
    assert halved == pytest.approx(np.log2(40) / 2, rel=1e-5)


def test_bits_per_byte_counts_each_window_once(params: Params) -> None:
    windows = np.random.default_rng(1).integers(0, 40, (5, 20)).astype(np.int32)
    each = [evaluate.bits_per_byte(CONFIG, params, windows[i : i + 1]) for i in range(5)]
    together = evaluate.bits_per_byte(CONFIG, params, windows, batch=2)
    assert together == pytest.approx(np.mean(each), rel=1e-6)
    log = jax.nn.log_softmax(make_forward(CONFIG)(params, jnp.asarray(windows)[:, :-1]))
    by_hand = -np.take_along_axis(np.asarray(log), windows[:, 1:, None], -1).mean() / np.log(2)
    assert together == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "no examples"),
        ([([], [1])], "empty prompt or answer"),
        ([([1], [])], "empty prompt or answer"),
        ([([1] * 60, [1] * 5)], "65 tokens; at most 64"),
        ([([1], [40])], "outside 0..39"),
    ],
)
def test_bad_examples(params: Params, examples, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate.exact_match(CONFIG, params, examples)


def test_bad_windows(params: Params) -> None:
    with pytest.raises(ValueError, match="expected \\[n, T \\+ 1\\]"):
        evaluate.bits_per_byte(CONFIG, params, np.zeros((3, 1), np.int32))
    with pytest.raises(ValueError, match="at most 64"):
        evaluate.bits_per_byte(CONFIG, params, np.zeros((1, 66), np.int32))
    with pytest.raises(ValueError, match="bytes_per_token is 0"):
        evaluate.bits_per_byte(CONFIG, params, np.zeros((1, 8), np.int32), bytes_per_token=0)


def test_a_prompt_that_does_not_fit(params: Params) -> None:
    with pytest.raises(ValueError, match="at most 64 together"):
        evaluate.greedy(CONFIG, params, [1] * 60, END, 5)
