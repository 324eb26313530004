"""A layer at a time comes to what the whole models say, and nearer than what it begins with."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.delta import distill_layers as module
from zen_jax.delta.compress import compress_tensor, keep_vector
from zen_jax.delta.distill_layers import Samples, Sides, Walk, distill_layers, own_moments
from zen_jax.delta.distill_logits import distill_logits
from zen_jax.delta.distill_scales import Training
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import fuse, tensor_shapes
from zen_jax.model import make_forward

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    tie_word_embeddings=True,
)


@functools.cache
def _sides(tied: bool = True, scale: str = "row") -> Sides:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    rng = np.random.default_rng(5)
    base, tuned, deltas = {}, {}, {}
    for name, shape in tensor_shapes(config).items():
        vector = len(shape) == 1
        base[name] = np.ones(shape) if vector else rng.normal(0, 0.3, shape)
        tuned[name] = base[name] + rng.normal(0, 0.05, shape)
        base[name], tuned[name] = (x[name].astype(np.float32) for x in (base, tuned))
        keep = keep_vector if vector else functools.partial(_bits, scale=scale)
        deltas[name] = keep(base[name], tuned[name])
    return Sides(config, base.__getitem__, tuned.__getitem__, deltas.__getitem__)


def _bits(base: np.ndarray, tuned: np.ndarray, scale: str) -> WeightDelta:
    return compress_tensor(base, tuned, scale=scale)[0]  # pyright: ignore[reportArgumentType]


def _samples(seed: int, rows: int) -> Samples:
    """Some positions more likely than others, the last ones of the first row padding."""
    rng = np.random.default_rng(seed)
    tokens = (rng.random((rows, 17)) ** 3 * 48).astype(np.int32)
    counted = np.ones((rows, 16), np.float32)
    counted[0, 10:] = 0
    counted[1, :5] = 0
    return Samples(tokens, counted)


TRAIN, HELD = _samples(1, 22), _samples(2, 5)


def _divergence(sides: Sides, deltas: dict[str, WeightDelta], samples: Samples) -> float:
    forward = jax.jit(make_forward(sides.config))
    names = tensor_shapes(sides.config)
    own = fuse(sides.config, {n: sides.own(n) for n in names})
    mine = fuse(sides.config, {n: sides.whole(n, deltas.get(n)) for n in names})
    tokens = samples.tokens[:, :-1]
    p, q = (jax.nn.log_softmax(forward(w, tokens)) for w in (own, mine))
    each = np.asarray(jnp.sum(jnp.exp(p) * (p - q), axis=-1), np.float64)
    return float((each * samples.counted).sum() / samples.counted.sum())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_layers_come_to_what_whole_models_say(tied: bool, scale: str, tmp_path: Path) -> None:
    sides = _sides(tied, scale)
    found = distill_layers(sides, TRAIN, HELD, Walk(rows=4), tmp_path)
    assert found.before == pytest.approx(_divergence(sides, {}, HELD), rel=1e-4)
    assert found.after == pytest.approx(_divergence(sides, found.deltas, HELD), rel=1e-4)
    assert found.after < (0.8 if tied else 0.95) * found.before  # an embedding alone stays
    matrices = {n for n, shape in tensor_shapes(sides.config).items() if len(shape) == 2}
    assert set(found.deltas) == matrices - (set() if tied else {"model.embed_tokens.weight"})
    for name, delta in found.deltas.items():
        assert delta.bits.shape == sides.delta(name).bits.shape
        assert delta.scale.shape == sides.delta(name).scale.shape
    assert all(layer["fit_after"] < layer["fit_before"] for layer in found.layers)


def test_training_a_layer_brings_its_outputs_nearer(tmp_path: Path) -> None:
    sides = _sides()
    walk = Walk("none", training=Training(24, 2e-4, every=6), rows=4)
    # So little text does not say much of another: what is learnt is compared on itself.
    found = distill_layers(sides, TRAIN, TRAIN, walk, tmp_path)
    assert all(layer["train_after"] < 0.999 * layer["train_before"] for layer in found.layers), (
        found.layers
    )
    assert found.after == pytest.approx(_divergence(sides, found.deltas, TRAIN), rel=1e-4)
    for name, delta in found.deltas.items():
        np.testing.assert_array_equal(delta.bits, sides.delta(name).bits)


def test_one_layer_of_each_model_is_read_at_a_time(tmp_path: Path) -> None:
    sides, order = _sides(), list[str]()

    def read(name: str) -> np.ndarray:
        order.append(name.split(".")[2])
        return sides.tuned(name)

    distill_layers(dataclasses.replace(sides, tuned=read), TRAIN, HELD, Walk(rows=8), tmp_path)
    visits = [layer for i, layer in enumerate(order) if layer in "01" and layer != order[i - 1]]
    assert visits == ["0", "1", "0", "1"]  # once for the tied head, once to be fitted


def test_a_walk_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = _sides()
    whole = distill_layers(sides, TRAIN, HELD, Walk(rows=8), tmp_path / "a", _nothing(tmp_path))
    kept, calls = module.write_arrays, list[str]()

    def dying(path: Path, *rest: object) -> None:
        kept(path, *rest)  # pyright: ignore[reportArgumentType]
        calls.append(path.name)
        if path.name == "layer-1.safetensors" and calls.count(path.name) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_arrays", dying)
    (tmp_path / "b").mkdir()
    with pytest.raises(KeyboardInterrupt):
        distill_layers(sides, TRAIN, HELD, Walk(rows=8), tmp_path / "b")
    again = distill_layers(sides, TRAIN, HELD, Walk(rows=8), tmp_path / "b")
    assert calls.count("layer-0.safetensors") == 1
    assert again.layers == whole.layers and again.after == whole.after
    for name, delta in whole.deltas.items():
        np.testing.assert_array_equal(again.deltas[name].bits, delta.bits)
        np.testing.assert_array_equal(again.deltas[name].scale, delta.scale)


def _nothing(root: Path):
    (root / "a").mkdir()
    return lambda done, total: None


def test_padding_is_not_seen() -> None:
    sides = _sides()
    other = TRAIN.tokens.copy()
    other[0, 11:] = 3
    a, b = (dict(own_moments(sides, Samples(t, TRAIN.counted), 8)) for t in (TRAIN.tokens, other))
    for name, moment in a.items():
        np.testing.assert_allclose(moment, b[name], rtol=1e-5, atol=1e-6)
        assert np.linalg.eigvalsh(moment).min() > -1e-4 * np.trace(moment)


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_logits_come_nearer_and_only_scales_change(scale: str) -> None:
    sides = _sides(scale=scale)
    training = Training(30, 2e-4, every=10)
    deltas, done = distill_logits(sides, {}, TRAIN, TRAIN, training, rows=8)
    assert done.before == pytest.approx(_divergence(sides, {}, TRAIN), rel=1e-4)
    assert done.best == pytest.approx(_divergence(sides, deltas, TRAIN), rel=1e-4)
    assert done.best < 0.97 * done.before
    for name, delta in deltas.items():
        np.testing.assert_array_equal(delta.bits, sides.delta(name).bits)
        assert delta.scale.shape == sides.delta(name).scale.shape


def test_padding_has_no_part_in_a_layers_loss() -> None:
    rng = np.random.default_rng(3)
    fixed = {
        name: (jnp.asarray(rng.normal(size=shape), jnp.float32), None)
        for name, shape in tensor_shapes(CONFIG).items()
        if ".layers.0." in name
    }
    x, y = (jnp.asarray(rng.normal(size=(2, 6, CONFIG.hidden_size)), jnp.float32) for _ in "xy")
    seen = jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]], jnp.float32)
    loss = module._layer_loss(CONFIG, 0)
    whole = loss({}, fixed, (x, y, seen))
    assert loss({}, fixed, (x, y + (1 - seen[..., None]) * 9, seen)) == whole
    assert loss({}, fixed, (x, y + seen[..., None] * 9, seen)) != whole
    # A mean over what is seen: the rest counts neither above nor below the line.
    alone = loss({}, fixed, (x[:1, :4], y[:1, :4], seen[:1, :4]))
    other = loss({}, fixed, (x[1:, :5], y[1:, :5], seen[1:, :5]))
    assert float(whole) == pytest.approx((4 * float(alone) + 5 * float(other)) / 9, rel=1e-5)
