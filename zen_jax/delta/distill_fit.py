"""Signs and scales fitted to what a layer sees: the closed form of distilling one matrix.

With C = E[x x^t] over a layer's inputs, an error E of its delta D changes the outputs by E x, whose
mean square is tr(E C E^t). For signs S that makes the scale of a row o

    alpha_o = (D C S^t)_oo / (S C S^t)_oo,

and of a whole matrix tr(D C S^t) / tr(S C S^t); several levels take the normal equations of the
same sum. Signs may be fitted as well: one input at a time each element takes, of the values that
its row has, the one that is best beside all others as they stand (coordinate descent). Signs and
scales take turns. No step makes the error larger.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packing import pack_signs
from zen_jax.delta.compress import ScaleKind
from zen_jax.delta.format import WeightDelta

# Of the mean of C's diagonal, added to it: calibration text never shows all inputs.
DAMPING = 0.01
# Inputs that are fitted before the others hear of it.
_BLOCK = 64
_FLOAT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was fitted to a matrix.

    Attributes:
      delta: bits uint8[levels, O, ceil(I / 8)] and scale float32[levels, O] or float32[levels, 1].
      before: tr(E C E^t) / tr(D C D^t) of the signs and scales that were given.
      after: of `delta`; at most `before`.
    """

    delta: WeightDelta
    before: float
    after: float


def damped(second: np.ndarray) -> np.ndarray:
    """C, float32[I, I], with a little of its mean diagonal added to the diagonal."""
    mean = float(np.trace(second, dtype=np.float64)) / len(second)
    return second + np.eye(len(second), dtype=np.float32) * np.float32(DAMPING * mean + 1e-12)


def unpack_codes(delta: WeightDelta, size: int) -> np.ndarray:
    """The signs of a delta, int8[levels, O, I] of -1 and +1.

    Raises:
      ValueError: it has none.
    """
    if delta.bits is None:
        raise ValueError("the delta has no signs to fit")
    bits = np.unpackbits(np.asarray(delta.bits), axis=-1, count=size, bitorder="little")
    return bits.astype(np.int8) * 2 - 1


def fit_matrix(
    delta: np.ndarray,
    second: np.ndarray,
    start: WeightDelta,
    *,
    scale: ScaleKind = "row",
    sweeps: int = 0,
) -> Fit:
    """Fits scales, and signs if asked, to the second moment of the inputs.

    Args:
      delta: D, float32[O, I], what the fine-tune adds.
      second: C, float32[I, I], symmetric.
      start: signs and scales to begin with, as `compress_tensor` makes them.
      scale: one a "row" or one a "matrix".
      sweeps: over all signs; 0 fits scales alone.

    Raises:
      ValueError: shapes do not fit, C is not finite, or `start` has no signs.
    """
    size = delta.shape[1]
    if second.shape != (size, size):
        raise ValueError(f"second moments have shape {second.shape}; expected [{size}, {size}]")
    if not np.isfinite(second).all():
        raise ValueError("second moments are not finite; look for NaN or infinity in the inputs")
    signs = jnp.asarray(unpack_codes(start, size)).transpose(0, 2, 1)
    scales = jnp.asarray(np.broadcast_to(np.asarray(start.scale), (len(signs), len(delta))))
    c, d = jnp.asarray(second), jnp.asarray(delta.T)
    total = float(_error(c, d, jnp.zeros_like(d)))
    given = float(_error(c, d, _value(signs, scales)))
    best = (given, signs, scales)
    for sweep in range(sweeps + 1):
        if sweep:
            signs = _sweep(c, d, signs, scales)
        scales = _scales(c, d, signs, scale == "matrix")
        left = float(_error(c, d, _value(signs, scales)))
        if left < best[0]:
            best = (left, signs, scales)
        elif sweep:
            break
    left, signs, scales = best
    packed = np.stack([pack_signs(np.asarray(s, np.float32).T) for s in signs])
    kept = np.asarray(scales, np.float32)
    kept = kept[:, :1] if scale == "matrix" else kept
    share = 1.0 / total if total > 0 else 0.0
    return Fit(WeightDelta(bits=packed, scale=kept), given * share, left * share)


def _value(signs: jax.Array, scales: jax.Array) -> jax.Array:
    """int8[levels, I, O], float32[levels, O] -> float32[I, O]."""
    return jnp.sum(scales[:, None] * signs, axis=0)


