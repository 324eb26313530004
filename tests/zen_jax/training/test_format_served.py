"""The default format as it is served: decode steps of several fine-tunes, and how many tables."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_build
from pallas_kernels.bitdelta_matmul import cpu, ops
from pallas_kernels.packing import pack_signs
from zen_jax.config import ModelConfig
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import Params, fuse, unfuse
from zen_jax.model import make_forward
from zen_jax.training import residual, scoring
from zen_jax.training.format_study import served
from zen_jax.training.format_study.formats import FORMATS
from zen_jax.training.format_study.measure import Examiner
from zen_jax.training.format_study.study import Results, Subject, measure_subject, publish
from zen_jax.training.residual import Tensors

ROW = (FORMATS["row"],)


@pytest.fixture
def base(tiny: ModelConfig, tiny_params: Params) -> Tensors:
    tensors = {name: np.asarray(value) for name, value in unfuse(tiny, tiny_params).items()}
    return residual.round_tensors(tensors)


@pytest.fixture
def subjects(tiny: ModelConfig, base: Tensors) -> list[Subject]:
    """Three fine-tunes with answers of other lengths each."""
    made = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        moved = {n: v.astype(np.float32) + rng.normal(0, 0.03, v.shape) for n, v in base.items()}
        examples = [
            (list(rng.integers(0, 99, 2 + n)), list(rng.integers(0, 99, 3 + 14 * (seed == 1))))
            for n in range(5)
        ]
        tuned, sheet = residual.round_tensors(moved), Sheet.of_examples(examples, 2)
        made.append(Subject(f"v{seed}", f"does {seed}", tiny, base, tuned, sheet, ROW))
    return made


# How many tables.


@pytest.mark.parametrize("size", [510, 512])
def test_steps_are_those_of_the_kernel(size: int) -> None:
    """What the kernel is off by is a step's uniform error, whichever words have coarse tables."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, size)).astype(np.float32)
    x[:, 5] = np.linspace(1, 60, 256)
    x[128:, 300] = 40
    signs = rng.choice(np.array([-1, 1], np.float32), (256, size))
    bank = ops.SignBank(jnp.asarray(pack_signs(signs)[None, None]), jnp.ones((1, 1, 256)))
    zeros = jnp.zeros((256, size), jnp.bfloat16)
    slots = np.zeros(256, np.int32)
    y = np.asarray(ops.bitdelta_matmul_mixed(jnp.asarray(x), zeros, bank, slots, "cpu"))
    wrong = np.sqrt(np.mean((y - x.astype(np.float64) @ signs.T) ** 2, axis=1))
    listed, step = served.table_words(jnp.asarray(x))
    assert set(np.asarray(jnp.sum(listed, axis=1))) >= {0, 1, 2}
    ratio = wrong / (np.asarray(step) * np.sqrt(size / 4 / 12))
    assert 0.8 < ratio.min() and ratio.max() < 1.25


def test_words_of_nothing_and_of_one_large_input() -> None:
    """The fine table reaches what is allowed, or else an 126th of the largest sum of eight."""
    x = jnp.zeros((4, 2000)).at[1, :100].set(1).at[2:, 1999].set(1).at[3, :40].set(0.001)
    listed, step = served.table_words(x)
    assert [np.flatnonzero(row).tolist() for row in listed] == [[], [0, 1, 2, 3], [62], [62]]
    np.testing.assert_allclose(step, np.array([0, 8 / 126, 1 / 126, 0.008]) / 126, rtol=1e-5)
    listed, step = served.table_words(x[:, 1960:])
    assert not np.any(listed) and step[2] == np.float32(1) / 126


# Decode steps.


def test_rows_of_all_sheets_in_turn(subjects: list[Subject]) -> None:
    sheets = [s.sheet.part(4, 2) for s in subjects]
    batches = list(served.mixed(sheets))
    assert len(batches) == 2
    tokens, lengths = batches[1]
    assert tokens.shape == (6, 32) and lengths.shape == (6,)
    for row in range(6):
        sheet, own = sheets[row % 3], 2 + row // 3
        width = sheet.tokens.shape[1]
        assert (tokens[row, :width] == sheet.tokens[own]).all() and not tokens[row, width:].any()
        assert lengths[row] == np.flatnonzero(sheet.counted[own])[-1] + 1


