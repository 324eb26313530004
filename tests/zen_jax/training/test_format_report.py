"""The page on formats says what was measured; the commands that make it; the real fine-tune."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from zen_jax.config import ModelConfig
from zen_jax.delta.apply import effective_weight
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import Params, unfuse
from zen_jax.training import corpora, residual, scoring
from zen_jax.training.bytes_tokenizer import write_tokenizer
from zen_jax.training.corpora import Corpus
from zen_jax.training.format_study import __main__ as command
from zen_jax.training.format_study import report, served, smollm2, study
from zen_jax.training.format_study.formats import FORMATS, store
from zen_jax.training.format_study.report import fill, load, tables
from zen_jax.training.residual import Tensors
from zen_jax.training.scoring import Exam

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGE = "# Page\n<!-- family -->\n<!-- end -->\n<!-- family-each -->\nold\n<!-- end -->\nend\n"


def marks(nbytes: int, nll: float, exact: float | None) -> dict[str, Any]:
    return {"bytes": nbytes, "error": 0.5, "nll": nll, "kl": nll / 100, "exact": exact}


def variant(answers: bool, nll: float) -> dict[str, Any]:
    formats = {
        name: marks(100 * i, nll + i, 0.25 if answers else None) for i, name in enumerate(FORMATS)
    }
    return {
        "title": f"a title {nll}",
        "answers": answers,
        "zeros": 0.125,
        "bf16_bytes": 1000,
        "formats": formats,
    }


@pytest.fixture
def studies() -> dict[str, Any]:
    some = {"a": variant(True, 1), "b": variant(False, 2), "c": variant(False, 4)}
    one = variant(False, 1.5)
    one["formats"] = {name: one["formats"][name] for name in ("base", "row")}
    return {
        "family": {"variants": some},
        "smollm2": {"base": "SmolLM2", "variants": {"de": variant(False, 0), "tenth": one}},
    }


def test_the_page_is_what_was_measured() -> None:
    page = (DOCS / "format.md").read_text(encoding="utf-8")
    studies = load(DOCS / "format.json")
    assert set(studies) == {"family", "smollm2"}
    assert fill(page, studies) == page
    assert (DOCS / "format.png").read_bytes()[:4] == b"\x89PNG"


def test_every_format_was_measured() -> None:
    studies = load(DOCS / "format.json")
    assert set(studies["family"]["variants"]) == set(
        json.loads((ROOT / "family" / "scores.json").read_text())["variants"]
    )
    for found in studies["family"]["variants"].values():
        assert set(found["formats"]) == set(FORMATS)
    assert set(studies["smollm2"]["variants"]["german"]["formats"]) == set(FORMATS)


def test_the_page_agrees_with_the_family_s_scores() -> None:
    scores = json.loads((ROOT / "family" / "scores.json").read_text(encoding="utf-8"))["variants"]
    same = {"base": "base", "full": "tuned", "one_bit_per_row": "row"}
    for name, found in load(DOCS / "format.json")["family"]["variants"].items():
        for theirs, mine in same.items():
            figures = found["formats"][mine]
            value = figures["exact"] if found["answers"] else figures["nll"] / math.log(2)
            assert value == pytest.approx(scores[name][theirs], abs=4e-3), (name, mine)


def test_the_family_table(studies: dict[str, Any]) -> None:
    lines = tables(studies)["family"].splitlines()
    assert len({line.count("|") for line in lines}) == 1
    (row,) = [line for line in lines if "`row`" in line]
    at = list(FORMATS).index("row")
    assert row == (
        f"| signs, a scale a row, zeros hashed | `row` | {100 * at} | {10 * at:.2f}% | 0.500 | "
        f"{3 + at:.3f} | {(3 + at) / 100:.3g} | {1 + at:.4f} | {(1 + at) / 100:.3g} | 0.250 |"
    )


def test_formats_that_were_not_measured_are_left_out(studies: dict[str, Any]) -> None:
    both = tables(studies)["smollm2"]
    first, second = both.split("**a title 1.5**")
    assert "12.5% of the deltas" in second
    assert "`svd-1`" in first and "`svd-1`" not in second and "`row`" in second
    assert "Levels" in first and "Levels" not in second


def served_marks(kl: float, exact: float | None) -> dict[str, Any]:
    """Marks of a variant as it is served, float32 1 % above whole weights and bfloat16 2 % below;
    and of its own weights."""
    names = {"whole": 1.0, "float32": 1.01, "products": 1.005, "bfloat16": 0.98}
    names |= {"own-products": 0.25, "own-bfloat16": 0.5}
    tables = {kind: [6, 3, 1] for kind in report._KINDS}
    return {"rows": 2, "tokens": 10} | {
        name: {"nll": kl + 1, "kl": kl * times, "exact": exact, "tables": tables}
        for name, times in names.items()
    }


def test_as_served(studies: dict[str, Any]) -> None:
    assert "served" not in tables(studies)
    for kl, variant in zip((1, 2, 4), studies["family"]["variants"].values(), strict=True):
        variant["served"] = served_marks(kl, 0.25 if variant["answers"] else None)
    made = tables(studies)
    lines = made["served"].splitlines()
    assert len(lines) == 2 + 6 + 6  # texts and skills; SmolLM2 was not measured
    assert lines[3] == (
        "| the family's texts | as served, float32 | 20 | 4.0000 | 3.03 | +1.00% | – |"
    )
    assert lines[4] == (
        "| the family's texts | as served, rounded at weights | 20 | 4.0000 | 3.01 | +0.50% | – |"
    )
    assert lines[11] == (
        "| the family's skills | as served, bfloat16 | 10 | 2.0000 | 0.98 | -2.00% | 0.250 |"
    )
    assert lines[13] == (
        "| the family's skills | the fine-tune's own weights, bfloat16 | 10 | 2.0000 | 0.5 | – "
        "| 0.250 |"
    )
    variants = studies["family"]["variants"]
    variants["a"]["served"]["float32"]["tables"]["down"] = [0, 0, 10]
    down = tables(studies)["served-tables"].splitlines()[5]
    assert down == "| down | 60.0% |"


def test_the_served_format_costs_no_quality() -> None:
    """What docs/format.md says of it."""
    studies = load(DOCS / "format.json")
    kept = {
        name: variant["served"]
        for each in studies.values()
        for name, variant in each["variants"].items()
    }
    assert len(kept) == sum(len(each["variants"]) for each in studies.values())
    for name, marks in kept.items():
        parts = ("whole", "float32", "products", "bfloat16")
        whole, wide, rounded, narrow = (marks[part] for part in parts)
        assert wide["kl"] == pytest.approx(whole["kl"], rel=0.006, abs=2e-5), name
        assert wide["nll"] == pytest.approx(whole["nll"], abs=2e-4), name
        assert wide["exact"] == whole["exact"], name
        assert rounded["nll"] == pytest.approx(whole["nll"], abs=8e-4), name
        assert rounded["kl"] == pytest.approx(whole["kl"], rel=0.04, abs=2e-4), name
        assert rounded["exact"] == whole["exact"], name
        assert narrow["nll"] == pytest.approx(whole["nll"], abs=4e-3), name
    for name in ("german", "german-tenth"):  # as much as in the same arithmetic without a delta
        marks = kept[name]
        for part, own in served.OWN.items():
            added = marks[part]["kl"] - marks["whole"]["kl"]
            assert added == pytest.approx(marks[own]["kl"], rel=0.1), (name, part)


def test_each_variant(studies: dict[str, Any]) -> None:
    lines = tables(studies)["family-each"].splitlines()
    assert lines[2].startswith("| a | 12.5% | exact match | 0.250 |")
    assert lines[3].startswith("| b | 12.5% | NLL | 2.000 |")


def test_a_page_without_a_place(studies: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one place <!-- smollm2 -->"):
        fill(PAGE, studies)
    with pytest.raises(ValueError, match="one place <!-- family -->"):
        fill(PAGE + PAGE, {"family": studies["family"]})


def test_writing(studies: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format.md is missing"):
        report.write(tmp_path)
    (tmp_path / "format.md").write_text(PAGE)
    report.write(tmp_path, "family", studies["family"])
    page = (tmp_path / "format.md").read_text()
    assert page.startswith("# Page\n<!-- family -->\n| format |") and page.endswith("end\n")
    assert "old\n" not in page
    assert load(tmp_path / "format.json") == {"family": studies["family"]}
    assert (tmp_path / "format.png").stat().st_size > 10_000
    report.write(tmp_path)
    assert (tmp_path / "format.md").read_text() == page


def test_damaged_json(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no studies"):
        load(tmp_path / "format.json")


# The commands, on models that are made in a moment.


@pytest.fixture
def base(tiny: ModelConfig, tiny_params: Params) -> Tensors:
    return {
        name: np.asarray(value)
        for name, value in residual.round_tensors(unfuse(tiny, tiny_params)).items()
    }


@pytest.fixture
def folder(tiny: ModelConfig, base: Tensors, tmp_path: Path) -> Path:
    """The tiny model, with an end of text among its tokens."""
    like = tmp_path / "like"
    like.mkdir()
    write_tokenizer(like, 64)
    (like / "config.json").write_text(json.dumps(tiny.to_hf()))
    tokenizer = tokenizers.Tokenizer.from_file(str(like / "tokenizer.json"))
    names = tokenizer.to_str().replace("<|reserved0|>", "<|endoftext|>")
    (like / "tokenizer.json").write_text(names, encoding="utf-8")
    residual.write_folder(tmp_path / "model", base, like)
    return tmp_path / "model"


def test_the_family_command(
    folder: Path, base: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "family"
    residual.write_folder(home / "base", base, folder)
    rng = np.random.default_rng(0)
    moved = {n: v.astype(np.float32) + rng.normal(0, 0.02, v.shape) for n, v in base.items()}
    encoded = residual.encode(base, moved)
    residual.save_residual(home / "residuals" / "zen4-sort.safetensors", home / "base", encoded, {})
    exam = Exam([([1, 2], [3]), ([4], [5, 6])], None)
    monkeypatch.setattr(command, "remember_compilations", lambda folder: None)
    monkeypatch.setattr(scoring, "make_exam", lambda variant, texts: exam)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "format.md").write_text(PAGE)
    given = ["--docs", str(docs), "family", "--family", str(home), "--work", str(tmp_path / "w")]
    assert command.main([*given, "--quiet", "--only", "zen4-sort"]) == 0
    (found,) = json.loads((tmp_path / "w" / "family.json").read_text())["variants"].values()
    assert list(found["formats"]) == list(FORMATS)
    assert not (docs / "format.json").exists()  # a part of the family is not published

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(study, "measure_format", never)
    assert command.main([*given, "--quiet", "--only", "zen4-sort"]) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["family", "--only", "zen4-nobody"], "no variant is called zen4-nobody"),
        (["smollm2", "--base", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_bad_input(
    given: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "remember_compilations", lambda folder: None)
    assert command.main([*given, "--quiet", "--work", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


# The real fine-tune, on the tiny model.


@pytest.fixture
def german(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"Die Datei wird gelesen. " * 20
    corpus = Corpus("german", (page, page[5:]), (page[3:],), "")
    monkeypatch.setattr(corpora, "load", lambda name, cache: corpus)
    monkeypatch.setattr(smollm2, "LENGTH", 32)
    monkeypatch.setattr(smollm2, "ROWS", 2)


def test_windows_of_a_text() -> None:
    cut = smollm2.cut([[1, 2, 3], [4, 5]], 0, 3)
    assert cut.tolist() == [[1, 2, 3, 0], [0, 4, 5, 0]]
    with pytest.raises(ValueError, match="has 2 tokens; expected more than 3"):
        smollm2.cut([[1]], 0, 3)


@pytest.mark.usefixtures("german")
def test_the_real_fine_tune(
    folder: Path, base: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    made = smollm2.subjects(folder, work, tmp_path, steps=3, progress=False)
    german, tenth = (make() for make in made.values())
    assert all((german.base[n] == base[n]).all() for n in base)
    assert german.sheet.tokens.shape[1] == 33 and not german.sheet.answers
    moved = [_update(s.base, s.tuned) for s in (german, tenth)]
    assert 0.05 < moved[1] / moved[0] < 0.15
    assert set(german.about) == {"tuned_sha256", "delta_sha256"}
    assert german.about["delta_sha256"] != tenth.about["delta_sha256"]
    assert len(german.formats) == len(FORMATS) > len(tenth.formats)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(smollm2, "train", never)
    again = smollm2.subjects(folder, work, tmp_path, steps=3, progress=False)["german"]()
    assert all((again.tuned[n] == german.tuned[n]).all() for n in base)

    other = {name: (value * 2).astype(value.dtype) for name, value in base.items()}
    residual.write_folder(work / "base", other, folder)
    with pytest.raises(ValueError, match="made from another base; remove it"):
        smollm2.subjects(folder, work, tmp_path, steps=3, progress=False)


def _update(base: Any, tuned: Any) -> float:
    """Root of the sum of squares of an update."""
    changes = [tuned[n].astype(np.float64) - base[n].astype(np.float64) for n in base]
    return math.sqrt(sum(float(np.sum(c * c)) for c in changes))


@pytest.mark.usefixtures("german")
def test_the_smollm2_command_keeps_the_delta(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "remember_compilations", lambda folder: None)
    monkeypatch.setattr(command, "run", lambda *_: None)
    monkeypatch.setattr(served, "run", lambda *_: None)
    monkeypatch.setattr(report, "write", lambda *_: None)
    docs, work = tmp_path / "docs", tmp_path / "work"
    given = ["--docs", str(docs), "smollm2", "--base", str(folder), "--work", str(work)]
    assert command.main([*given, "--steps", "3", "--texts", str(tmp_path), "--quiet"]) == 0
    parts, metadata = residual.read_safetensors(docs / smollm2.DELTA)
    assert json.loads(metadata["about"])["steps"] == 3
    _, base = residual.read_folder(work / "smollm2" / "base")
    _, tuned = residual.read_folder(work / "smollm2" / "3-steps" / "german")
    for name, wanted in store(FORMATS["row"], base, tuned).tensors.items():
        bits, scale = (parts.get(f"{name}.{part}") for part in ("bits", "scale"))
        delta = WeightDelta(bits, scale, dense=parts.get(name))
        assert (np.asarray(effective_weight(jnp.asarray(base[name]), delta)) == wanted).all(), name
    first = (docs / smollm2.DELTA).read_bytes()
    smollm2.write_delta(work / "smollm2", 3, docs / smollm2.DELTA)
    assert (docs / smollm2.DELTA).read_bytes() == first


def test_the_kept_delta_is_the_one_that_was_measured() -> None:
    parts, metadata = residual.read_safetensors(DOCS / smollm2.DELTA)
    told = json.loads(metadata["about"])
    study = load(DOCS / "format.json")["smollm2"]
    measured = study["variants"][smollm2.KEPT]
    assert smollm2.delta_digest(parts) == measured["delta_sha256"] == told["delta_sha256"]
    assert sum(v.nbytes for v in parts.values()) == measured["formats"]["row"]["bytes"]
    assert {name: told[name] for name in study if name != "variants"} == smollm2.about(
        smollm2.STEPS
    )


@pytest.mark.usefixtures("german")
def test_a_model_without_an_end_of_text(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder, 64)
    with pytest.raises(ValueError, match="no token <|endoftext|>"):
        smollm2.read_windows(folder, tmp_path)


def test_batches_depend_on_the_step_alone() -> None:
    windows = np.arange(40)[:, None] + np.arange(5)
    first, second = smollm2.batches(windows), smollm2.batches(windows)
    (early,), (late,) = first(1), first(7)
    (again,) = second(1)
    assert (early.tokens == again.tokens).all() and (early.weights == 1).all()
    seen = [row for step in range(5) for row in first(step)[0].tokens[:, 0]]
    assert sorted(seen) == list(range(40))  # all of the text before any of it again
    assert (late.tokens == first(2)[0].tokens).all()


def test_the_held_out_windows_are_spread() -> None:
    windows = np.arange(61)[:, None] + np.arange(5)
    sheet = smollm2.held_out_sheet(windows)
    assert sheet.tokens[:, 0].tolist() == list(range(0, 61, 4))
    assert len(smollm2.held_out_sheet(windows[:3]).tokens) == 3
