"""The study of formats: known errors and bytes, measurements, going on, and a page that is true."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from zen_jax import evaluate
from zen_jax.config import ModelConfig
from zen_jax.evaluation.sheet import Sheet
from zen_jax.layout import EMBED, Params, unfuse
from zen_jax.model import make_forward
from zen_jax.training import residual, scoring
from zen_jax.training.format_study import codecs, study
from zen_jax.training.format_study.codecs import Codec
from zen_jax.training.format_study.formats import FORMATS, Format, share_of_zeros, store
from zen_jax.training.format_study.measure import Examiner
from zen_jax.training.format_study.study import Results, Subject, measure_subject, publish
from zen_jax.training.residual import Tensors

BF16 = ml_dtypes.bfloat16


def relative_error(codec: Codec, base: np.ndarray, tuned: np.ndarray) -> float:
    found, _ = codec(base, tuned)
    assert found.dtype == np.float32
    delta = tuned.astype(np.float32) - base.astype(np.float32)
    return float(np.linalg.norm(found - tuned.astype(np.float32)) / np.linalg.norm(delta))


def of(name: str) -> Codec:
    return FORMATS[name].matrix


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("row", 0.603),
        ("matrix", 0.603),
        ("row-plus", 0.603),
        ("row-column", 0.603),
        ("row-2", 0.362),
        ("row-3", 0.242),
        ("row-column-2", 0.362),
        ("row-2-together", 0.343),  # Max (1960): the best four levels, distortion 0.1175
        ("row-3-together", 0.194),  # eight levels that are sums of three; the best eight: 0.186
        ("ternary", 0.436),  # Max (1960): the best three levels, distortion 0.1902
        ("two-bit", 0.345),  # the best four evenly spaced levels, distortion 0.1188
    ],
)
def test_the_error_of_a_normal_delta(name: str, expected: float) -> None:
    delta = np.random.default_rng(0).normal(0, 1e-3, (1024, 1024)).astype(np.float32)
    assert relative_error(of(name), np.zeros_like(delta), delta) == pytest.approx(
        expected, abs=3e-3
    )


def test_the_error_of_a_laplace_delta() -> None:
    delta = np.random.default_rng(0).laplace(0, 1, (64, 8192)).astype(np.float32)
    assert relative_error(of("row"), 0 * delta, delta) == pytest.approx(0.7071, abs=5e-3)


def test_mostly_zeros() -> None:
    """A normal update of 3e-5 to weights of 0.02 in bfloat16, and inputs of mean 0.1 sigma."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, (256, 2048)).astype(BF16)
    tuned = (base.astype(np.float32) + rng.normal(0, 3e-5, base.shape)).astype(BF16)
    assert share_of_zeros({"w": base}, {"w": tuned}) == pytest.approx(0.68, abs=0.01)
    x = rng.normal(0.1, 1, (64, 2048))
    start = base.astype(np.float64)
    true = x @ (tuned.astype(np.float64) - start).T

    def error(codec: Codec) -> float:
        found = codec(base, tuned)[0].astype(np.float64)
        return float(np.linalg.norm(x @ (found - start).T - true) / np.linalg.norm(true))

    assert error(of("row")) == pytest.approx(0.87, abs=0.02)
    assert error(of("row-plus")) > 1.5
    assert error(of("ternary-zeros")) == pytest.approx(0.51, abs=0.02)
    assert error(of("ternary")) <= error(of("ternary-zeros"))


def test_levels_fitted_together_hold_a_ternary_code() -> None:
    """Equal scales of two levels give -2a, 0 and 2a; a level that takes what is left cannot."""
    rng = np.random.default_rng(0)
    delta = rng.normal(0, 1, (64, 1024)) * (rng.random((64, 1024)) < 0.4)
    delta, base = delta.astype(np.float32), np.zeros((64, 1024), np.float32)
    together, apart, ternary = (
        relative_error(of(name), base, delta) for name in ("row-2-together", "row-2", "ternary")
    )
    assert together <= ternary < apart - 0.1


