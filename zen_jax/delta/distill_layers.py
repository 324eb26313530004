"""Distilling one layer after the other: of each model one layer is in memory.

Two streams of hidden states go through the model side by side: the fine-tune's, and that of the
base with what was fitted so far. A layer's inputs are taken from the second, as the layer will see
them; signs and scales are fitted to their second moments, and the scales then trained so that the
layer's outputs are the fine-tune's (mean squared error). A third stream, of held-out text, is the
plain delta's, so that the result can be compared with what was begun with.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention.reference import rms_norm
from zen_jax.attention import attend, visible
from zen_jax.config import ModelConfig
from zen_jax.delta.apply import effective_weight
from zen_jax.delta.distill_fit import damped, fit_matrix
from zen_jax.delta.distill_scales import (
    Loss,
    Scales,
    Training,
    read_arrays,
    train_scales,
    write_arrays,
)
from zen_jax.delta.format import WeightDelta
from zen_jax.layout import EMBED, FINAL_NORM, HEAD, Params, fuse_layer, param_specs
from zen_jax.model import Layer, make_layer

Fitting = Literal["signs", "scales", "none"]


@functools.lru_cache(maxsize=8)
def _programs(config: ModelConfig, index: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jitted (params, x[B, T, D]) -> x after the layer; and (params, x, seen[B, T]) -> it and the
    summed second moments of what q|k|v, o, gate|up and down take in."""
    merge = make_layer(config, index)

    def positions(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])

    def run(params: Params, x: jax.Array) -> jax.Array:
        return merge(params)(x, positions(x), None)[0]

    def taps(params: Params, x: jax.Array, seen: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        layer = merge(params)
        y, inputs = _inputs(layer, x, positions(x))
        moments = [
            jnp.einsum("bti,bt,btj->ij", z, seen, z, precision=jax.lax.Precision.HIGHEST)
            for z in inputs
        ]
        return y, moments

    return jax.jit(run), jax.jit(taps)


def _inputs(layer: Layer, x: jax.Array, at: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """A layer's output, and what its four weights are multiplied with, [B, T, I] each."""
    attention, mlp = layer.attention, layer.mlp
    first = layer.attn_norm(x)
    q, k, v = attention.project(first, at)
    second = attend(q, k, v, visible(at, at, attention.window)).reshape(*x.shape[:2], -1)
    x = x + attention.o(second)
    third = layer.mlp_norm(x)
    both = mlp.gate_up(third)
    fourth = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    return x + mlp.down(fourth), [first, second, third, fourth]


def _weights_of(config: ModelConfig, index: int) -> dict[str, int]:
    """Hugging Face matrix of a layer -> which of the four inputs it takes."""
    specs = param_specs(config)["layers"][index]
    order = ("qkv", "o", "gate_up", "down")
    return {name: at for at, part in enumerate(order) for name in specs[part].sources}


@dataclasses.dataclass(frozen=True)
class Samples:
    """Tokens to distil or to compare on.

    Attributes:
      tokens: int32[N, T + 1]; inputs are all but the last, targets all but the first.
      counted: float32[N, T], 1 for the targets that count. What follows a row's last one is
        padding.
    """

    tokens: np.ndarray
    counted: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """float32[N, T], 1 up to each row's last counted target."""
        reached = np.cumsum(self.counted[:, ::-1], axis=1)[:, ::-1]
        return (reached > 0).astype(np.float32)

    def batches(self, rows: int) -> Iterator[slice]:
        """Rows of each forward pass; the last pass may have fewer."""
        for start in range(0, len(self.tokens), rows):
            yield slice(start, min(start + rows, len(self.tokens)))


@dataclasses.dataclass(frozen=True)
class Sides:
    """A fine-tune, its base and what is kept of their difference, a tensor at a time.

    Attributes:
      config: the fine-tune's architecture.
      base: name -> the base's tensor in the fine-tune's shape: zeros where the base has no row.
      tuned: name -> the fine-tune's.
      delta: name -> what a variant keeps.
    """

    config: ModelConfig
    base: Callable[[str], np.ndarray]
    tuned: Callable[[str], np.ndarray]
    delta: Callable[[str], WeightDelta]

    def whole(self, name: str, delta: WeightDelta | None = None) -> jax.Array:
        """The base's tensor with its delta, or with another one, float32."""
        return effective_weight(jnp.asarray(self.base(name)), delta or self.delta(name))

    def own(self, name: str) -> jax.Array:
        """The fine-tune's tensor, float32."""
        return jnp.asarray(self.tuned(name), jnp.float32)

    def difference(self, name: str) -> np.ndarray:
        """What the fine-tune adds, float32."""
        return self.tuned(name).astype(np.float32) - self.base(name).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Walk:
    """How layers are distilled.

    Attributes:
      fit: "signs" and scales, or "scales" alone, by the inputs' second moments; "none" leaves both.
      sweeps: over signs.
      training: of a layer's scales afterwards; None for none.
      rows: of a forward pass.
    """

    fit: Fitting = "signs"
    sweeps: int = 4
    training: Training | None = None
    rows: int = 8


@dataclasses.dataclass(frozen=True)
class Walked:
    """What the layers came to.

    Attributes:
      deltas: of every matrix with signs, by tensor.
      before: KL(fine-tune || plain delta) on held-out text, nats a token.
      after: of `deltas`.
      layers: for each layer the mean of its matrices' errors before and after they were fitted,
        and, when its scales were trained, its outputs' error on held-out text before and after.
    """

    deltas: dict[str, WeightDelta]
    before: float
    after: float
    layers: tuple[dict[str, float], ...]


def distill_layers(
    sides: Sides,
    train: Samples,
    held: Samples,
    walk: Walk,
    folder: Path,
    hear: Callable[[int, int], None] = lambda done, total: None,
) -> Walked:
    """Distils a delta one layer after the other; goes on where it was interrupted.

    Args:
      sides: the models.
      train: what is fitted to.
      held: what is compared on.
      walk: how.
      folder: of this run alone: what is in it already is gone on from.
      hear: called after each layer with how many are done, and of how many.

    Raises:
      ValueError: a file in the folder is damaged, or weights or inputs are not finite.
    """
    return _Walker(sides, train, held, walk, folder).run(hear)


def own_moments(sides: Sides, samples: Samples, rows: int) -> Iterator[tuple[str, np.ndarray]]:
    """Second moments float32[I, I] of what the fine-tune multiplies each matrix of its layers with.

    Args:
      sides: only the fine-tune is read.
      samples: what it reads.
      rows: of a forward pass.
    """
    walker = _Walker(sides, samples, samples, Walk(rows=rows), Path())
    x = np.asarray(sides.own(EMBED))[samples.tokens[:, :-1]]
    for index in range(sides.config.num_layers):
        params = walker.own_layer(index)
        moments = walker.moments(index, params, x)
        for name, at in _weights_of(sides.config, index).items():
            yield name, moments[at]
        x = walker.advance(index, params, x)


class _Walker:
    def __init__(
        self, sides: Sides, train: Samples, held: Samples, walk: Walk, folder: Path
    ) -> None:
        self.sides, self.train, self.held = sides, train, held
        self.walk, self.folder = walk, folder
        self.config = sides.config
        self.head = EMBED if self.config.tie_word_embeddings else HEAD

    def run(self, hear: Callable[[int, int], None]) -> Walked:
        count = self.config.num_layers
        at = next((i for i in range(count, -1, -1) if self._streams(i).exists()), None)
        if at is None:
            at, streams = 0, self._begin()
            write_arrays(self._streams(0), streams, {})
        else:
            streams, _ = read_arrays(self._streams(at))
        for index in range(at, count):
            hear(index, count + 1)
            streams = self._layer(index, streams)
            write_arrays(self._streams(index + 1), streams, {})
            self._streams(index).unlink()
        hear(count, count + 1)
        return self._finish(streams)

    def _streams(self, index: int) -> Path:
        return self.folder / f"streams-{index}.safetensors"

    def _begin(self) -> dict[str, np.ndarray]:
        """Embeddings of all streams; a tied one is fitted as the head that it is as well."""
        own, plain = np.asarray(self.sides.own(EMBED)), np.asarray(self.sides.whole(EMBED))
        fitted = plain
        if self.head == EMBED and self.walk.fit != "none":
            moment = self._head_moment(own[self.train.tokens[:, :-1]])
            # Looked up, each row's error counts by itself.
            even = np.eye(len(moment), dtype=np.float32) * np.trace(moment) / len(moment)
            deltas, errors = self._fit([EMBED], [moment + even], {EMBED: 0})
            self._keep("embedding", deltas, errors)
            if deltas:
                fitted = np.asarray(self.sides.whole(EMBED, deltas[EMBED]))
        train, held = self.train.tokens[:, :-1], self.held.tokens[:, :-1]
        return {
            "train.tuned": own[train],
            "train.fitted": fitted[train],
            "held.tuned": own[held],
            "held.fitted": fitted[held],
            "held.plain": plain[held],
        }

    def _head_moment(self, x: np.ndarray) -> np.ndarray:
        """Second moments of what the fine-tune's own head sees."""
        for index in range(self.config.num_layers):
            x = self.advance(index, self.own_layer(index), x)
        return self._moment_of_hidden(x, self.sides.own(FINAL_NORM))

    def _moment_of_hidden(self, x: np.ndarray, norm: jax.Array) -> np.ndarray:
        size = self.config.hidden_size
        total, seen = np.zeros((size, size), np.float32), self.train.seen
        for rows in self.train.batches(self.walk.rows):
            y = np.asarray(rms_norm(jnp.asarray(x[rows]), norm[None], self.config.rms_norm_eps))
            flat = y[seen[rows] > 0]
            total += flat.T @ flat
        return total / max(float(seen.sum()), 1.0)

    def _names(self, index: int) -> list[str]:
        specs = param_specs(self.config)["layers"][index]
        return [name for spec in specs.values() for name in spec.sources]

    def own_layer(self, index: int) -> Params:
        """The fine-tune's."""
        return fuse_layer(self.config, index, {n: self.sides.own(n) for n in self._names(index)})

    def advance(self, index: int, params: Params, x: np.ndarray) -> np.ndarray:
        """A stream [N, T, D] after a layer."""
        run, _ = _programs(self.config, _alike(self.config, index))
        out = np.empty_like(x)
        for start in range(0, len(x), self.walk.rows):
            rows = slice(start, start + self.walk.rows)
            out[rows] = run(params, jnp.asarray(x[rows]))
        return out

    def _layer(self, index: int, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tuned = self.own_layer(index)
        moments = self.moments(index, tuned, streams["train.fitted"])
        inputs = _weights_of(self.config, index)
        deltas, errors = self._fit(list(inputs), moments, inputs)
        after = {
            name: self.advance(index, tuned, streams[name])
            for name in ("train.tuned", "held.tuned")
        }
        names = self._names(index)
        if self.walk.training is not None:
            deltas = deltas or {n: d for n in names if (d := self.sides.delta(n)).bits is not None}
            deltas, looks = self._train(index, deltas, streams, after)
            errors |= looks
        self._keep(f"layer-{index}", deltas, errors)
        plain = fuse_layer(self.config, index, {n: self.sides.whole(n) for n in names})
        fitted = {n: self.sides.whole(n, deltas.get(n)) for n in names}
        mine = fuse_layer(self.config, index, fitted)
        for name in ("train.fitted", "held.fitted"):
            after[name] = self.advance(index, mine, streams[name])
        after["held.plain"] = self.advance(index, plain, streams["held.plain"])
        return after

    def moments(self, index: int, params: Params, x: np.ndarray) -> list[np.ndarray]:
        """Second moments of the four inputs of a layer, none if nothing is fitted."""
        if self.walk.fit == "none":
            return []
        _, taps = _programs(self.config, _alike(self.config, index))
        totals: list[Any] = [0.0] * 4
        for rows in self.train.batches(self.walk.rows):
            _, parts = taps(params, jnp.asarray(x[rows]), jnp.asarray(self.train.seen[rows]))
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return [np.asarray(total) / max(float(self.train.seen.sum()), 1.0) for total in totals]

    def _fit(
        self, names: Sequence[str], moments: Sequence[np.ndarray], inputs: Mapping[str, int]
    ) -> tuple[dict[str, WeightDelta], dict[str, float]]:
        """Signs and scales of those matrices that have signs, and the mean of their errors."""
        deltas: dict[str, WeightDelta] = {}
        errors = []
        for name in names if self.walk.fit != "none" else ():
            start = self.sides.delta(name)
            if start.bits is None or start.scale is None:
                continue
            rows = start.bits.shape[1]
            fit = fit_matrix(
                self.sides.difference(name)[:rows],
                damped(moments[inputs[name]]),
                start,
                scale="matrix" if start.scale.shape[1] < rows else "row",
                sweeps=self.walk.sweeps if self.walk.fit == "signs" else 0,
            )
            deltas[name] = dataclasses.replace(fit.delta, tail=start.tail)
            errors.append((fit.before, fit.after))
        means = np.mean(errors, axis=0) if errors else (0.0, 0.0)
        return deltas, {"fit_before": float(means[0]), "fit_after": float(means[1])}

    def _train(
        self,
        index: int,
        deltas: dict[str, WeightDelta],
        streams: Mapping[str, np.ndarray],
        after: Mapping[str, np.ndarray],
    ) -> tuple[dict[str, WeightDelta], dict[str, float]]:
        """Scales that bring the layer's outputs nearer to the fine-tune's."""
        like = _alike(self.config, index)

        def local(name: str) -> str:
            return name.replace(f".layers.{index}.", f".layers.{like}.")

        fixed = {
            local(n): (jnp.asarray(self.sides.base(n), jnp.float32), jnp.asarray(deltas[n].bits))
            if n in deltas
            else (self.sides.whole(n), None)
            for n in self._names(index)
        }
        loss = _layer_loss(self.config, like)

        def batches(side: str, samples: Samples) -> list[Any]:
            parts = (streams[f"{side}.fitted"], after[f"{side}.tuned"], samples.seen)
            return [tuple(part[rows] for part in parts) for rows in samples.batches(self.walk.rows)]

        held, test = batches("held", self.held), jax.jit(loss)

        def judge(scales: Scales) -> float:
            weights = [float(batch[2].sum()) for batch in held]
            return float(np.average([test(scales, fixed, b) for b in held], weights=weights))

        start = {local(n): np.asarray(d.scale) for n, d in deltas.items()}
        assert self.walk.training is not None
        done = train_scales(
            start, loss, fixed, batches("train", self.train), judge, self.walk.training
        )
        better = {n: dataclasses.replace(d, scale=done.scales[local(n)]) for n, d in deltas.items()}
        return better, {"train_before": done.before, "train_after": done.best}

    def _keep(self, name: str, deltas: Mapping[str, WeightDelta], errors: dict[str, float]) -> None:
        arrays = {f"{n}#bits": np.asarray(d.bits) for n, d in deltas.items()}
        arrays |= {f"{n}#scale": np.asarray(d.scale) for n, d in deltas.items()}
        about = {"errors": json.dumps(errors)}
        write_arrays(self.folder / f"{name}.safetensors", arrays, about)

    def _kept(self, name: str) -> tuple[dict[str, WeightDelta], dict[str, float]]:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return {}, {}
        arrays, about = read_arrays(path)
        names = sorted({part.rpartition("#")[0] for part in arrays})
        deltas = {
            n: WeightDelta(
                bits=arrays[f"{n}#bits"],
                scale=arrays[f"{n}#scale"],
                tail=self.sides.delta(n).tail,
            )
            for n in names
        }
        return deltas, json.loads(about["errors"])

    def _finish(self, streams: Mapping[str, np.ndarray]) -> Walked:
        """The head, and how far all of it is from the fine-tune."""
        norm = self.sides.whole(FINAL_NORM)
        if self.head == HEAD and self.walk.fit != "none":
            moment = self._moment_of_hidden(streams["train.fitted"], norm)
            self._keep("head", *self._fit([HEAD], [moment], {HEAD: 0}))
        deltas, _ = self._kept("embedding")
        deltas |= self._kept("head")[0]
        layers = []
        for index in range(self.config.num_layers):
            found, errors = self._kept(f"layer-{index}")
            deltas |= found
            layers.append(errors)
        fitted = self.sides.whole(self.head, deltas.get(self.head))
        weights = {
            "plain": (norm, self.sides.whole(self.head)),
            "fitted": (norm, fitted),
            "tuned": (self.sides.own(FINAL_NORM), self.sides.own(self.head)),
        }
        before, after = self._divergence(streams, weights)
        return Walked(deltas, before, after, tuple(layers))

    def _divergence(
        self, streams: Mapping[str, np.ndarray], weights: Mapping[str, tuple[jax.Array, jax.Array]]
    ) -> tuple[float, float]:
        """KL(fine-tune || plain) and KL(fine-tune || fitted), nats a counted token."""
        totals, eps = np.zeros(2), self.config.rms_norm_eps
        for row, counted in enumerate(self.held.counted):
            found = {
                name: _log_probabilities(jnp.asarray(streams[f"held.{name}"][row]), *pair, eps)
                for name, pair in weights.items()
            }
            mine = jnp.exp(found["tuned"])
            for at, name in enumerate(("plain", "fitted")):
                each = jnp.sum(mine * (found["tuned"] - found[name]), axis=-1)
                totals[at] += float(jnp.sum(each * counted))
        before, after = totals / max(float(self.held.counted.sum()), 1.0)
        return float(before), float(after)


@jax.jit
def _log_probabilities(x: jax.Array, norm: jax.Array, head: jax.Array, eps: Any) -> jax.Array:
    """Hidden states [T, D] before the final norm -> log-probabilities [T, V]."""
    hidden = rms_norm(x, norm[None], eps)
    return jax.nn.log_softmax(jnp.dot(hidden, head.T, precision=jax.lax.Precision.HIGHEST))


def _alike(config: ModelConfig, index: int) -> int:
    """The first layer that runs the same program: what differs is the window."""
    return next(i for i in range(index + 1) if config.window(i) == config.window(index))


@functools.lru_cache(maxsize=8)
def _layer_loss(config: ModelConfig, index: int) -> Loss:
    """(scales, name -> (base, bits or None), (x, y, seen)) -> mean square of what is missed."""
    run, _ = _programs(config, index)

    def loss(scales: Scales, fixed: Any, batch: Any) -> jax.Array:
        tensors = {
            name: value
            if bits is None
            else effective_weight(value, WeightDelta(bits=bits, scale=scales[name]))
            for name, (value, bits) in fixed.items()
        }
        x, y, seen = batch
        missed = run(fuse_layer(config, index, tensors), x) - y
        each = jnp.mean(jnp.square(missed), axis=-1)
        return jnp.sum(each * seen) / jnp.maximum(jnp.sum(seen), 1)

    return loss
