"""Residuals: what is rounded comes back exactly, and what does not fit is refused."""

import json
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.layout import Params, unfuse
from zen_jax.training import residual
from zen_jax.training.bytes_tokenizer import write_tokenizer
from zen_jax.training.residual import Tensors

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def base(tiny: ModelConfig, tiny_params: Params) -> Tensors:
    tensors = {name: np.asarray(value) for name, value in unfuse(tiny, tiny_params).items()}
    return residual.round_tensors(tensors)


@pytest.fixture
def tuned(base: Tensors) -> Tensors:
    rng = np.random.default_rng(0)
    return {
        name: (value.astype(np.float32) + rng.normal(0, 1e-3, value.shape)).astype(np.float32)
        for name, value in base.items()
    }


@pytest.fixture
def family(tiny: ModelConfig, base: Tensors, tuned: Tensors, tmp_path: Path) -> Path:
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(tiny.to_hf()))
    write_tokenizer(like, 64)
    root = tmp_path / "family"
    residual.write_folder(root / "base", base, like)
    encoded = residual.encode(base, tuned)
    for name in ("one", "two"):
        path = root / "residuals" / f"{name}.safetensors"
        residual.save_residual(path, root / "base", encoded, {"name": name})
    return root


def test_what_is_rounded_comes_back_exactly(base: Tensors, tuned: Tensors) -> None:
    once = residual.decode(base, residual.encode(base, tuned))
    for name, value in once.items():
        assert value.dtype == BF16
        step = np.abs(tuned[name] - base[name].astype(np.float32)).max() / 127
        spacing = np.abs(tuned[name]) * 2.0**-8
        error = np.abs(value.astype(np.float32) - tuned[name])
        assert (error <= step / 2 + spacing + 1e-9).all(), name


def test_the_formula_by_hand() -> None:
    base = {"w": np.array([[1.0, -2.0]], BF16)}
    encoded = residual.encode(base, {"w": np.array([[1.127, -2.064]], np.float32)})
    assert encoded["w.q"].tolist() == [[127, -64]]
    assert encoded["w.scale"] == pytest.approx([1e-3], rel=1e-4)
    assert (residual.decode(base, encoded)["w"] == np.array([[1.127, -2.064]], BF16)).all()


def test_a_row_without_change_stays_the_base() -> None:
    base = {"w": np.ones((2, 3), BF16)}
    encoded = residual.encode(base, {"w": np.ones((2, 3), np.float32)})
    assert not encoded["w.q"].any()
    assert (residual.decode(base, encoded)["w"] == base["w"]).all()


def test_saved_and_loaded(family: Path, base: Tensors, tuned: Tensors) -> None:
    path = family / "residuals" / "one.safetensors"
    loaded = residual.load_residual(path, family / "base", base)
    expected = residual.decode(base, residual.encode(base, tuned))
    assert all((loaded[name] == expected[name]).all() for name in expected)


def test_full_folders(family: Path, tiny: ModelConfig, base: Tensors, tuned: Tensors) -> None:
    out = family.parent / "full"
    assert residual.write_full(family, out) == [out / "one", out / "two"]
    config, tensors = residual.read_folder(out / "two")
    assert config == tiny
    expected = residual.decode(base, residual.encode(base, tuned))
    assert all((tensors[name] == expected[name]).all() for name in expected)
    names = {path.name for path in (family / "base").iterdir()}
    assert {path.name for path in (out / "two").iterdir()} == names
    residual.write_full(family, out, ["one"])  # a second time replaces the first
    assert sorted(path.name for path in out.iterdir()) == ["one", "two"]


def test_an_unknown_name(family: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no variant is called three; there are one, two"):
        residual.write_full(family, tmp_path / "full", ["one", "three"])
    assert not (tmp_path / "full").exists()


def test_no_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is it a family"):
        residual.write_full(tmp_path, tmp_path / "full")


def test_another_base(family: Path, base: Tensors, tmp_path: Path) -> None:
    other = {name: (value * 2).astype(BF16) for name, value in base.items()}
    residual.write_folder(family / "base", other, tmp_path / "like")
    with pytest.raises(ValueError, match="another base"):
        residual.write_full(family, tmp_path / "full")


def test_a_damaged_residual(family: Path, tmp_path: Path) -> None:
    path = family / "residuals" / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"two\.safetensors cannot be read"):
        residual.write_full(family, tmp_path / "full", ["two"])
    assert not (tmp_path / "full").exists()


def test_a_place_that_holds_something_else(family: Path, tmp_path: Path) -> None:
    place = tmp_path / "full" / "one"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("the only copy")
    with pytest.raises(ValueError, match="choose another place"):
        residual.write_full(family, tmp_path / "full")
    assert (place / "thesis.txt").read_text() == "the only copy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "do not fit the base"),
        (lambda t: t.update(extra=np.zeros(1)), "do not fit the base"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(3, BF16)}),
            r"model.norm.weight is bfloat16\(3,\); expected bfloat16\(32,\)",
        ),
    ],
)
def test_residuals_that_do_not_fit(change, message: str, base: Tensors, tuned: Tensors) -> None:
    encoded = residual.encode(base, tuned)
    change(encoded)
    with pytest.raises(ValueError, match=message):
        residual.decode(base, encoded)


def test_what_cannot_be_encoded(base: Tensors, tuned: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name} is not finite"):
        residual.encode(base, tuned | {name: np.full_like(tuned[name], np.nan)})
    with pytest.raises(ValueError, match=f"{name} has shape"):
        residual.encode(base, tuned | {name: tuned[name][:-1]})
    with pytest.raises(ValueError, match="tensors differ: extra"):
        residual.encode(base, tuned | {"extra": tuned[name]})


def test_writing_many_folders_takes_no_time(family: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    residual.write_full(family, tmp_path / "full")
    assert time.monotonic() - began < 5
    assert jax.tree.leaves(residual.read_folder(tmp_path / "full" / "one")[1])
