"""What one bit costs: the methods compared with, the asides, and how figures become tables."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.delta.distill_layers import Samples
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import unfuse
from zen_jax.model import init_params, make_forward
from zen_jax.training.format_study.formats import FORMATS
from zen_jax.training.format_study.study import Results, Subject
from zen_jax.training.quality import __main__ as quality_main
from zen_jax.training.quality import report
from zen_jax.training.quality.asides import eight_bits, prompt_only
from zen_jax.training.quality.deltazip import compress, packed_bytes
from zen_jax.training.quality.methods import Case
from zen_jax.training.quality.spending import residual
from zen_jax.training.quality.study import measure
from zen_jax.training.quality.tunes import TUNES, fine_tune

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    tie_word_embeddings=True,
)


def _moments(size: int) -> np.ndarray:
    rng = np.random.default_rng(8)
    inputs = rng.normal(size=(400, size)) @ (
        rng.normal(size=(size, size)) * np.linspace(1, 0.05, size)
    )
    return (inputs.T @ inputs / 400).astype(np.float32)


def _left(delta: np.ndarray, given: np.ndarray, second: np.ndarray) -> float:
    left = delta - given
    return float(np.trace(left @ second @ left.T) / np.trace(delta @ second @ delta.T))


def test_deltazip_keeps_two_of_four_and_passes_errors_on() -> None:
    delta = np.random.default_rng(9).normal(size=(16, 160)).astype(np.float32) * 1e-3
    second = _moments(160)
    given = compress(delta, second)
    groups = given.reshape(16, 40, 4)
    assert (np.count_nonzero(groups, axis=-1) <= 2).all()
    for row in given[:, :128]:
        sizes = np.unique(np.abs(row[row != 0]))
        assert len(sizes) <= 2 and (len(sizes) < 2 or sizes[1] / sizes[0] == pytest.approx(3))
    alone = compress(delta, np.eye(160, dtype=np.float32))
    assert _left(delta, given, second) < 0.8 * _left(delta, alone, second)
    assert packed_bytes(16, 160) == 16 * (40 + 2 * 2)
    with pytest.raises(ValueError, match="multiple of 4"):
        compress(delta[:, :158], second[:158, :158])


def test_the_best_residual_of_a_rank() -> None:
    left = np.random.default_rng(6).normal(size=(20, 40)).astype(np.float32)
    second = _moments(40) + 0.01 * np.eye(40, dtype=np.float32)
    errors = [_left(left, residual(left, second, rank), second) for rank in (1, 5, 20)]
    root = np.linalg.cholesky(second.astype(np.float64))
    s = np.square(np.linalg.svd(left @ root, compute_uv=False))
    wanted = [s[rank:].sum() / s.sum() for rank in (1, 5, 20)]
    np.testing.assert_allclose(errors, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "share"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_eight_bits_are_as_near_as_they_can_be(kind: Any, share: float) -> None:
    wide = np.random.default_rng(2).normal(size=(12, 40)).astype(np.float32)
    wide[3] = 0
    given, nbytes = eight_bits({"w": wide, "v": wide[0]}, kind)
    assert nbytes == 12 * 40 + 4 * 12 + wide[0].nbytes
    np.testing.assert_array_equal(given["v"], wide[0])
    error = np.abs(given["w"].astype(np.float32) - wide)
    size = np.abs(wide).max(axis=1, keepdims=True) if kind == "int8" else np.abs(wide)
    # Half a step, and bfloat16's own rounding.
    floor = np.abs(wide).max(axis=1, keepdims=True) * 2.0**-10
    assert (error <= size * share + np.abs(wide) / 256 + floor).all()


def test_prompts_alone_lie_between_the_two() -> None:
    base, variant = (init_params(CONFIG, jax.random.key(k)) for k in (1, 2))
    tokens = np.random.default_rng(3).integers(0, 32, (2, 12)).astype(np.int32)
    run, forward = prompt_only(CONFIG), jax.jit(make_forward(CONFIG))
    for prompt, weights in ((True, variant), (False, base)):
        found = run(variant, base, tokens, np.full(tokens.shape, prompt))
        np.testing.assert_allclose(found, forward(weights, tokens), atol=1e-5)
    half = np.broadcast_to(np.arange(12) < 6, tokens.shape)
    mixed = run(variant, base, tokens, half)
    np.testing.assert_allclose(mixed[:, :6], forward(variant, tokens)[:, :6], atol=1e-5)
    assert float(jnp.abs(mixed - forward(base, tokens))[:, 6:].max()) > 1e-3


def test_each_study_is_of_its_own_fine_tunes() -> None:
    parse = quality_main._parser().parse_args
    assert parse(["family"]).only is None and parse(["smollm2"]).only is None
    assert parse(["asides"]).only == ["zen4-german", "zen4-ultra", "zen4-morse"]
    assert parse(["smollm2", "--only", "maths"]).only == ["maths"]
    with pytest.raises(SystemExit) as left:
        parse(["family", "--only", "maths"])
    assert left.value.code == 2


def test_steps_that_there_are_none_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 10 up to 60"):
        fine_tune(tmp_path, tmp_path, TUNES["maths"], tmp_path, 25)


@pytest.mark.parametrize(("theirs", "taken"), [("German, 60 steps", True), ("German", False)])
def test_marks_of_another_fine_tune_are_not_taken_over(
    theirs: str, taken: bool, tmp_path: Path
) -> None:
    base, tuned = (
        {
            name: np.asarray(value, np.float32).astype(jnp.bfloat16)
            for name, value in unfuse(CONFIG, init_params(CONFIG, jax.random.key(seed))).items()
        }
        for seed in (0, 1)
    )
    sheet = Sheet.of_windows(np.arange(4 * 9).reshape(4, 9) % CONFIG.vocab_size, batch=2)
    subject = Subject("german", "German, 60 steps", CONFIG, base, tuned, sheet, ())
    none = Samples(np.zeros((0, 3), np.int32), np.zeros((0, 2), np.float32))
    known, results = (Results(tmp_path / f"{name}.json") for name in ("known", "own"))
    spec = FORMATS["row"].spec
    old = {"key": f"other {spec}", "bytes": 1, "error": 0.5, "nll": 9.0, "kl": 9.0, "exact": None}
    known.open("german", {"title": theirs})["row"] = old
    said: list[str] = []
    measure(Case(subject, none, none, 2, 0, tmp_path), ["row"], results, known, said.append)
    found = results.variants["german"]["formats"]["row"]
    assert said == ["row"] and (found == old) == taken
    assert taken or found["bytes"] > 100


def _variant(answers: bool, ours: float) -> dict[str, Any]:
    def marks(nll: float, exact: float, nbytes: int) -> dict[str, Any]:
        return {
            "bytes": nbytes,
            "nll": nll,
            "kl": nll - 1,
            "exact": exact if answers else None,
        }

    formats = {
        "base": marks(3.0, 0.0, 0),
        "tuned": marks(1.0, 1.0, 2000),
        "ours": marks(ours, 0.9, 150),
    }
    return {"answers": answers, "weights": 1000, "zeros": 0.25, "formats": formats}


def test_tables_say_what_was_measured(tmp_path: Path) -> None:
    variants = {"a": _variant(False, 1.1), "b": _variant(False, 1.3), "c": _variant(True, 1.0)}
    kept = {"family": {"variants": variants}}
    made = report.tables(kept)
    row = next(line for line in made["family"].splitlines() if line.startswith("| ours: fitted"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["1.20", "0.900", "-0.100", "-0.100", "0.900", "0.850", "0.2", "3"]
    assert "| b | 25.0% | gain | 0.000 | 0.850 | 1.000 |" in made["family-each"]
    (tmp_path / "quality.json").write_text(json.dumps(kept))
    (tmp_path / "quality.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="no place for family"):
        report.write(tmp_path, tmp_path / "work")
    places = "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in made)
    (tmp_path / "quality.md").write_text(places)
    report.write(tmp_path, tmp_path / "work")
    text = (tmp_path / "quality.md").read_text()
    assert row in text and "old" not in text
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
