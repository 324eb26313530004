"""What another level of signs would gain, matrix by matrix: one pass forward and one back.

Near the fine-tune KL(fine-tune || variant) is half a quadratic form of the errors E of its
matrices, that of the Fisher information. What a matrix adds by itself is

    1/2 mean over texts of (sum over tokens of g . E x)^2, over a text's tokens,

x its inputs and g the gradient at its outputs of sum over tokens of v . logits, where
v = sum_k sqrt(p_k) r_k (e_k - p) with the fine-tune's probabilities p and random signs r: the mean
of v v^t is diag(p) - p p^t, which is Fisher's of the logits. A head's part needs no gradient: half
the variance of (E x)_o under p. Tokens have to be summed before they are squared: an error that
all keys of a text share changes nothing, and token by token would count 2 to 20 times.

A level is judged as it would be kept: fitted to the second moments of the same inputs. One layer of
the fine-tune is in memory at a time; what goes into each layer waits on disk.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention.reference import rms_norm
from zen_jax.config import ModelConfig
from zen_jax.delta.compress import ScaleKind, compress_tensor
from zen_jax.delta.distill_fit import damped, fit_matrix, unpack_codes
from zen_jax.delta.distill_layers import Samples, Sides, Walk
from zen_jax.delta.distill_scales import read_arrays, write_arrays
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import (
    EMBED,
    FINAL_NORM,
    HEAD,
    Params,
    fuse_layer,
    param_specs,
    tensor_shapes,
)
from zen_jax.model import make_layer

# Tokens that gains are taken from: their hidden states lie on disk for all layers at once.
TOKENS = 8192
# Random signs for each text.
DRAWS = 4
_FLOAT = jax.lax.Precision.HIGHEST
_PARTS = ("qkv", "o", "gate_up", "down")

# By tensor: the KL, nats a token, that it brings at its own levels, at one more, and so on.
Errors = dict[str, tuple[float, ...]]


def measure_errors(
    sides: Sides,
    samples: Samples,
    walk: Walk,
    most: int,
    folder: Path,
    hear: Callable[[int, int], None] = lambda done, total: None,
    keep: Callable[[str, WeightDelta], None] = lambda name, delta: None,
) -> Errors:
    """What each matrix with signs adds to KL(fine-tune || variant), by its number of levels.

    Goes on where it was interrupted.

    Args:
      sides: the models, a tensor at a time.
      samples: text; about `TOKENS` tokens of it are read, spread evenly.
      walk: how matrices will be fitted.
      most: levels at most, 1 to 4.
      folder: of this run alone: what is in it already is gone on from.
      hear: called with how many steps are done, and of how many.
      keep: called with each matrix as it was judged, at each number of levels.

    Returns:
      Nats a counted token, estimated, for the levels that it has up to `most`.

    Raises:
      ValueError: a file in the folder is damaged, or weights or inputs are not finite.
    """
    return _Gauge(sides, _spread(samples), walk, most, folder, keep).run(hear)


def spend(
    held: Mapping[str, int], errors: Errors, costs: Mapping[str, int], room: int
) -> dict[str, int]:
    """Levels for each matrix: as long as one more fits, there where it gains most for its bytes.

    Args:
      held: levels that each has.
      errors: as `measure_errors` gives them.
      costs: bytes of one more level of each.
      room: bytes in all.
    """
    levels = dict(held)

    def gain(name: str) -> float:
        step = levels[name] - held[name]
        left = errors[name][step : step + 2]
        return left[0] - left[1] if len(left) == 2 else 0.0

    while True:
        open_to = [n for n in sorted(levels) if costs[n] <= room and gain(n) > 0]
        if not open_to:
            return levels
        best = max(open_to, key=lambda name: gain(name) / costs[name])
        levels[best] += 1
        room -= costs[best]


def with_levels(sides: Sides, levels: Mapping[str, int], folder: Path) -> Sides:
    """Sides whose delta begins with as many levels as are given, made of weights alone where it has
    fewer; what is made is kept in a folder, since it is asked for more than once."""

    def delta(name: str) -> WeightDelta:
        own = sides.delta(name)
        if own.bits is None or levels.get(name, 0) <= own.bits.shape[0]:
            return own
        path = folder / f"{name}-{levels[name]}.safetensors"
        if not path.exists():
            made = _begun(sides, name, own, levels[name])
            arrays = {"bits": np.asarray(made.bits), "scale": np.asarray(made.scale)}
            folder.mkdir(parents=True, exist_ok=True)
            write_arrays(path, arrays, {})
        return dataclasses.replace(own, **read_arrays(path)[0])

    return dataclasses.replace(sides, delta=delta)


def _begun(sides: Sides, name: str, own: WeightDelta, levels: int) -> WeightDelta:
    """A matrix' delta with more levels, of its weights alone."""
    rows = np.asarray(own.bits).shape[1]
    base, tuned = sides.base(name)[:rows], sides.tuned(name)[:rows]
    made, _ = compress_tensor(base, tuned, scale=_kind(own), levels=levels)
    return dataclasses.replace(made, tail=own.tail)


