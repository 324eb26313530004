"""Fusing and its inverse, for tensors and for deltas."""

import jax
import numpy as np
import pytest

from zen_jax.config import ModelConfig
from zen_jax.delta.apply import effective_weight, materialise
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import fuse, fuse_delta, tensor_shapes, unfuse

UNTIED = ModelConfig(40, 24, 16, 1, 6, 2, 4, 32)


def numbered(config: ModelConfig) -> dict[str, np.ndarray]:
    """Every element another number."""
    tensors, start = {}, 0
    for name, shape in tensor_shapes(config).items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    return tensors


def test_fusing_goes_back() -> None:
    tensors = numbered(UNTIED)
    back = unfuse(UNTIED, fuse(UNTIED, tensors))
    assert set(back) == set(tensors)
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)


def test_a_group_holds_the_queries_key_and_value_of_one_kv_head() -> None:
    tensors = numbered(UNTIED)
    qkv = fuse(UNTIED, tensors)["layers"][0]["qkv"]
    at = "model.layers.0.self_attn."
    q, k, v = (tensors[f"{at}{x}_proj.weight"] for x in "qkv")
    assert qkv.shape == (2, (3 + 2) * 4, 24)
    assert np.array_equal(qkv[1], np.concatenate([q[12:24], k[4:8], v[4:8]]))


def test_parameters_are_counted() -> None:
    assert UNTIED.parameters == sum(t.size for t in numbered(UNTIED).values())


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_a_fused_delta_is_the_delta_of_the_fused(config, base, make_variant, scale) -> None:
    deltas = make_variant(1, scale=scale)
    whole = materialise(base, fuse_delta(config, deltas))
    for name, tensor in unfuse(config, base).items():
        want = effective_weight(tensor, _broadcast(deltas[name]))
        assert np.array_equal(unfuse(config, whole)[name], want), name


def _broadcast(delta: WeightDelta) -> WeightDelta:
    if delta.bits is None or delta.scale is None:
        return delta
    return WeightDelta(delta.bits, np.broadcast_to(delta.scale, delta.bits.shape[:2]))


def test_parts_that_only_some_sources_have(config, base, make_variant) -> None:
    deltas = make_variant(2)
    two = make_variant(2, levels=2)
    k, v = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "kv")
    deltas[k] = two[k]
    deltas[v] = WeightDelta(dense=np.ones(tensor_shapes(config)[v], np.float32))
    whole = unfuse(config, materialise(base, fuse_delta(config, deltas)))
    plain = unfuse(config, base)
    for name in (k, v):
        want = effective_weight(plain[name], deltas[name])
        np.testing.assert_allclose(whole[name], want, rtol=1e-6, atol=1e-6)


def test_wrong_tensors_are_named() -> None:
    tensors = numbered(UNTIED)
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        fuse(UNTIED, tensors)
    with pytest.raises(ValueError, match=r"do not belong to this model: extra"):
        fuse(UNTIED, tensors | {"model.norm.weight": norm, "extra": norm})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\); expected \(24,\)"):
        fuse(UNTIED, tensors | {"model.norm.weight": np.zeros(3)})


def test_a_delta_that_does_not_fit_is_named(config, make_variant) -> None:
    deltas = make_variant(3)
    name = "model.layers.0.mlp.up_proj.weight"
    bad = WeightDelta(np.zeros((1, 128, 7), np.uint8), np.zeros((1, 128), np.float32))
    with pytest.raises(ValueError, match=r"up_proj\.weight: bits have shape"):
        fuse_delta(config, deltas | {name: bad})
    with pytest.raises(ValueError, match="belong together"):
        WeightDelta(bits=np.zeros((1, 128, 8), np.uint8))


def test_an_empty_delta_is_the_base(config, base) -> None:
    empty = fuse_delta(config, {name: WeightDelta() for name in tensor_shapes(config)})
    whole = materialise(base, empty)
    same = jax.tree.map(lambda a, b: np.array_equal(a, np.asarray(b, np.float32)), whole, base)
    assert all(jax.tree.leaves(same))