def test_one_level_is_the_same_in_turn_and_together() -> None:
    base, tuned = np.random.default_rng(0).normal(size=(2, 16, 44)).astype(np.float32)
    tuned[:, ::3] = base[:, ::3]
    mine, served = codecs.signs_in_turn(base, tuned, levels=1), codecs.signs(base, tuned)
    np.testing.assert_allclose(mine[0], served[0], rtol=1e-6)
    assert mine[1] == served[1]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("rank", [1, 5, 24])
def test_low_rank_is_the_best_of_its_rank(shape: tuple[int, int], rank: int) -> None:
    rng = np.random.default_rng(rank)
    base, tuned = rng.normal(size=(2, *shape)).astype(np.float32)
    s = np.linalg.svd((tuned - base).astype(np.float64), compute_uv=False)
    best = math.sqrt(np.sum(s[rank:] ** 2) / np.sum(s**2))
    found, nbytes = codecs.low_rank(base, tuned, rank=rank, bf16=False)
    assert np.linalg.norm(found - tuned) / np.linalg.norm(tuned - base) == pytest.approx(
        best, abs=1e-5
    )
    assert nbytes == 4 * rank * (24 + 40)


def test_low_rank_at_equal_bytes() -> None:
    rng = np.random.default_rng(0)
    base, tuned = rng.normal(size=(2, 64, 128)).astype(np.float32)
    for levels in (1, 2, 3):
        _, wanted = codecs.signs(base, tuned, levels=levels)
        _, nbytes = codecs.low_rank(base, tuned, levels=levels)
        assert wanted - 2 * (64 + 128) < nbytes <= wanted
    assert codecs.rank_for((256, 256), 256 * (32 + 4)) == 9
    assert codecs.rank_for((4, 4), 1) == 1
    assert codecs.rank_for((4, 400), 10**9) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", 0),
        ("row", 5 * (2 + 4)),
        ("row-plus", 5 * (2 + 4)),
        ("row-bf16", 5 * (2 + 2)),
        ("matrix", 5 * 2 + 4),
        ("row-column", 5 * 2 + 4 * (5 + 13)),
        ("row-column-bf16", 5 * 2 + 2 * (5 + 13)),
        ("row-2", 2 * 5 * (2 + 4)),
        ("row-3", 3 * 5 * (2 + 4)),
        ("row-2-together", 2 * 5 * (2 + 4)),
        ("row-3-together", 3 * 5 * (2 + 4)),
        ("row-column-2", 2 * (5 * 2 + 4 * (5 + 13))),
        ("ternary", 5 * (3 + 4)),
        ("ternary-zeros", 5 * (3 + 4)),
        ("two-bit", 5 * (4 + 4)),
        ("svd-1", 2 * 1 * (5 + 13)),
        ("svd-3", 2 * 2 * (5 + 13)),
        ("bf16-delta", 2 * 5 * 13),
        ("tuned", 2 * 5 * 13),
    ],
)
def test_bytes(name: str, expected: int) -> None:
    base, tuned = np.random.default_rng(0).normal(size=(2, 5, 13)).astype(np.float32)
    found, nbytes = of(name)(base, tuned)
    assert nbytes == expected
    assert found.shape == base.shape and found.dtype == np.float32


def test_what_comes_back_exactly() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(8, 24)).astype(np.float32)
    sign = rng.choice(np.array([-1, 1], np.float32), base.shape)
    a, b = rng.uniform(1, 2, (8, 1)), rng.uniform(1, 2, (1, 24))
    deltas = {
        "row": a * sign,
        "row-column": a * b * sign,
        "ternary": a * sign * (np.arange(24) % 3 > 0),
        "row-2-together": a * sign * np.where(np.arange(24) % 3 > 0, 0.3, 1.1),
        "row-3-together": a * sign * (np.arange(24) % 4 + 0.5),
        "two-bit": a * sign * np.where(np.arange(24) % 3 > 0, 0.5, 1.5),
        "svd-1": a @ b,
    }
    for name, delta in deltas.items():
        tuned = (base + delta).astype(np.float32)
        limit = 1e-2 if name == "svd-1" else 1e-6  # factors are bfloat16
        assert relative_error(of(name), base, tuned) < limit, name


