"""The parameters of a model, described once: name, shape, logical axes, how they are fused from a
checkpoint's tensors.

Initialisation, sharding, loading and the bank's shapes all follow from `param_specs`. In ``Params``
q, k and v of a layer lie fused as [K, (N/K + 2) H, D], one group a kv head (its query heads, then
its key, then its value), and gate and up as [2, F, D], so that a shard along K or F keeps whole
groups. Tensors in files keep Hugging Face names and shapes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zen_jax import host_memory
from zen_jax.config import ModelConfig
from zen_jax.delta.format import WeightDelta

Array = Any
Params = dict[str, Any]

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One entry of ``Params``.

    Attributes:
      shape: as held; a linear weight is [*out, I].
      axes: a logical axis or None for each dimension; see `zen_jax.sharding`.
      kind: "linear", "embed" (rows looked up by token, perhaps the head too) or "vector".
      sources: the Hugging Face tensors that it is fused from, in order.
      init_std: standard deviation of a random start; 0 means ones.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kind: Literal["linear", "embed", "vector"]
    sources: tuple[str, ...]
    init_std: float = 0.02


def param_specs(config: ModelConfig) -> Params:
    """The tree of `ParamSpec` for a model; ``Params`` has the same structure."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    n, k, v = config.num_heads, config.num_kv_heads, config.vocab_size
    residual_std = 0.02 / (2 * config.num_layers) ** 0.5

    def norm(name: str) -> ParamSpec:
        return ParamSpec((d,), (None,), "vector", (name,), 0.0)

    def layer(i: int) -> dict[str, ParamSpec]:
        at = f"model.layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        qkv = tuple(f"{attn}{x}_proj.weight" for x in "qkv")
        extra: dict[str, ParamSpec] = {}
        if config.qkv_bias:
            bias = tuple(f"{attn}{x}_proj.bias" for x in "qkv")
            shape = (k, (n // k + 2) * h)
            extra["qkv_bias"] = ParamSpec(shape, ("kv_heads", None), "vector", bias, 0.02)
        if config.qk_norm:
            for x in "qk":
                source = (f"{attn}{x}_norm.weight",)
                extra[f"{x}_norm"] = ParamSpec((h,), (None,), "vector", source, 0.0)
        gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
        return {
            "attn_norm": norm(at + "input_layernorm.weight"),
            "qkv": ParamSpec((k, (n // k + 2) * h, d), ("kv_heads", None, "embed"), "linear", qkv),
            "o": ParamSpec(
                (d, n * h), ("embed", "heads"), "linear", (attn + "o_proj.weight",), residual_std
            ),
            "mlp_norm": norm(at + "post_attention_layernorm.weight"),
            "gate_up": ParamSpec((2, f, d), (None, "ff", "embed"), "linear", gate_up),
            "down": ParamSpec(
                (d, f), ("embed", "ff"), "linear", (mlp + "down_proj.weight",), residual_std
            ),
            **extra,
        }

    specs: Params = {
        "embed": ParamSpec((v, d), ("vocab", "embed"), "embed", (EMBED,)),
        "layers": {i: layer(i) for i in range(config.num_layers)},
        "final_norm": norm(FINAL_NORM),
    }
    if not config.tie_word_embeddings:
        specs["head"] = ParamSpec((v, d), ("vocab", "embed"), "linear", (HEAD,))
    return specs


def map_specs(function: Callable[..., Any], config: ModelConfig, *trees: Any) -> Params:
    """Applies ``function(spec, *leaves)`` over ``param_specs(config)`` and trees of its
    structure."""
    return jax.tree.map(
        function, param_specs(config), *trees, is_leaf=lambda x: isinstance(x, ParamSpec)
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a checkpoint of this model has; no head when
    it is tied."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(spec: ParamSpec) -> None:
        for name, rows in zip(spec.sources, _source_rows(config, spec), strict=True):
            shapes[name] = (rows,) if spec.kind == "vector" else (rows, spec.shape[-1])

    map_specs(add, config)
    return shapes


def _source_rows(config: ModelConfig, spec: ParamSpec) -> tuple[int, ...]:
    """Output rows of each source tensor of a weight."""
    if len(spec.sources) == 3:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return (q, kv, kv)
    if len(spec.sources) == 2:
        return (spec.shape[1],) * 2
    return (spec.shape[0],)


def _concatenate(parts: list[Array], axis: int) -> Array:
    numpy = all(isinstance(part, np.ndarray) for part in parts)
    one = len({part.dtype for part in parts}) == 1
    if numpy and one:
        return host_memory.concatenate(parts, axis)
    return np.concatenate(parts, axis) if numpy else jnp.concatenate(parts, axis)


def _fuse_rows(config: ModelConfig, spec: ParamSpec, parts: list[Array], axis: int) -> Array:
    """Fuses arrays whose dimension ``axis`` is the output rows of `spec`'s sources."""
    if len(parts) == 1:
        return parts[0]
    groups = config.num_kv_heads if len(parts) == 3 else 1
    grouped = [
        part.reshape(
            *part.shape[:axis], groups, part.shape[axis] // groups, *part.shape[axis + 1 :]
        )
        for part in parts
    ]
    fused = _concatenate(grouped, axis + 1)
    if len(parts) == 2:  # gate|up: two groups of F rows, not one of 2F
        return fused.reshape(*fused.shape[:axis], *spec.shape[:2], *fused.shape[axis + 2 :])
    return fused


def fuse(config: ModelConfig, tensors: Mapping[str, Array]) -> Params:
    """Hugging Face tensors -> ``Params``.

    Args:
      tensors: name -> array of the shape that `tensor_shapes` gives, NumPy or JAX, any float dtype.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not one of this model's.
    """
    shapes = tensor_shapes(config)
    _check_names(shapes, tensors)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; expected {shape}")
    return map_specs(lambda spec: fuse_parts(config, spec, tensors), config)


def fuse_parts(config: ModelConfig, spec: ParamSpec, tensors: Mapping[str, Array]) -> Array:
    """One weight of `fuse`; `tensors` has its sources at least, of the right shapes."""
    return _fuse_rows(config, spec, [tensors[name] for name in spec.sources], 0)


def fuse_layer(config: ModelConfig, index: int, tensors: Mapping[str, Array]) -> Params:
    """`fuse` of one layer.

    Args:
      config: the model.
      index: of the layer.
      tensors: its Hugging Face tensors; others are left out.
    """
    return {
        name: _fuse_rows(config, spec, [tensors[source] for source in spec.sources], 0)
        for name, spec in param_specs(config)["layers"][index].items()
    }


def unfuse(config: ModelConfig, params: Params) -> dict[str, Array]:
    """``Params`` -> Hugging Face tensors; the inverse of `fuse`."""
    tensors: dict[str, Array] = {}

    def split(spec: ParamSpec, value: Array) -> None:
        if len(spec.sources) == 1:
            tensors[spec.sources[0]] = value
            return
        size = () if spec.kind == "vector" else value.shape[-1:]
        flat = value if len(spec.sources) == 3 else value.reshape(1, -1, *size)
        start = 0
        for name, rows in zip(spec.sources, _source_rows(config, spec), strict=True):
            each = rows // flat.shape[0]
            tensors[name] = flat[:, start : start + each].reshape(rows, *size)
            start += each

    map_specs(split, config, params)
    return tensors


def fuse_delta(config: ModelConfig, tensors: Mapping[str, WeightDelta]) -> Params:
    """A variant's deltas by Hugging Face tensor -> a tree of `WeightDelta` in the shape of
    ``Params``.

    Scales of one per matrix are broadcast to one per row. Where the sources of a fused weight
    differ in levels, the missing ones get scale 0; where some have a dense part, the others' is
    zero. Low-rank parts lie one after the other: each source keeps its own factors, and its rows of
    b are zero at the ranks of the others.

    Raises:
      ValueError: a tensor is missing, is not one of this model's, or does not fit the shape that it
        should have.
    """
    check_names(config, tensors)
    return map_specs(lambda spec: fuse_weight(config, spec, tensors), config)


def fuse_weight(
    config: ModelConfig, spec: ParamSpec, tensors: Mapping[str, WeightDelta]
) -> WeightDelta:
    """One weight of `fuse_delta`; `tensors` has its sources at least.

    Raises:
      ValueError: one does not fit the shape that it should have.
    """
    parts = [tensors[name] for name in spec.sources]
    rows = _source_rows(config, spec)
    shapes = [(r,) if spec.kind == "vector" else (r, spec.shape[-1]) for r in rows]
    for name, part, shape in zip(spec.sources, parts, shapes, strict=True):
        _check_delta(name, part, shape)
    levels = max((p.bits.shape[0] for p in parts if p.bits is not None), default=0)
    bits = scale = low_rank = dense = None
    if levels:
        pairs = [
            _pad_levels(p, levels, r, spec.shape[-1]) for p, r in zip(parts, rows, strict=True)
        ]
        bits = _fuse_rows(config, spec, [b for b, _ in pairs], 1)
        scale = _fuse_rows(config, spec, [s for _, s in pairs], 1)
    if any(p.low_rank is not None for p in parts):
        a, own = _side_by_side(parts, rows)
        low_rank = a, _fuse_rows(config, spec, own, 0)
    if any(p.dense is not None for p in parts):
        whole = [
            np.zeros(shape, np.float32) if p.dense is None else p.dense
            for shape, p in zip(shapes, parts, strict=True)
        ]
        dense = _fuse_rows(config, spec, whole, 0)
    return WeightDelta(bits, scale, low_rank, dense, parts[0].tail)


def _side_by_side(parts: list[WeightDelta], rows: tuple[int, ...]) -> tuple[Array, list[Array]]:
    """(a float32[R, I] of all ranks together, b float32[rows, R] of each part)."""
    pairs = [part.low_rank for part in parts]
    ranks = [0 if pair is None else pair[0].shape[0] for pair in pairs]
    a = np.concatenate([np.asarray(pair[0], np.float32) for pair in pairs if pair is not None])
    own, start = list[Array](), 0
    for pair, count, rank in zip(pairs, rows, ranks, strict=True):
        b = np.zeros((count, sum(ranks)), np.float32)
        if pair is not None:
            b[:, start : start + rank] = pair[1]
        own.append(b)
        start += rank
    return a, own


def check_names(config: ModelConfig, tensors: Mapping[str, Any]) -> None:
    """Raises ValueError unless there is every tensor of a model and no other."""
    _check_names(tensor_shapes(config), tensors)


def _check_names(shapes: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    missing, extra = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing:
        raise ValueError(f"tensors are missing: {', '.join(missing)}")
    if extra:
        raise ValueError(f"tensors do not belong to this model: {', '.join(extra)}")


def _check_delta(name: str, delta: WeightDelta, shape: tuple[int, ...]) -> None:
    if delta.low_rank is not None:
        a, b = (tuple(factor.shape) for factor in delta.low_rank)
        if len(shape) != 2 or a != (a[0], shape[1]) or b != (shape[0], a[0]):
            raise ValueError(f"{name}: factors {a} and {b} do not fit a tensor of shape {shape}")
    if delta.bits is not None and len(shape) != 2:
        raise ValueError(f"{name} is a vector of shape {shape}; it cannot have signs")
    if delta.bits is not None:
        levels, want = delta.bits.shape[0], (shape[0], -(-shape[-1] // 8))
        if delta.bits.shape[1:] != want:
            raise ValueError(
                f"{name}: bits have shape {delta.bits.shape}; expected [levels, {want}]"
            )
        if delta.scale is None or delta.scale.shape not in ((levels, shape[0]), (levels, 1)):
            raise ValueError(f"{name}: scale does not fit bits of shape {delta.bits.shape}")
    if delta.tail is not None and (name not in (EMBED, HEAD) or delta.tail.shape[1:] != shape[1:]):
        raise ValueError(f"{name}: a tail of shape {delta.tail.shape} belongs to no vocabulary")
    if delta.dense is not None and tuple(delta.dense.shape) != shape:
        raise ValueError(f"{name}: dense part has shape {delta.dense.shape}; expected {shape}")


def _pad_levels(delta: WeightDelta, levels: int, rows: int, size: int) -> tuple[Array, Array]:
    """(bits uint8[levels, rows, I/8], scale float32[levels, rows]) with absent levels at scale
    0."""
    if delta.bits is not None and delta.scale is not None and delta.bits.shape[0] == levels:
        scale = delta.scale
        if scale.shape != (levels, rows):
            scale = np.broadcast_to(scale, (levels, rows))
        return delta.bits, scale
    bits = np.zeros((levels, rows, -(-size // 8)), np.uint8)
    scale = np.zeros((levels, rows), np.float32)
    if delta.bits is not None and delta.scale is not None:
        bits[: delta.bits.shape[0]] = delta.bits
        scale[: delta.bits.shape[0]] = delta.scale
    return bits, scale