@jax.jit
def _error(c: jax.Array, d: jax.Array, value: jax.Array) -> jax.Array:
    """tr(E C E^t), E^t = d - value, [I, O]."""
    left = d - value
    return jnp.sum(left * jnp.dot(c, left, precision=_FLOAT))


@functools.partial(jax.jit, static_argnums=3)
def _scales(c: jax.Array, d: jax.Array, signs: jax.Array, matrix: bool) -> jax.Array:
    """The best scales of signs, float32[levels, O]: the normal equations of each row, or of all."""
    s = signs.astype(jnp.float32)
    seen = jnp.einsum("ij,ljo->lio", c, s, precision=_FLOAT)
    gram = jnp.einsum("lio,kio->olk", seen, s, precision=_FLOAT)
    wanted = jnp.einsum("lio,io->ol", seen, d, precision=_FLOAT)
    if matrix:
        gram = jnp.broadcast_to(jnp.sum(gram, axis=0), gram.shape)
        wanted = jnp.broadcast_to(jnp.sum(wanted, axis=0), wanted.shape)
    # Levels of equal signs in all inputs leave their scales open: the shortest solution then.
    inverse = jnp.linalg.pinv(gram, rtol=1e-6, hermitian=True)
    return jnp.einsum("olk,ok->lo", inverse, wanted, precision=_FLOAT)


@jax.jit
def _sweep(c: jax.Array, d: jax.Array, signs: jax.Array, scales: jax.Array) -> jax.Array:
    """Signs int8[levels, I, O] after each element has once taken its best value.

    P = C (d - value) is the gradient. An element at v would like to be v + P_i / C_ii.
    """
    levels, size, _ = signs.shape
    codes = _codes(levels)
    table = jnp.einsum("nl,lo->no", codes.astype(jnp.float32), scales)
    pad = -size % _BLOCK
    wide = jnp.pad(c, ((0, pad), (0, pad))) + jnp.diag(
        jnp.repeat(jnp.array([0.0, 1.0]), np.array([size, pad]), total_repeat_length=size + pad)
    )
    d = jnp.pad(d, ((0, pad), (0, 0)))
    signs = jnp.pad(signs, ((0, 0), (0, pad), (0, 0)), constant_values=1)
    value = _value(signs, scales)
    gradient = jnp.dot(
        wide, jnp.where(jnp.arange(size + pad)[:, None] < size, d - value, 0.0), precision=_FLOAT
    )

    def block(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        signs, value, gradient = state
        at = index * _BLOCK
        own = jax.lax.dynamic_slice(wide, (at, at), (_BLOCK, _BLOCK))
        before = jax.lax.dynamic_slice_in_dim(value, at, _BLOCK)
        here = jax.lax.dynamic_slice_in_dim(gradient, at, _BLOCK)

        def one(
            i: jax.Array, inner: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            now, pull, chosen = inner
            wish = now[i] + pull[i] / own[i, i]
            best = jnp.argmin(jnp.abs(wish - table), axis=0)
            new = jnp.take_along_axis(table, best[None], axis=0)[0]
            pull = pull - own[:, i, None] * (new - now[i])
            return now.at[i].set(new), pull, chosen.at[i].set(best.astype(jnp.int8))

        after, _, chosen = jax.lax.fori_loop(
            0, _BLOCK, one, (before, here, jnp.zeros(before.shape, jnp.int8))
        )
        columns = jax.lax.dynamic_slice_in_dim(wide, at, _BLOCK, axis=1)
        gradient = gradient - jnp.dot(columns, after - before, precision=_FLOAT)
        value = jax.lax.dynamic_update_slice_in_dim(value, after, at, axis=0)
        taken = jnp.moveaxis(codes[chosen.astype(jnp.int32)], -1, 0)
        return jax.lax.dynamic_update_slice_in_dim(signs, taken, at, axis=1), value, gradient

    signs, _, _ = jax.lax.fori_loop(0, (size + pad) // _BLOCK, block, (signs, value, gradient))
    return signs[:, :size]


def _codes(levels: int) -> jax.Array:
    """Every choice of signs, int8[2^levels, levels]."""
    index = np.arange(2**levels)[:, None] >> np.arange(levels)
    return jnp.asarray((index & 1) * 2 - 1, jnp.int8)
