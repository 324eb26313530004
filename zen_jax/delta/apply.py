"""A variant's deltas put on the base: bound beside it for a forward pass, or added up whole."""

import jax
import jax.numpy as jnp

from pallas_kernels.packing import unpack_signs
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import Params
from zen_jax.linear import Weight


def _is_delta(node: object) -> bool:
    return isinstance(node, WeightDelta)


def bind(params: Params, deltas: Params, slots: jax.Array | None = None) -> Params:
    """Params whose leaves carry deltas; nothing is computed or copied.

    Args:
      params: the base's arrays.
      deltas: a tree of `WeightDelta` of the same structure: one variant's, or a bank.
      slots: int32[B] with a bank, each row's slot (-1: the base); None with one variant's tree.

    Returns:
      A tree that the model's functions take in the place of ``Params``.
    """
    return jax.tree.map(
        lambda delta, base: Weight(base, delta, slots), deltas, params, is_leaf=_is_delta
    )


def effective_weight(base: jax.Array, delta: WeightDelta) -> jax.Array:
    """base + alpha S + b a + dense, and the tail's rows, in float32, [*out, I].

    Args:
      base: [*out, I].
      delta: one variant's.
    """
    whole = jnp.asarray(base, jnp.float32)
    if delta.bits is not None and delta.scale is not None:
        signs = unpack_signs(jnp.asarray(delta.bits), whole.shape[-1], jnp.float32)
        whole += jnp.sum(jnp.asarray(delta.scale)[..., None] * signs, axis=0)
    if delta.low_rank is not None:
        a, b = delta.low_rank
        product = jnp.tensordot(
            jnp.asarray(b, jnp.float32), jnp.asarray(a, jnp.float32), 1, precision="highest"
        )
        whole += product
    if delta.dense is not None:
        whole += jnp.asarray(delta.dense, jnp.float32)
    if delta.tail is not None:
        whole = whole.at[-delta.tail.shape[0] :].add(jnp.asarray(delta.tail, jnp.float32))
    return whole


def materialise(params: Params, deltas: Params) -> Params:
    """The variant's own weights in float32, whole: for tests, notebooks and export.

    Args:
      params: the base's arrays.
      deltas: one variant's tree of `WeightDelta`.
    """
    return jax.tree.map(
        lambda delta, base: effective_weight(base, delta), deltas, params, is_leaf=_is_delta
    )