def test_no_change_costs_no_error() -> None:
    base = np.random.default_rng(0).normal(size=(8, 24)).astype(BF16)
    for name, chosen in FORMATS.items():
        found, _ = chosen.matrix(base, base)
        assert (found == base.astype(np.float32)).all(), name


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_shapes_that_differ(name: str) -> None:
    with pytest.raises(ValueError, match="shapes"):
        of(name)(np.zeros((2, 3)), np.zeros((3, 2)))


def test_bfloat16_scales_are_rounded() -> None:
    base, tuned = np.zeros((1, 8), np.float32), np.full((1, 8), 1.001, np.float32)
    assert codecs.signs(base, tuned, bf16=True)[0][0, 0] == 1.0
    assert codecs.signs_row_column(base, tuned, bf16=True)[0][0, 0] == 1.0
    assert codecs.bf16_delta(base, tuned)[0][0, 0] == 1.0


# Whole fine-tunes.


@pytest.fixture
def base(tiny: ModelConfig, tiny_params: Params) -> Tensors:
    tensors = {name: np.asarray(value) for name, value in unfuse(tiny, tiny_params).items()}
    return residual.round_tensors(tensors)


@pytest.fixture
def tuned(base: Tensors) -> Tensors:
    rng = np.random.default_rng(0)
    moved = {n: v.astype(np.float32) + rng.normal(0, 0.02, v.shape) for n, v in base.items()}
    return residual.round_tensors(moved)


def examples() -> list[evaluate.Example]:
    rng = np.random.default_rng(0)
    return [(list(rng.integers(0, 99, 2 + n)), list(rng.integers(0, 99, 3))) for n in range(5)]


@pytest.fixture
def subject(tiny: ModelConfig, base: Tensors, tuned: Tensors) -> Subject:
    chosen = tuple(FORMATS[name] for name in ("base", "row", "tuned"))
    return Subject("one", "does one", tiny, base, tuned, Sheet.of_examples(examples(), 2), chosen)


def test_formats_differ() -> None:
    assert len({chosen.spec for chosen in FORMATS.values()}) == len(FORMATS)


def test_each_part_takes_its_codec(base: Tensors, tuned: Tensors) -> None:
    vectors = [n for n, v in base.items() if v.ndim == 1]
    matrix = "model.layers.0.mlp.up_proj.weight"
    kept = store(FORMATS["row-embed-whole"], base, tuned)
    assert (kept.tensors[EMBED] == tuned[EMBED].astype(np.float32)).all()
    assert (kept.tensors[matrix] != tuned[matrix].astype(np.float32)).any()
    assert all((kept.tensors[n] == tuned[n].astype(np.float32)).all() for n in vectors)
    given = store(FORMATS["row-embed-shared"], base, tuned)
    assert (given.tensors[EMBED] == base[EMBED].astype(np.float32)).all()
    assert kept.nbytes - given.nbytes == 2 * base[EMBED].size
    alone = store(FORMATS["base"], base, tuned)
    assert alone.nbytes == 0 and alone.error == 1
    assert all((alone.tensors[n] == base[n].astype(np.float32)).all() for n in base)
    whole = store(FORMATS["tuned"], base, tuned)
    assert whole.error == 0 and whole.nbytes == 2 * sum(v.size for v in base.values())


def test_the_default_is_what_is_served(tiny: ModelConfig, base: Tensors, tuned: Tensors) -> None:
    mine = residual.float32_params(tiny, store(FORMATS["row"], base, tuned).tensors)
    served = scoring.one_bit_params(tiny, base, tuned)
    jax.tree.map(np.testing.assert_array_equal, mine, served)


def test_tensors_that_differ(base: Tensors, tuned: Tensors) -> None:
    with pytest.raises(ValueError, match="tensors differ: extra"):
        store(FORMATS["row"], base, tuned | {"extra": np.zeros(1)})


def test_marks_of_answers(subject: Subject) -> None:
    params = residual.float32_params(subject.config, subject.tuned)
    examiner = Examiner(subject.config, subject.sheet, params)
    own = examiner(params)
    assert own.kl == pytest.approx(0, abs=1e-6)
    assert own.exact == evaluate.exact_match(subject.config, params, examples())
    # its own greedy answers are all given exactly
    prompts = [prompt for prompt, _ in examples()]
    given = [evaluate.greedy(subject.config, params, p, -1, 3) for p in prompts]
    sheet = Sheet.of_examples(list(zip(prompts, given, strict=True)), 2)
    assert Examiner(subject.config, sheet, params)(params).exact == 1


