"""OPCM by factors: the worked answers, and at every step what the dense form gives."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from zen_jax.merge import lora
from zen_jax.merge.combine import linear, ties
from zen_jax.merge.folding import place_any
from zen_jax.merge.lora import Factors
from zen_jax.merge.opcm import Opcm, begin
from zen_jax.merge.opcm import step as dense_step
from zen_jax.merge.opcm_lora import Merge, Merger, Share, mean_factors, step
from zen_jax.merge.spectrum import in_float64

GOLDEN = Path(__file__).parents[2] / "golden" / "lora"
PREVIOUS = np.diag([4.0, 3, 2, 1])
METHODS = st.builds(
    Opcm,
    st.sampled_from([0.0, 0.3, 0.5, 0.8]),
    st.sampled_from(["code", "doc"]),
    st.sampled_from(["keep", "drop"]),
)


def factors(seed: int, rank: int, shape: tuple[int, int] = (7, 9)) -> Factors:
    rng = np.random.default_rng(seed)
    return Factors(rng.normal(size=(rank, shape[1])), rng.normal(size=(shape[0], rank)))


def of_dense(matrix: np.ndarray) -> Factors:
    return Factors(matrix, np.eye(len(matrix)))


def first(delta: Factors) -> Share:
    return Share(1.0, lora.norm(delta))


@pytest.mark.parametrize(("split", "zeros"), [("code", 1), ("doc", 2)])
def test_worked_answer(split, zeros) -> None:
    cleaned = np.ones((4, 4)) - np.eye(4)
    cleaned[:zeros, :zeros] = 0
    old, new = of_dense(PREVIOUS), Factors(np.ones((1, 4)), np.ones((4, 1)))
    after, share = step(old, first(old), 1, new, Opcm(0.5, split))
    found = share.factor * after.dense() - PREVIOUS
    np.testing.assert_allclose(found, cleaned, atol=1e-12)
    assert np.sum(found * PREVIOUS) == pytest.approx(0, abs=1e-12)
    assert lora.norm(after) == pytest.approx((np.linalg.norm(PREVIOUS) + 4) / 2)


@given(st.integers(0, 10**6), METHODS, st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_factored_equals_dense(seed: int, method: Opcm, ranks: list[int]) -> None:
    """Step after step in float64, without a cut: to 1e-10."""
    parts = [factors(seed + i, rank) for i, rank in enumerate(ranks)]
    dense = in_float64(lambda: begin(place_any(parts[0].dense())))()
    merged, share = parts[0], first(parts[0])
    lengths = [lora.norm(part) for part in parts]
    for count, part in enumerate(parts[1:], start=1):
        dense, _ = dense_step(dense, place_any(part.dense()), method)
        merged, share = step(merged, share, count, part, method)
        scale = np.abs(np.asarray(dense.merged)).max()
        np.testing.assert_allclose(merged.dense(), dense.merged, atol=1e-10 * scale)
        assert share.factor == pytest.approx(dense.factor, rel=1e-10)
        assert lora.norm(merged) == pytest.approx(np.mean(lengths[: count + 1]), rel=1e-10)
    assert jax.dtypes.canonicalize_dtype(np.float64) == np.float32  # nothing was left switched on


@given(st.integers(0, 10**6), METHODS)
def test_it_turns_with_its_input_and_does_not_see_the_gauge(seed: int, method: Opcm) -> None:
    old, new = factors(seed, 2), factors(seed + 1, 3)
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (7, 9))
    plain, _ = step(old, first(old), 1, new, method)
    turned = [Factors(f.a @ right, left @ f.b) for f in (old, new)]
    found, _ = step(turned[0], first(old), 1, turned[1], method)
    np.testing.assert_allclose(found.dense(), left @ plain.dense() @ right, atol=1e-9)
    g = rng.normal(size=(3, 3)) + 3 * np.eye(3)
    other, _ = step(old, first(old), 1, Factors(np.linalg.inv(g) @ new.a, new.b @ g), method)
    np.testing.assert_allclose(other.dense(), plain.dense(), atol=1e-8)


@given(st.integers(0, 10**6), METHODS)
def test_a_duplicate_of_the_only_member_changes_nothing(seed: int, method: Opcm) -> None:
    old = factors(seed, 3)
    after, share = step(old, first(old), 1, old, method)
    np.testing.assert_allclose(after.dense(), old.dense(), atol=1e-10)
    assert share.factor == pytest.approx(1)


def test_the_norm_rule_holds_for_what_a_cut_leaves() -> None:
    merger = Merger("opcm", 3)
    merge = Merge({"w": factors(0, 3)})
    lengths = [lora.norm(factors(i, 3)) for i in range(6)]
    for i in range(1, 6):
        merge = merger.add(merge, {"w": factors(i, 3)})
        assert merge.adapter["w"].rank == 3
        assert lora.norm(merge.adapter["w"]) == pytest.approx(np.mean(lengths[: i + 1]))
        assert merge.shares["w"].length == pytest.approx(np.mean(lengths[: i + 1]))
    assert merge.count == 6


def test_means_are_running_means() -> None:
    parts = [factors(i, 2) for i in range(4)]
    exact, by_factors = Merge({"w": parts[0]}), Merge({"w": parts[0]})
    for part in parts[1:]:
        exact = Merger("mean_delta", 100).add(exact, {"w": part})
        by_factors = Merger("mean_factors", 2).add(by_factors, {"w": part})
    mean = np.mean([part.dense() for part in parts], 0)
    np.testing.assert_allclose(exact.adapter["w"].dense(), mean, atol=1e-12)
    crossed = np.mean([p.b for p in parts], 0) @ np.mean([p.a for p in parts], 0)
    np.testing.assert_allclose(by_factors.adapter["w"].dense(), crossed, atol=1e-12)
    assert np.abs(crossed - mean).max() > 0.1  # cross terms
    with pytest.raises(ValueError, match="w: factors have ranks 2 and 3"):
        Merger("mean_factors", 2).add(Merge({"w": parts[0]}), {"w": factors(9, 3)})
    assert mean_factors(parts[0], parts[0], 3).dense() == pytest.approx(parts[0].dense())


@pytest.mark.parametrize("operation", ["mean_delta", "opcm"])
def test_a_weight_that_one_side_lacks_is_unchanged_there(operation) -> None:
    one, other = factors(0, 2), factors(1, 2)
    found = Merger(operation, 4).add(Merge({"q": one, "v": other}), {"q": other})
    alone = Merger(operation, 4).add(Merge({"v": other}), {"v": Factors(0 * one.a, one.b)})
    np.testing.assert_allclose(found.adapter["v"].dense(), alone.adapter["v"].dense(), atol=1e-12)
    new = Merger(operation, 4).add(Merge({"q": one}), {"v": other})
    np.testing.assert_allclose(new.adapter["v"].dense(), other.dense() / 2, atol=1e-12)


def test_inputs_are_left_as_they_were() -> None:
    old, new = factors(0, 2), factors(1, 2)
    kept = [part.copy() for part in (old.a, old.b, new.a, new.b)]
    for operation in ("mean_delta", "mean_factors", "opcm"):
        Merger(operation, 1).add(Merge({"w": old}), {"w": new})
    for part, before in zip((old.a, old.b, new.a, new.b), kept, strict=True):
        np.testing.assert_array_equal(part, before)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(("average", 2), "operation is 'average'"), (("opcm", 0), "rank is 0")],
)
def test_mergers_that_cannot_be(wrong, said) -> None:
    with pytest.raises(ValueError, match=said):
        Merger(*wrong)


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match="w: task vectors have shapes"):
        Merger("opcm", 2).add(Merge({"w": factors(0, 2)}), {"w": factors(1, 2, (9, 7))})


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_what_peft_combines(method) -> None:
    """PEFT 0.21.2's own result for two adapters of alpha / r = 2."""
    adapters = []
    for name in ("one", "two"):
        file = load_file(GOLDEN / name / "adapter_model.safetensors")
        modules = {key.split(".lora_")[0] for key in file}
        adapters.append(
            {
                m.removeprefix("base_model.model.") + ".weight": Factors(
                    file[f"{m}.lora_A.weight"], 2 * file[f"{m}.lora_B.weight"]
                )
                for m in modules
            }
        )
    made = (linear if method == "linear" else ties)(adapters)
    wanted = load_file(GOLDEN / "combined.safetensors")
    seen = 0
    for key, a in wanted.items():
        if not key.startswith(f"{method}.") or not key.endswith("lora_A"):
            continue
        weight = key.removeprefix(f"{method}.").removesuffix(".lora_A")
        product = wanted[key.removesuffix("A") + "B"] @ a
        np.testing.assert_allclose(made[weight].dense(), product, atol=1e-5)
        seen += 1
    assert seen == 4
