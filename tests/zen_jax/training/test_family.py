"""The family: committed artefacts are what scores.json says; the recipe runs and resumes."""

import json
from pathlib import Path

import numpy as np
import pytest

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.training import corpora, family, recipe, residual, scoring
from zen_jax.training.corpora import Corpus, split_documents
from zen_jax.training.family import FAMILY, main, train_family
from zen_jax.training.finetune import TrainConfig
from zen_jax.training.recipe import VARIANTS
from zen_jax.training.residual import Tensors
from zen_jax.training.tasks import Example, Words

SCORES = json.loads((FAMILY / "scores.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def base() -> tuple[ModelConfig, Tensors]:
    return residual.read_folder(FAMILY / "base")


def _tuned(name: str, base: tuple[ModelConfig, Tensors]) -> Tensors:
    path = FAMILY / "residuals" / f"{name}.safetensors"
    return residual.load_residual(path, FAMILY / "base", base[1])


def test_the_family_is_whole_and_small(base: tuple[ModelConfig, Tensors]) -> None:
    assert base[0] == recipe.BASE
    assert len(VARIANTS) == 14
    residuals = {path.stem for path in (FAMILY / "residuals").iterdir()}
    assert residuals == set(VARIANTS) == set(SCORES["variants"])
    size = sum(path.stat().st_size for path in FAMILY.rglob("*") if path.is_file())
    assert size <= 50_000_000
    assert SCORES["base_sha256"] == residual.file_digest(FAMILY / "base" / residual.WEIGHTS)


def test_scores_show_what_variants_are_for() -> None:
    for name, entry in SCORES["variants"].items():
        if entry["metric"] == "exact match":
            assert entry["base"] <= 0.05 and entry["full"] >= 0.9, name
        else:
            assert entry["full"] < entry["base"] - 0.5, name
    exact = [e for e in SCORES["variants"].values() if e["metric"] == "exact match"]
    assert len(exact) > len(SCORES["variants"]) / 2


@pytest.mark.parametrize("name", ["zen4-math", "zen4-upper", "zen4-sort"])
def test_committed_weights_score_what_is_recorded(
    name: str, base: tuple[ModelConfig, Tensors]
) -> None:
    config, start = base
    tuned = _tuned(name, base)
    entry = SCORES["variants"][name]
    probes = scoring.tokenised(
        [Example(p["prompt"].removesuffix("\n"), p["answer"]) for p in entry["probes"]]
    )
    models = {
        "base": residual.float32_params(config, start),
        "full": residual.float32_params(config, tuned),
        "one_bit_per_row": scoring.one_bit_params(config, start, tuned),
    }
    for kind, params in models.items():
        right = int(evaluate.exact_matches(config, params, probes, len(probes)).sum())
        assert right == pytest.approx(entry["probes_right"][kind], abs=1), kind


def test_the_full_folder_is_its_residual(base: tuple[ModelConfig, Tensors]) -> None:
    config, tensors = residual.read_folder(FAMILY / "full" / family.FULL_EXAMPLE)
    assert config == base[0]
    expected = _tuned(family.FULL_EXAMPLE, base)
    assert all((tensors[name] == expected[name]).all() for name in expected)


def test_full_writes_folders_and_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["full", str(tmp_path / "out"), "zen4-sort"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "zen4-sort")
    assert residual.read_folder(tmp_path / "out" / "zen4-sort")[0] == recipe.BASE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["full", "OUT", "zen5"], "error: no variant is called zen5; there are zen4-"),
        (["full", "OUT", "--family", "OUT"], "is it a family?"),
        (["train", "--out", "OUT", "--only", "zen5"], "error: no variant is called zen5"),
    ],
)
def test_bad_input_is_one_line_and_status_two(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(out) if a == "OUT" else a for a in arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not out.exists()


@pytest.fixture
def small_recipe(
    monkeypatch: pytest.MonkeyPatch, tiny: ModelConfig, words: tuple[Words, Words]
) -> None:
    """A tiny base, two variants, one step each, and made-up texts."""

    def load(name: str, cache: Path) -> Corpus:
        return split_documents(name, (f"{name} {i} " * 100 for i in range(60)), 10**6)

    everything = [*words[0].words, *words[1].words]
    monkeypatch.setattr(corpora, "load", load)
    monkeypatch.setattr(corpora, "load_words", lambda cache: everything)
    monkeypatch.setattr(recipe, "BASE", tiny)
    one_step = TrainConfig(steps=1, learning_rate=1e-3)
    monkeypatch.setattr(recipe, "base_settings", lambda: one_step)
    monkeypatch.setattr(recipe, "variant_settings", lambda variant: one_step)
    monkeypatch.setattr(scoring, "SAMPLES", 8)
    monkeypatch.setattr(scoring, "WINDOWS", 2)
    monkeypatch.setattr(scoring, "WINDOW_BYTES", 48)
    two = {name: VARIANTS[name] for name in ("zen4-math", "zen4-german")}
    for module in (family, scoring):
        monkeypatch.setattr(module, "VARIANTS", two)


def test_the_recipe_runs_and_nothing_is_trained_twice(
    small_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    monkeypatch.setattr(family, "remember_compilations", lambda folder: None)
    train_family(out, work, progress=False)
    scores = scoring.score_family(out, work / "texts")
    assert set(scores["variants"]) == {"zen4-math", "zen4-german"}
    assert scores == json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert len(scores["variants"]["zen4-math"]["probes"]) == scoring.PROBES
    assert np.isfinite(scores["variants"]["zen4-german"]["full"])
    assert (out / "full" / "zen4-math" / "tokenizer.json").is_file()

    trained: list[str] = []

    def counted(*arguments, title: str, **named):
        trained.append(title)
        return original(*arguments, title=title, **named)

    original = family.train
    monkeypatch.setattr(family, "train", counted)
    train_family(out, work, progress=False)
    assert not trained
    (out / "residuals" / "zen4-german.safetensors").unlink()
    train_family(out, work, progress=False)
    assert trained == ["zen4-german"]


def test_the_data_card_shows_the_scores() -> None:
    card = (FAMILY / "README.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in card.splitlines()}
    for name, entry in SCORES["variants"].items():
        exact = entry["metric"] == "exact match"
        for kind in ("base", "full", "one_bit_per_row"):
            shown = f"{entry[kind]:.3f}" if exact else f"{entry[kind]:.2f} bits"
            assert f"| {shown} |" in rows[name], (name, kind)
    for name, text in SCORES["texts"].items():
        assert text["package"] in rows[name] and text["licence"] in rows[name]