def test_marks_of_text(tiny: ModelConfig, base: Tensors, tuned: Tensors) -> None:
    windows = np.random.default_rng(0).integers(0, 256, (3, 9))
    models = [residual.float32_params(tiny, t) for t in (base, tuned)]
    marks = Examiner(tiny, Sheet.of_windows(windows, 2), models[1])(models[0])
    assert marks.exact is None
    bits = evaluate.bits_per_byte(tiny, models[0], windows)
    assert marks.nll == pytest.approx(bits * math.log(2), rel=1e-5)
    forward = jax.jit(make_forward(tiny))
    p, q = (np.asarray(forward(m, windows[:, :-1]), np.float64) for m in models[::-1])
    p, q = (x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True)) for x in (p, q))
    assert marks.kl == pytest.approx(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)), rel=1e-4)


@pytest.mark.parametrize(
    ("windows", "message"),
    [(np.full((1, 5), 300), "tokens outside 0..263"), (np.zeros((1, 99)), "longer than 64")],
)
def test_sheets_that_do_not_fit(
    windows: np.ndarray, message: str, tiny: ModelConfig, tiny_params: Params
) -> None:
    with pytest.raises(ValueError, match=message):
        Examiner(tiny, Sheet.of_windows(windows, 1), tiny_params)


def test_no_examples() -> None:
    for wrong in ([], [([], [1])]):
        with pytest.raises(ValueError, match="at least one example"):
            Sheet.of_examples(wrong, 1)


# Going on where it stopped.


class Counted:
    """Measures nothing, and counts; interrupts after some."""

    def __init__(self, limit: int = 99) -> None:
        self.names: list[str] = []
        self.limit = limit

    def __call__(self, subject: Subject, chosen: Format, examine: Examiner) -> dict[str, float]:
        if len(self.names) == self.limit:
            raise KeyboardInterrupt
        self.names.append(chosen.name)
        return {"bytes": 1}


@pytest.fixture
def measured(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs the subject, changed or not, and says which formats were measured."""

    def again(limit: int = 99, **changes: object) -> list[str]:
        counted = Counted(limit)
        monkeypatch.setattr(study, "measure_format", counted)
        changed = dataclasses.replace(subject, **changes)
        try:
            measure_subject(changed, Results(tmp_path / "results.json"), lambda name: None)
        except KeyboardInterrupt:
            pass
        return counted.names

    return again


def test_going_on(measured: Callable[..., list[str]]) -> None:
    assert measured(limit=2) == ["base", "row"]
    assert measured() == ["tuned"]
    assert measured() == []


def test_what_changed_is_measured_again(
    measured: Callable[..., list[str]], subject: Subject
) -> None:
    everything = ["base", "row", "tuned"]
    assert measured() == everything
    assert measured(tuned=subject.base) == everything
    assert measured(tuned=subject.base, sheet=Sheet.of_examples(examples()[1:], 2)) == everything
    assert measured() == everything
    other = dataclasses.replace(FORMATS["row"], matrix=codecs.signs_plus)
    assert measured(formats=(FORMATS["base"], other)) == ["row"]


def test_damaged_results(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"variants": '):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match="holds no results.*remove it"):
            Results(tmp_path / "results.json")


def test_what_is_measured(subject: Subject, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    names: list[str] = []
    measure_subject(subject, results, names.append)
    (variant,) = publish(results, {"about": 1})["variants"].values()
    assert names == list(variant["formats"]) == ["base", "row", "tuned"]
    assert variant["bf16_bytes"] == variant["formats"]["tuned"]["bytes"]
    assert variant["tokens"] == 3 * 5 and variant["answers"]
    row = variant["formats"]["row"]
    assert set(row) == {"bytes", "error", "nll", "kl", "exact"}
    assert row["bytes"] == store(FORMATS["row"], subject.base, subject.tuned).nbytes
    assert 0 < row["kl"] < variant["formats"]["base"]["kl"]
    assert Results(tmp_path / "results.json").variants == results.variants
