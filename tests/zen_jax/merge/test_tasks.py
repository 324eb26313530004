"""What an adapter is scored on, as a stranger's file may have it."""

import json
from typing import Any

import jax
import pytest

from zen_jax.config import ModelConfig
from zen_jax.merge.pool_change import Tasks
from zen_jax.merge.pool_scores import scorer_of
from zen_jax.model import init_params


def test_tasks_are_read() -> None:
    exact = Tasks.parse(b'{"metric": "exact", "examples": [[[1, 2], [3]], [[9], [4, 5]]]}')
    assert exact == Tasks("exact", (((1, 2), (3,)), ((9,), (4, 5)))) and exact.largest == 9
    text = Tasks.parse(b'{"metric": "text", "examples": [[1, 2], [3, 11]]}')
    assert text == Tasks("text", ((1, 2), (3, 11))) and text.largest == 11


@pytest.mark.parametrize(
    "examples",
    [
        [],
        [[[1], []]],
        [[[], [1]]],
        [[[1.7], [2]]],
        [[[True], [2]]],
        [[[-1], [2]]],
        [[[2**31], [2]]],
        [["12", [2]]],
        [[{"1": 2}, [2]]],
        [[float("inf"), [2]]],
        [[[1], [2], [3]]],
        {"a": 1},
    ],
)
def test_what_is_no_example_is_refused(examples: Any) -> None:
    with pytest.raises(ValueError, match="tasks cannot be read"):
        Tasks.parse(json.dumps({"metric": "exact", "examples": examples}).encode())


@pytest.mark.parametrize("windows", [[[1]], [[]], [[1, 2], [1, 2, 3]], ["123"], [[1, "2"]]])
def test_what_is_no_window_is_refused(windows: Any) -> None:
    with pytest.raises(ValueError, match="tasks cannot be read"):
        Tasks.parse(json.dumps({"metric": "text", "examples": windows}).encode())


@pytest.mark.parametrize("data", [b"[" * 200_000, b"{", b"[]", b'{"metric": "bleu"}', b"\xff"])
def test_what_is_no_file_of_tasks_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="tasks cannot be read"):
        Tasks.parse(data)


def test_a_token_that_the_base_lacks_is_refused() -> None:
    config = ModelConfig(16, 8, 8, 1, 2, 2, 4, 16)
    score = scorer_of(config, init_params(config, jax.random.key(0)), (), 1)
    with pytest.raises(ValueError, match="token id 16; the base has 16"):
        score({}, Tasks("exact", (((1,), (16,)),)))
