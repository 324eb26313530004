"""The transformer of the Llama, Mistral and Qwen families, in Flax NNX over plain dicts.

Modules are split once; a jitted function takes ``Params`` (plain arrays, or `Weight` leaves that
carry deltas) and merges them inside. Passing another tree of the same shapes compiles nothing.

Letters: B batch, T query, S cache, D model, N heads, K kv heads, G = N / K, H head size,
F feed-forward, V vocabulary.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.decode_attention import ops, reference
from pallas_kernels.decode_attention.reference import rotate
from pallas_kernels.paged_attention.pages import Pages
from zen_jax.attention import (
    attend,
    attend_rows,
    attend_token,
    rotary_angles,
    rotary_frequencies,
    visible,
)
from zen_jax.config import ModelConfig
from zen_jax.kv_cache import InPages
from zen_jax.layout import Params, ParamSpec, map_specs, param_specs
from zen_jax.linear import embed, linear, vector
from zen_jax.sharding import Placement, on_shards

Merge = Callable[[Params], "Transformer"]


@dataclasses.dataclass(frozen=True)
class Computing:
    """How a model's products are computed.

    Attributes:
      placement: the mesh, or None for one device.
      products: what activations are rounded to before they meet a weight; None leaves them.
    """

    placement: Placement | None = None
    products: jax.typing.DTypeLike | None = None


class Linear(nnx.Module):
    """A weight [*out, I], the logical axes of its dimensions, and how it is multiplied."""

    def __init__(self, spec: ParamSpec, how: Computing) -> None:
        self.weight = nnx.Param(jnp.zeros(spec.shape))
        self.axes = spec.axes
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, I] -> [B, T, *out]."""
        how = self.how
        return linear(x, self.weight.get_value(), self.axes, how.placement, how.products)


