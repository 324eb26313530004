"""A base, a fine-tune, its delta and unstored options side by side, one in memory at a time."""

import gc
import shutil
import weakref

import jax
import numpy as np
import pytest

import zen_jax
from zen_jax import evaluate
from zen_jax.evaluation import compare as comparing
from zen_jax.evaluation import members
from zen_jax.evaluation.compare import Plan, Report, compare
from zen_jax.evaluation.members import Cast, open_cast
from zen_jax.evaluation.questions import Limits, TestSet, of_examples, read_text
from zen_jax.evaluation.report import markdown
from zen_jax.evaluation.statistics import Estimate

PLAN = Plan(draws=200)


@pytest.fixture(scope="module")
def cast(tiny_folders, tiny_store) -> Cast:
    return open_cast(
        str(tiny_folders["base"]),
        str(tiny_folders["tiny-a"]),
        [f"{tiny_store}:tiny-a"],
        ["row", "tuned"],
    )


@pytest.fixture(scope="module")
def text(cast, tmp_path_factory) -> TestSet:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(chr(97 + i * i % 26) for i in range(400)))
    return read_text(path, cast.tokenizer, Limits(cast.vocab, cast.positions, 32, 6))


@pytest.fixture(scope="module")
def answers(cast) -> TestSet:
    """Two tokens each that the fine-tune itself answers, so that it is always right."""
    loaded = cast.members[0].model.load()
    examples = [
        (
            prompt := [256, 97 + i, 10],
            evaluate.greedy(loaded.config, loaded.params, prompt, 999, 2),
        )
        for i in range(16)
    ]
    limits = Limits(cast.vocab, cast.positions)
    return of_examples("answers", examples, limits, edge=True)


@pytest.fixture(scope="module")
def report(cast, text, answers) -> Report:
    return compare(cast, [answers, text], PLAN)


def _results(report: Report, name: str) -> dict[str, comparing.Result]:
    (found,) = [one for one in report.sets if one.name == name]
    return {result.model: result for result in found.results}


def _value(estimate: Estimate | None) -> float:
    assert estimate is not None and estimate.value is not None
    return estimate.value


def test_models_and_sets_are_in_order(report) -> None:
    names = [m["name"] for m in report.models]
    assert names == ["base", "fine-tune", "tiny-a", "row", "tuned"]
    assert [one.name for one in report.sets] == ["words", "answers"]  # the edge comes last
    assert [r.model for r in report.sets[0].results] == names
    share = {m["name"]: m["share"] for m in report.models}
    assert share["fine-tune"] == share["tuned"] == share["base"] == 1 and share["row"] < 0.2


def test_figures_are_those_of_logits(report, text, tiny_store) -> None:
    family = zen_jax.load(tiny_store)
    results = _results(report, "words")
    tokens = text.sheet.tokens
    for name in ("base", "tiny-a"):
        logits = np.asarray(family[name].logits(tokens[:, :-1]), np.float64)
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll = -np.take_along_axis(log, tokens[:, 1:, None], -1).mean()
        assert results[name].nll.value == pytest.approx(nll, rel=1e-4)
        bits = results[name].bits_per_byte
        assert bits.value == pytest.approx(nll / np.log(2), rel=1e-4)  # a byte is a token
        assert results[name].exact is None


def test_an_option_is_what_conversion_stores(report) -> None:
    for name in ("words", "answers"):
        results = _results(report, name)
        stored, made = results["tiny-a"], results["row"]
        assert stored.nll.value == pytest.approx(made.nll.value, rel=1e-5)
        assert stored.kl.value == pytest.approx(made.kl.value, rel=1e-3)
        assert _value(stored.kl) > 0.001


def test_the_fine_tune_is_not_apart_from_itself(report) -> None:
    for name in ("words", "answers"):
        for model in ("fine-tune", "tuned"):
            result = _results(report, name)[model]
            assert result.kl.value == pytest.approx(0, abs=1e-6)
            assert result.top1.value == 1
    results = _results(report, "answers")
    assert results["fine-tune"].exact.value == 1 and _value(results["base"].exact) < 0.5
    assert results["tuned"].recovered.value == 1
    gain = 1 - _value(results["base"].exact)
    kept = _value(results["row"].exact) - _value(results["base"].exact)
    assert results["row"].recovered.value == pytest.approx(kept / gain)
    assert results["base"].recovered is None and results["fine-tune"].recovered is None


def test_one_model_is_in_memory_at_a_time(cast, text, monkeypatch) -> None:
    alive: list[weakref.ref] = []
    load = members.Whole.load

    def watched(self: members.Whole) -> members.Loaded:
        gc.collect()
        assert not [leaf for leaf in alive if leaf() is not None], "the model before is still there"
        loaded = load(self)
        alive.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(loaded.params))
        return loaded

    monkeypatch.setattr(members.Whole, "load", watched)
    compare(cast, [text], PLAN)
    assert len(alive) > 10


def test_without_a_fine_tune_there_is_no_divergence(tiny_folders, tiny_store, text) -> None:
    cast = open_cast(str(tiny_folders["base"]), None, [f"{tiny_store}:tiny-a"], [])
    (found,) = compare(cast, [text], PLAN).sets
    assert [(r.model, r.kl, r.top1, r.recovered) for r in found.results] == [
        ("base", None, None, None),
        ("tiny-a", None, None, None),
    ]


def test_no_room_for_predictions(cast, text, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(comparing, "IN_MEMORY", 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(ValueError, match="and .* has 10 free; ask fewer windows"):
        compare(cast, [text], Plan(scratch=tmp_path))
    assert not list(tmp_path.iterdir()), "the temporary folder is gone"


def test_sets_need_names_of_their_own(cast, text) -> None:
    with pytest.raises(ValueError, match="two sets are called words"):
        compare(cast, [text, text], PLAN)


def test_markdown_has_all_tables(report) -> None:
    page = markdown(report)
    for part in ("## Models", "## words (in distribution; 6 windows, 192 tokens)", "| tiny-a |"):
        assert part in page
    assert "## answers (edge of the distribution; 16 tasks, 32 tokens)" in page


def test_what_does_not_belong_together(tiny_folders, tiny_store) -> None:
    base, tuned = str(tiny_folders["base"]), str(tiny_folders["tiny-a"])
    for models, options, tune, message in (
        ([f"{tiny_store}:nobody"], [], tuned, "nobody"),
        ([], ["nothing"], tuned, "no option is called nothing; there are base"),
        ([], ["row"], None, "an option is made of base and fine-tune"),
        ([f"{tiny_store}:tiny-a"] * 2, [], tuned, "two models are called tiny-a"),
        ([], ["base"], tuned, "two models are called base"),
        ([], [], "/nowhere", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            open_cast(base, tune, models, options)
