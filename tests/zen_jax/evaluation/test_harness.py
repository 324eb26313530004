"""What lm-evaluation-harness asks of a model is answered as it asks it."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.evaluation.harness import HarnessModel, open_for_harness
from zen_jax.evaluation.members import Loaded, Whole
from zen_jax.merge.sources import open_member
from zen_jax.model import make_forward
from zen_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Instance:
    """As `lm_eval.api.instance.Instance`, as far as models look."""

    args: tuple[Any, ...]


def _asked(*requests: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request) for request in requests]


@pytest.fixture(scope="module")
def loaded(tiny_folders) -> Loaded:
    return Whole(open_member(str(tiny_folders["tiny-a"]))).load()


@pytest.fixture(scope="module")
def tokenizer(tiny_folders) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folders["tiny-a"])


@pytest.fixture(scope="module")
def model(loaded, tokenizer) -> HarnessModel:
    return HarnessModel(loaded, tokenizer, rows=2)


@functools.lru_cache
def _forward(config: ModelConfig) -> Any:
    return jax.jit(make_forward(config))


def _nats(loaded: Loaded, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Log-likelihood by hand, of one row; what is padded behind it has no effect."""
    ids = np.zeros((1, 256), np.int32)
    ids[0, : len(before) + len(after)] = [*before, *after]
    logits = np.asarray(_forward(loaded.config)(loaded.params, ids), np.float64)[0]
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at = range(len(before) - 1, len(before) + len(after) - 1)
    greedy = all(log[i].argmax() == ids[0, i + 1] for i in at)
    return sum(log[i, ids[0, i + 1]] for i in at), greedy


def test_loglikelihood(model, loaded) -> None:
    contexts = [a + b for a in "abcd" for b in "ijklmn"]
    follows = {
        context: evaluate.greedy(loaded.config, loaded.params, [256, *context.encode()], 999, 1)
        for context in contexts
    }
    context = next(c for c in contexts if 33 <= follows[c][0] < 127)
    found = model.loglikelihood(
        _asked(
            (context, chr(follows[context][0])), ("ab", "zz"), ("ab ", "c"), ("", "x"), ("ab", "")
        )
    )
    bos = 256
    wanted = [
        _nats(loaded, [bos, *context.encode()], follows[context]),
        _nats(loaded, [bos, *b"ab"], [*b"zz"]),
        _nats(loaded, [bos, *b"ab"], [*b" c"]),  # the space goes to the continuation
        _nats(loaded, [bos], [*b"x"]),
        (0.0, True),
    ]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    np.testing.assert_allclose([n for n, _ in found], [n for n, _ in wanted], rtol=1e-4)
    assert found[0][1] and not found[1][1]


def test_what_is_too_long_loses_its_beginning(model, loaded) -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(300))
    ((nats, _),) = model.loglikelihood(_asked((text, "yes")))
    wanted, _ = _nats(loaded, [*text.encode()][-253:], [*b"yes"])
    assert nats == pytest.approx(wanted, rel=1e-4)


def test_rolling_predicts_each_token_once(model, loaded) -> None:
    text = "".join(chr(97 + i * i * i % 26) for i in range(400))
    ids = [*text.encode()]
    whole, short, empty = model.loglikelihood_rolling(_asked((text,), ("abc",), ("",)))
    first, _ = _nats(loaded, [256], ids[:255])
    rest, _ = _nats(loaded, ids[400 - 256 : 255], ids[255:])  # with all the context that fits
    assert whole == pytest.approx(first + rest, rel=1e-4)
    assert short == pytest.approx(_nats(loaded, [256], [*b"abc"])[0], rel=1e-4)
    assert empty == 0


def test_generation_stops_and_keeps_its_order(model, loaded, tokenizer, compiled) -> None:
    free = {
        text: tokenizer.decode(
            evaluate.greedy(loaded.config, loaded.params, tokenizer.encode(text), 257, 8)
        )
        for text in ("ab", "cd", "ef")
    }
    stop = free["cd"][2]
    given = {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    found = model.generate_until(
        _asked(
            ("ab", given),
            ("cd", {"until": stop, "max_gen_toks": 8}),
            ("ef", {"until": [], "max_gen_toks": 8}),
        )
    )
    assert found == [free["ab"], free["cd"].partition(stop)[0], free["ef"]]


def test_settings_are_never_dropped(model) -> None:
    with pytest.raises(ValueError, match="generate_until has num_beams; known are until"):
        model.generate_until(_asked(("a", {"until": [], "num_beams": 4})))
    with pytest.raises(ValueError, match="top_p"):
        model.generate_until(_asked(("a", {"until": [], "top_p": 7.0, "do_sample": True})))


def test_the_real_base_class_takes_it(tiny_folders) -> None:
    try:
        from lm_eval.api.instance import Instance as Real  # pyright: ignore[reportMissingImports]
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(ValueError, match="pip install -c constraints.txt lm-eval"):
            open_for_harness(str(tiny_folders["tiny-a"]))
        return
    model = open_for_harness(str(tiny_folders["tiny-a"]))
    assert isinstance(model, LM)
    asked = Real("loglikelihood", {}, ("ab", "c"), 0)
    assert model.loglikelihood([asked]) == model.loglikelihood(_asked(("ab", "c")))