def _kind(delta: WeightDelta) -> ScaleKind:
    rows = np.asarray(delta.bits).shape[1]
    return "matrix" if np.asarray(delta.scale).shape[1] < rows else "row"


def _spread(samples: Samples) -> Samples:
    count, length = samples.counted.shape
    most = max(TOKENS // length, 1)
    chosen = np.linspace(0, count - 1, min(most, count)).astype(int)
    return Samples(samples.tokens[chosen], samples.counted[chosen])


class _Tap:
    """A product whose inputs are noted and whose outputs are added to."""

    def __init__(self, inner: Callable[[jax.Array], jax.Array], added: jax.Array) -> None:
        self._inner, self._added = inner, added

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen = x
        return self._inner(x) + self._added


@functools.lru_cache(maxsize=8)
def _programs(config: ModelConfig, index: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jitted (params, x[B, T, D]) -> x after the layer; and (params, x, gradients [S, B, T, D]
    after the layer) -> those before it, and by weight what it takes in [B, T, I] and the gradients
    at what it gives [S, B, T, *out]."""
    merge = make_layer(config, index)
    specs = {name: param_specs(config)["layers"][index][name] for name in _PARTS}

    def run(params: Params, x: jax.Array, added: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        layer = merge(params)
        taps: dict[str, _Tap] = {}
        for name, shift in added.items():
            room = layer.attention if name in ("qkv", "o") else layer.mlp
            taps[name] = _Tap(getattr(room, name), shift)
            object.__setattr__(room, name, taps[name])
        at = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        y, _ = layer(x, at, None)
        return y, {name: tap.seen for name, tap in taps.items()}

    def back(params: Params, x: jax.Array, gradient: jax.Array) -> Any:
        added = {n: jnp.zeros((*x.shape[:2], *spec.shape[:-1])) for n, spec in specs.items()}
        _, pull, seen = jax.vjp(functools.partial(run, params), x, added, has_aux=True)
        before, at_outputs = jax.vmap(pull)(gradient)
        return before, seen, at_outputs

    return jax.jit(lambda params, x: run(params, x, {})[0]), jax.jit(back)


@jax.jit
def _from_logits(
    x: jax.Array, norm: jax.Array, head: jax.Array, eps: Any, counted: jax.Array, key: jax.Array
) -> jax.Array:
    """Hidden states [T, D] before the final norm -> the gradient there of v (see above)."""
    logits, pull = jax.vjp(lambda x: _logits(x, norm, head, eps), x)
    p = jax.nn.softmax(logits)
    drawn = jnp.sqrt(p) * jax.random.rademacher(key, p.shape, p.dtype)
    v = drawn - p * jnp.sum(drawn, axis=-1, keepdims=True)
    return pull(v * counted[:, None])[0]


def _logits(x: jax.Array, norm: jax.Array, head: jax.Array, eps: Any) -> jax.Array:
    return jnp.dot(rms_norm(x, norm[None], eps), head.T, precision=_FLOAT)


@jax.jit
def _of_head(
    x: jax.Array, norm: jax.Array, head: jax.Array, eps: Any, counted: jax.Array, left: jax.Array
) -> jax.Array:
    """The sum over tokens of the variance under p of what an error [V, D] does to the logits."""
    p = jax.nn.softmax(_logits(x, norm, head, eps))
    moved = _logits(x, norm, left, eps)
    mean = jnp.sum(p * moved, axis=-1, keepdims=True)
    return jnp.sum(jnp.sum(p * jnp.square(moved - mean), axis=-1) * counted)


@jax.jit
def _of_texts(x: jax.Array, gradient: jax.Array, left: jax.Array) -> jax.Array:
    """The sum over texts and draws of (sum over tokens of g . E x)^2, of x[B, T, I],
    g[S, B, T, O] and E[O, I]."""
    moved = jnp.dot(x, left.T, precision=_FLOAT)
    return jnp.sum(jnp.square(jnp.einsum("bto,sbto->sb", moved, gradient, precision=_FLOAT)))


class _Gauge:
    def __init__(
        self,
        sides: Sides,
        samples: Samples,
        walk: Walk,
        most: int,
        folder: Path,
        keep: Callable[[str, WeightDelta], None],
    ) -> None:
        self.sides, self.samples, self.walk = sides, samples, walk
        self.most, self.folder, self.keep = most, folder, keep
        self.config = sides.config
        self.head = EMBED if self.config.tie_word_embeddings else HEAD
        self.counted = max(float(samples.counted.sum()), 1.0)

    def run(self, hear: Callable[[int, int], None]) -> Errors:
        """See `measure_errors`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        count, done = self.config.num_layers, self.folder / "errors.safetensors"
        if done.exists():
            return _read_errors(read_arrays(done)[1])
        at = next((i for i in range(count + 1) if self._file("back", i).exists()), None)
        if at is None:
            x = self._forward(hear)
            at, found = count, dict[str, tuple[float, ...]]()
            gradient = self._start(x)
            write_arrays(self._file("back", count), {"gradient": gradient}, _as_text(found))
        else:
            arrays, about = read_arrays(self._file("back", at))
            gradient, found = arrays["gradient"], _read_errors(about)
        for index in reversed(range(at)):
            hear(2 * count - index, 2 * count + 1)
            gradient, more = self._layer(index, gradient)
            found |= more
            write_arrays(self._file("back", index), {"gradient": gradient}, _as_text(found))
            self._file("back", index + 1).unlink()
            self._file("in", index).unlink(missing_ok=True)
        hear(2 * count, 2 * count + 1)
        found |= self._vocabulary(gradient)
        write_arrays(done, {}, _as_text(found))
        return found

    def _file(self, kind: str, index: int) -> Path:
        return self.folder / f"{kind}-{index}.safetensors"

    def _names(self, index: int) -> list[str]:
        specs = param_specs(self.config)["layers"][index]
        return [name for spec in specs.values() for name in spec.sources]

    def _own_layer(self, index: int) -> Params:
        own = {name: self.sides.own(name) for name in self._names(index)}
        return fuse_layer(self.config, index, own)

    def _inputs(self, index: int) -> np.ndarray:
        return read_arrays(self._file("in", index))[0]["x"]

    def _forward(self, hear: Callable[[int, int], None]) -> np.ndarray:
        """The fine-tune's hidden states, [N, T, D], before each layer onto the disk, and those
        after the last."""
        count = self.config.num_layers
        at = next((i for i in range(count, -1, -1) if self._file("in", i).exists()), None)
        if at is None:
            at, x = 0, np.asarray(self.sides.own(EMBED))[self.samples.tokens[:, :-1]]
            write_arrays(self._file("in", 0), {"x": x}, {})
        else:
            x = self._inputs(at)
        for index in range(at, count):
            hear(index, 2 * count + 1)
            params, (run, _) = self._own_layer(index), self._programs(index)
            x = np.concatenate(
                [run(params, jnp.asarray(x[rows])) for rows in self.samples.batches(self.walk.rows)]
            )
            write_arrays(self._file("in", index + 1), {"x": x}, {})
        return x

    def _programs(self, index: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        window = self.config.window
        same = next(i for i in range(index + 1) if window(i) == window(index))
        return _programs(self.config, same)

    def _start(self, x: np.ndarray) -> np.ndarray:
        """The gradients at the last layer's outputs, float32[S, N, T, D]."""
        norm, head = self.sides.own(FINAL_NORM), self.sides.own(self.head)
        eps, key = self.config.rms_norm_eps, jax.random.key(0)
        out = np.empty((DRAWS, *x.shape), np.float32)
        for draw, row in np.ndindex(out.shape[:2]):
            signs = jax.random.fold_in(jax.random.fold_in(key, row), draw)
            counted = self.samples.counted[row]
            out[draw, row] = _from_logits(jnp.asarray(x[row]), norm, head, eps, counted, signs)
        return out

    def _layer(self, index: int, gradient: np.ndarray) -> tuple[np.ndarray, Errors]:
        """The gradients before a layer, and the errors of its matrices."""
        params, (_, back), x = self._own_layer(index), self._programs(index), self._inputs(index)
        before, seen, at_outputs = np.empty_like(gradient), [], []
        for rows in self.samples.batches(self.walk.rows):
            parts = back(params, jnp.asarray(x[rows]), jnp.asarray(gradient[:, rows]))
            before[:, rows] = parts[0]
            seen.append(jax.tree.map(np.asarray, parts[1]))
            at_outputs.append(jax.tree.map(np.asarray, parts[2]))
        found: Errors = {}
        for part in _PARTS:
            taken = np.concatenate([each.pop(part) for each in seen])
            given = np.concatenate([each.pop(part) for each in at_outputs], axis=1)
            given = given.reshape(*given.shape[:3], -1)
            second = self._second(taken)
            for name, columns in self._columns(index, part).items():
                judge = functools.partial(self._of_texts, taken, given[..., columns])
                found |= self._judged(name, second, judge)
        return before, found

    def _of_texts(self, x: np.ndarray, gradient: np.ndarray, left: np.ndarray) -> float:
        error = jnp.asarray(left)
        batches = self.samples.batches(self.walk.rows)
        return sum(float(_of_texts(x[r], gradient[:, r], error)) for r in batches) / DRAWS

    def _columns(self, index: int, part: str) -> dict[str, np.ndarray]:
        """Where each tensor's rows lie among the flat outputs of a fused weight."""
        marks, start, shapes = {}, 0, tensor_shapes(self.config)
        for name in self._names(index):
            high, wide = shapes[name][0], len(shapes[name]) - 1
            marks[name] = np.arange(start, start + high).reshape(-1, *(1,) * wide)
            start += high
        order = np.argsort(fuse_layer(self.config, index, marks)[part].reshape(-1))
        sources = param_specs(self.config)["layers"][index][part].sources
        ends = np.cumsum([len(marks[name]) for name in sources])
        return dict(zip(sources, np.split(order, ends[:-1]), strict=True))

    def _second(self, x: np.ndarray) -> np.ndarray:
        """Second moments of inputs [N, T, I] that are not padding."""
        flat = x[self.samples.seen > 0]
        return flat.T @ flat / max(len(flat), 1)

    def _judged(
        self, name: str, second: np.ndarray, judge: Callable[[np.ndarray], float]
    ) -> Errors:
        """A matrix' errors at each number of levels; nothing if it has no signs."""
        if self.sides.delta(name).bits is None:
            return {}
        found = tuple(judge(left) / (2 * self.counted) for left in self._left(name, second))
        return {name: found}

    def _left(self, name: str, second: np.ndarray) -> Iterator[np.ndarray]:
        """What levels leave of a delta, float32[O, I]: its own number of them first."""
        own, whole = self.sides.delta(name), self.sides.difference(name)
        (has, rows), size = np.asarray(own.bits).shape[:2], whole.shape[1]
        whole[rows:] = 0  # kept whole
        fitted = self.walk.fit != "none" and not (name == EMBED and self.head == HEAD)
        sweeps = self.walk.sweeps if self.walk.fit == "signs" else 0
        for levels in range(has, max(self.most, has) + 1):
            made = own if levels == has else _begun(self.sides, name, own, levels)
            if fitted:
                fit_to, kind = damped(second), _kind(own)
                made = fit_matrix(whole[:rows], fit_to, made, scale=kind, sweeps=sweeps).delta
            self.keep(name, dataclasses.replace(made, tail=own.tail))
            left = whole.copy()
            for signs, scale in zip(unpack_codes(made, size), np.asarray(made.scale), strict=True):
                left[:rows] -= scale[:, None] * signs
            yield left

    def _vocabulary(self, gradient: np.ndarray) -> Errors:
        """Errors of embedding and head."""
        x, tokens = self._inputs(self.config.num_layers), self.samples.tokens[:, :-1]
        norm, head = self.sides.own(FINAL_NORM), self.sides.own(self.head)
        eps = self.config.rms_norm_eps
        hidden = np.asarray(rms_norm(jnp.asarray(x), norm[None], eps))
        moment = self._second(hidden)

        def as_head(left: np.ndarray) -> float:
            error = jnp.asarray(left)
            rows = zip(x, self.samples.counted, strict=True)
            return sum(float(_of_head(r, norm, head, eps, c, error)) for r, c in rows)

        def as_lookup(left: np.ndarray) -> float:
            each = np.einsum("ntd,sntd->sn", left[tokens], gradient)
            return float(np.square(each, dtype=np.float64).sum()) / DRAWS

        if self.head == HEAD:
            return self._judged(HEAD, moment, as_head) | self._judged(EMBED, moment, as_lookup)
        even = np.eye(len(moment), dtype=np.float32) * np.trace(moment) / len(moment)
        return self._judged(EMBED, moment + even, lambda left: as_head(left) + as_lookup(left))


def _as_text(errors: Errors) -> dict[str, str]:
    return {"errors": json.dumps(errors)}


def _read_errors(about: Mapping[str, str]) -> Errors:
    return {name: tuple(each) for name, each in json.loads(about["errors"]).items()}