@pytest.mark.parametrize(
    ("name", "close"), [("float32", 0.02), ("products", 0.1), ("bfloat16", 0.2)]
)
def test_each_row_is_its_own_variant_s(subjects: list[Subject], name: str, close: float) -> None:
    config = subjects[0].config
    sheets = [s.sheet.part(4, 2) for s in subjects]
    base, bank = fuse(config, subjects[0].base), served.make_bank(subjects)
    found, tables = served.decode_all(config, base, bank, sheets, served.ARITHMETICS[name])
    forward = jax.jit(make_forward(config))
    for subject, sheet, own, counts in zip(subjects, sheets, found, tables, strict=True):
        params = scoring.one_bit_params(config, subject.base, subject.tuned)
        for (tokens, counted), predicted in zip(sheet.batches(), own, strict=True):
            wanted = jax.nn.log_softmax(forward(params, tokens[:, :-1]), axis=-1)
            off = np.where(counted[..., None], predicted - wanted, 0)
            assert np.abs(off).max() < close
        inputs = sum(int(np.flatnonzero(c)[-1]) + 1 for _, cs in sheet.batches() for c in cs)
        assert list(counts) == list(served.KINDS)
        for kind, count in counts.items():
            rows = inputs * (1 if kind == "head" else config.num_layers)
            size = config.intermediate_size if kind == "down" else config.hidden_size
            assert sum(count) == rows * -(-size // 32), kind


def test_a_fine_tune_s_own_weights(subjects: list[Subject]) -> None:
    """Without a delta, in float32, a decode step is the fine-tune; the more is rounded, the further
    it is from it."""
    config, sheet, tuned = subjects[0].config, subjects[0].sheet, subjects[0].tuned
    whole, forward = residual.float32_params(config, tuned), jax.jit(make_forward(config))
    off = []
    for arithmetic in served.ARITHMETICS.values():
        (found,), _ = served.decode_all(config, fuse(config, tuned), None, [sheet], arithmetic)
        squares = [
            np.square(predicted - jax.nn.log_softmax(forward(whole, tokens[:, :-1])))[counted]
            for (tokens, counted), predicted in zip(sheet.batches(), found, strict=True)
        ]
        off.append(math.sqrt(np.concatenate(squares).mean()))
    exact, products, narrow = off
    assert exact < 1e-5 < 1e-4 < products < narrow / 1.2 < 0.1, off


def test_predictions_made_elsewhere_have_the_same_marks(subjects: list[Subject]) -> None:
    subject = subjects[0]
    tuned, base = (
        residual.float32_params(subject.config, t) for t in (subject.tuned, subject.base)
    )
    examine = Examiner(subject.config, subject.sheet, tuned)
    forward = jax.jit(make_forward(subject.config))
    predicted = [
        jax.nn.log_softmax(forward(base, tokens[:, :-1]), axis=-1)
        for tokens, _ in subject.sheet.batches()
    ]
    mine, theirs = examine.judge(predicted), examine(base)
    assert mine.kl == pytest.approx(theirs.kl, rel=1e-5) and mine.kl > 0.01
    assert mine.nll == pytest.approx(theirs.nll, rel=1e-5) and mine.exact == theirs.exact


def test_a_part_of_a_sheet_is_spread() -> None:
    windows = np.arange(61)[:, None] + np.arange(5)
    part = Sheet.of_windows(windows, 16).part(16, 99)
    assert part.tokens[:, 0].tolist() == list(range(0, 61, 4)) and part.batch == 16
    assert len(Sheet.of_windows(windows, 16).part(99, 4).tokens) == 61


# Going on where it stopped.


@pytest.fixture
def measure(
    subjects: list[Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs all fine-tunes, changed or not, and says which were measured."""
    texts = Sheet.of_windows(np.arange(10)[None] + np.arange(4)[:, None], 2)
    subjects[2] = dataclasses.replace(subjects[2], sheet=texts)
    results = Results(tmp_path / "results.json")
    for subject in subjects:
        results.open(subject.name, {"title": subject.title})
    results.save()

    def again(rows: int = 2, **changes: Any) -> list[str]:
        names: list[str] = []

        def counted(group: list[Subject], rows: int) -> list[dict[str, int]]:
            names.extend(s.name for s in group)
            return [{"rows": rows} for _ in group]

        monkeypatch.setattr(served, "measure_group", counted)
        last = dataclasses.replace(subjects[2], **changes)
        made = {s.name: lambda s=s: s for s in (*subjects[:2], last)}
        served.run(made, Results(tmp_path / "results.json"), rows, progress=False)
        return names

    return again


def test_what_changed_is_measured_again(
    measure: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, base: Tensors
) -> None:
    assert measure() == ["v0", "v1", "v2"]
    assert measure() == []
    assert measure(tuned=base) == ["v2"]
    assert measure(tuned=base, rows=3) == ["v0", "v1", "v2"]
    monkeypatch.setattr(cpu_build, "library_path", lambda kernel: Path("another.so"))
    assert measure(tuned=base, rows=3) == ["v0", "v1", "v2"]


def test_what_is_kept(subjects: list[Subject], tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    made = {s.name: lambda s=s: s for s in subjects}
    for subject in subjects:
        measure_subject(subject, results, lambda name: None)
    served.run(made, results, 5, progress=False)
    measure_subject(subjects[0], results, lambda name: None)  # leaves it there
    for name, variant in publish(results, {})["variants"].items():
        kept = variant["served"]
        assert set(kept) == {"rows", "tokens", "whole", *served.ARITHMETICS, *served.OWN.values()}
        row = variant["formats"]["row"]
        assert kept["whole"] == pytest.approx({part: row[part] for part in ("nll", "kl", "exact")})
        assert kept["float32"]["kl"] == pytest.approx(row["kl"], rel=0.05), name
        assert kept["float32"]["exact"] == row["exact"] and kept["rows"] == 5
    assert Results(tmp_path / "results.json").variants == results.variants


def test_bases_that_differ(subjects: list[Subject]) -> None:
    other = dataclasses.replace(subjects[0], base=subjects[0].tuned)
    with pytest.raises(ValueError, match="v1, v0: the bases differ"):
        served.measure_group([subjects[1], other], 2)


def test_without_the_kernel(
    measure: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    with pytest.raises(ValueError, match="not built; run python -m pallas_kernels.cpu_build"):
        measure()