class Embedding(Linear):
    """A weight [V, D]: looked up by token, and the head too when that is tied."""

    def lookup(self, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """int32[B, T] -> dtype[B, T, D]."""
        return embed(tokens, self.weight.get_value(), self.axes, dtype, self.how.placement)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) times a vector (arXiv:1910.07467)."""

    def __init__(
        self, spec: ParamSpec, eps: float, how: Computing, axes: tuple[str | None, ...] = ()
    ) -> None:
        """Takes the logical axes of what is normed; those not given are not sharded."""
        self.weight = nnx.Param(jnp.zeros(spec.shape))
        self.eps = eps
        self.placement = how.placement
        self.axes = axes

    def rows(self) -> jax.Array:
        """The vector of each row of the batch, float32[B, D], or float32[1, D] of all."""
        weight = vector(self.weight.get_value())
        return weight.reshape(-1, weight.shape[-1])

    def __call__(self, x: jax.Array, serving: bool = False) -> jax.Array:
        """[B, T, ..., D] -> the same shape and dtype; inside float32.

        Args:
          x: what is normed.
          serving: nothing is differentiated; each row's sum runs in one order, however many there
            are.
        """
        if not serving:
            return reference.rms_norm(x, self.rows(), self.eps)
        here = PartitionSpec() if self.placement is None else self.placement.spec(self.axes)

        def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
            return ops.rms_norm(x, weight, self.eps)

        return on_shards(norm, self.placement, (here, PartitionSpec()), here)(x, self.rows())


class Bias(nnx.Module):
    """A vector that is added, of the shape of what it is added to."""

    def __init__(self, spec: ParamSpec) -> None:
        self.weight = nnx.Param(jnp.zeros(spec.shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, *shape] -> the same shape and dtype."""
        return x + vector(self.weight.get_value()).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding over a fused q|k|v weight.

    Qwen2 adds biases to q, k and v; Qwen3 norms each head's query and key before they are turned.
    """

    def __init__(
        self, config: ModelConfig, specs: Params, how: Computing, window: int | None
    ) -> None:
        self.qkv = Linear(specs["qkv"], how)
        self.o = Linear(specs["o"], how)
        self.qkv_bias = Bias(specs["qkv_bias"]) if config.qkv_bias else None
        eps, axes = config.rms_norm_eps, (None, None, "kv_heads")
        self.q_norm = RMSNorm(specs["q_norm"], eps, how, axes) if config.qk_norm else None
        self.k_norm = RMSNorm(specs["k_norm"], eps, how, axes) if config.qk_norm else None
        self.config = config
        self.window = window

    def fused(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, K, G + 2, H]: a kv head's queries, its key and its value."""
        y = self.qkv(x) if self.qkv_bias is None else self.qkv_bias(self.qkv(x))
        return y.reshape(*x.shape[:2], self.config.num_kv_heads, -1, self.config.head_dim)

    def project(
        self, x: jax.Array, positions: jax.Array, serving: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, T, D] -> q[B, T, K, G, H], k[B, T, K, H] (both turned by rope), v[B, T, K, H]."""
        fused = self.fused(x)
        q, k, v = fused[..., :-2, :], fused[..., -2, :], fused[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, serving), self.k_norm(k, serving)
        angles = rotary_angles(positions, rotary_frequencies(self.config))
        return rotate(q, angles), rotate(k, angles), v

    def decode(
        self, x: jax.Array, positions: jax.Array, cache: Pages, table: jax.Array
    ) -> tuple[jax.Array, Pages]:
        """One token a row, [B, 1, D], to the cache -> [B, K, G, H] and the cache with it."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.rows(), self.k_norm.rows()
        at = positions[:, 0]
        return attend_token(
            self.fused(x)[:, 0],
            cache,
            table,
            at,
            rotary_angles(at, rotary_frequencies(self.config)),
            norms,
            self.config.rms_norm_eps,
            self.window,
            self.qkv.how.placement,
        )

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Pages | None,
        where: InPages | None = None,
    ) -> tuple[jax.Array, Pages | None]:
        """Attends causally to x itself; or, one token a row, to the cache; or, chunks of prompts,
        each to its own row of the cache.

        Returns the output [B, T, D], and the cache with x's keys and values at ``positions``.
        """
        if cache is None or where is None:
            q, k, v = self.project(x, positions)
            y, seen = attend(q, k, v, visible(positions, positions, self.window)), None
        elif where.lengths is None:
            y, seen = self.decode(x, positions, cache, where.table)
        else:
            qkv = self.project(x, positions, serving=True)
            how = (self.window, self.qkv.how.placement)
            y, seen = attend_rows(qkv, cache, where, positions[:, 0], *how)
        return self.o(y.reshape(*x.shape[:2], -1)), seen


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) over a fused gate|up weight."""

    def __init__(self, specs: Params, how: Computing) -> None:
        self.gate_up = Linear(specs["gate_up"], how)
        self.down = Linear(specs["down"], how)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        both = self.gate_up(x)
        return self.down(jax.nn.silu(both[:, :, 0]) * both[:, :, 1])


class Layer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual."""

    def __init__(
        self, config: ModelConfig, specs: Params, how: Computing, window: int | None
    ) -> None:
        self.attn_norm = RMSNorm(specs["attn_norm"], config.rms_norm_eps, how)
        self.attention = Attention(config, specs, how, window)
        self.mlp_norm = RMSNorm(specs["mlp_norm"], config.rms_norm_eps, how)
        self.mlp = MLP(specs, how)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Pages | None,
        where: InPages | None = None,
    ) -> tuple[jax.Array, Pages | None]:
        """[B, T, D] -> [B, T, D] and the layer's cache."""
        serving = cache is not None
        y, seen = self.attention(self.attn_norm(x, serving), positions, cache, where)
        x = x + y
        return x + self.mlp(self.mlp_norm(x, serving)), seen


class Transformer(nnx.Module):
    """A decoder-only transformer; see `make_merge` for how it is used."""

    def __init__(self, config: ModelConfig, how: Computing) -> None:
        specs = param_specs(config)
        self.embed = Embedding(specs["embed"], how)
        self.layers = nnx.List(
            [
                Layer(config, specs["layers"][i], how, config.window(i))
                for i in range(config.num_layers)
            ]
        )
        self.final_norm = RMSNorm(specs["final_norm"], config.rms_norm_eps, how)
        self.head = None if config.tie_word_embeddings else Linear(specs["head"], how)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: list[Pages] | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        where: InPages | None = None,
    ) -> tuple[jax.Array, list[Pages]]:
        """int32[B, T] tokens and positions -> hidden states dtype[B, T, D] after the final norm,
        and every layer's cache with them, where there is one. A cache goes with ``where``."""
        x = self.embed.lookup(tokens, dtype)
        seen = []
        for i, layer in enumerate(self.layers):
            x, kept = layer(x, positions, None if cache is None else cache[i], where)
            seen += [] if kept is None else [kept]
        return self.final_norm(x, cache is not None), seen

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] -> float32[B, T, V]."""
        return (self.head or self.embed)(hidden).astype(jnp.float32)


def init_params(
    config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> Params:
    """Random parameters, normal with each entry's own deviation; norms start at 1.

    Args:
      config: the model.
      key: a typed PRNG key.
      dtype: of all entries.
    """
    count = len(jax.tree.leaves(map_specs(lambda spec: 0, config)))
    keys = iter(jax.random.split(key, count))

    def start(spec: ParamSpec) -> jax.Array:
        noise = jax.random.normal(next(keys), spec.shape, jnp.float32) * spec.init_std
        return (noise if spec.init_std else noise + 1.0).astype(dtype)

    return map_specs(start, config)


def _layer_state(params: Params) -> Params:
    """One layer's entry of ``Params`` in the nesting of its modules."""
    others = ("attn_norm", "mlp_norm", "gate_up", "down")
    return {
        "attn_norm": {"weight": params["attn_norm"]},
        "mlp_norm": {"weight": params["mlp_norm"]},
        "mlp": {name: {"weight": params[name]} for name in ("gate_up", "down")},
        "attention": {name: {"weight": params[name]} for name in params if name not in others},
    }


def make_layer(config: ModelConfig, index: int) -> Callable[[Params], Layer]:
    """One layer by itself; what `make_merge` is for the whole.

    Args:
      config: the model.
      index: which layer.

    Returns:
      A function of that layer's entry in ``Params``, to be called inside `jax.jit`.
    """
    specs = param_specs(config)["layers"][index]
    make = nnx.eval_shape(lambda: Layer(config, specs, Computing(), config.window(index)))
    graph, _ = nnx.split(make)
    return lambda params: nnx.merge(graph, _layer_state(params))


def make_merge(
    config: ModelConfig,
    placement: Placement | None = None,
    products: jax.typing.DTypeLike | None = None,
) -> Merge:
    """Splits the modules once; the function returned makes them whole again around ``Params``.

    Call it inside `jax.jit`. Leaves of ``Params`` may be arrays or `zen_jax.linear.Weight`.

    Args:
      config: the model.
      placement: the mesh, or None for one device.
      products: what activations are rounded to before they meet a weight; None leaves them.
    """
    how = Computing(placement, products)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, how)))

    def state(params: Params) -> Params:
        """``Params`` in the nesting of the modules."""
        whole = {name: {"weight": p} for name, p in params.items() if name != "layers"}
        return whole | {"layers": {i: _layer_state(p) for i, p in params["layers"].items()}}

    return lambda params: nnx.merge(graph, state(params))


def make_forward(
    config: ModelConfig, mesh: Mesh | None = None, dtype: jax.typing.DTypeLike = jnp.float32
) -> Callable[[Params, jax.Array], jax.Array]:
    """The whole forward pass of sequences that start at position 0; a pure function to be jitted.

    Args:
      config: the model.
      mesh: axes (data, model), or None for one device.
      dtype: of activations; sums and logits are float32.

    Returns:
      ``forward(params, tokens int32[B, T]) -> logits float32[B, T, V]``, causal. Rows padded at
      the end are undisturbed by the padding. Differentiable where leaves are arrays.
    """
    merge = make_merge(config, None if mesh is None else Placement.of(config, mesh))

    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        model = merge(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = model(tokens, positions, dtype=dtype)
        return model.logits(hidden)

    return forward
