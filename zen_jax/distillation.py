"""A variant of a store distilled on text: read from it, fitted and trained, published as its next
version, if that is nearer to its fine-tune than the one before.

The layers are gone through with one of each model in memory; training on logits holds both whole.
What is interrupted is gone on with by the same call.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from zen_jax.checkpoint.manifest import Manifest, TensorEntry, Variant, content_digest
from zen_jax.checkpoint.plan import made, work_key
from zen_jax.checkpoint.publish import LazyArray, Publisher
from zen_jax.checkpoint.source import Source, open_source
from zen_jax.checkpoint.store import Store
from zen_jax.delta.distill_layers import Fitting, Samples, Sides, Walk, Walked, distill_layers
from zen_jax.delta.distill_logits import distill_logits
from zen_jax.delta.distill_scales import Curve, Training
from zen_jax.delta.format import WeightDelta
from zen_jax.pairs import check_architecture, pair_up
from zen_jax.tokenizer import Tokenizer

Trains = Literal["logits", "layers", "none"]
# Fewest windows to learn from, and to compare on.
_FEWEST = 4
_HELD_PERCENT = 10


@dataclasses.dataclass(frozen=True)
class Distilling:
    """How a variant is distilled.

    Attributes:
      fit: "signs" and scales to the inputs of each layer, "scales" alone (the closed form), "none".
      train: scales by the "logits" of the whole models, by the outputs of each of the "layers", or
        "none".
      samples: windows of text at most, a tenth of them held out.
      length: tokens of a window.
      rate: of Adam; see `zen_jax.delta.distill_scales`.
      cosine: whether it falls to 0.
      steps: of training; 0 goes once through the samples.
      rows: windows of a forward pass.
      sweeps: over signs, at most.
    """

    fit: Fitting = "signs"
    train: Trains = "logits"
    samples: int = 800
    length: int = 128
    rate: float = 1e-4
    cosine: bool = True
    steps: int = 0
    rows: int = 4
    sweeps: int = 4

    def __post_init__(self) -> None:
        if self.fit not in get_args(Fitting) or self.train not in get_args(Trains):
            raise ValueError(
                f"fit is {self.fit!r} and train {self.train!r}; expected one of "
                f"{get_args(Fitting)} and one of {get_args(Trains)}"
            )
        if self.fit == self.train == "none":
            raise ValueError("fit and train are both 'none'; there is nothing to do")
        for name, least in (("samples", 2 * _FEWEST), ("length", 2), ("rows", 1), ("sweeps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")
        Training(max(self.steps, 1), self.rate)


@dataclasses.dataclass(frozen=True)
class Distilled:
    """What distillation came to.

    Attributes:
      name: of the variant.
      began: the version that was distilled.
      version: that was published; None if nothing was better than `began`.
      windows: of text that were learnt from, and compared on.
      before: KL(fine-tune || variant) on held-out windows, nats a token, of `began`.
      fitted: of what the layers came to.
      after: of the best.
      layers: see `zen_jax.delta.distill_layers.Walked`.
      curve: see `zen_jax.delta.distill_scales.Trained`.
      bytes: on disk, of the best.
      seconds: it took.
    """

    name: str
    began: int
    version: int | None
    windows: tuple[int, int]
    before: float
    fitted: float
    after: float
    layers: tuple[dict[str, float], ...]
    curve: Curve
    bytes: int
    seconds: float


def distill(
    src: Path,
    store: Path,
    name: str,
    texts: Sequence[Path],
    how: Distilling | None = None,
    hear: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Distilled:
    """Distils the newest version of a variant and publishes the result as its next one.

    Args:
      src: the fine-tune that the variant was converted from.
      store: the store's folder.
      name: the variant's name.
      texts: UTF-8 files of what the variant is for.
      how: see `Distilling`.
      hear: called with what is under way, how much of it is done, and how much there is.

    Raises:
      SourceError: the fine-tune is damaged or not of the base's architecture.
      VariantNotFound, Corrupt: the variant is missing or damaged.
      FloatingPointError: training diverged.
      ValueError: an option will not do, a text is too short or no UTF-8, or the variant is not in
        signs.
    """
    began, how = time.perf_counter(), how or Distilling()
    target = Store(Path(store))
    variant = target.variant(name)
    manifest = target.manifest(variant)
    target.check_base(manifest)
    source = open_source(Path(src))
    check_architecture(source, target.base())
    if not any(entry.policy == "bit" for entry in manifest.tensors.values()):
        raise ValueError(f"{variant} keeps no matrix as signs; there is nothing to distil")
    tokenizer = Tokenizer.from_folder(target.tokenizer_folder(variant))
    train, held = read_samples(texts, tokenizer, how)
    sides = _sides(source, target, variant, manifest)
    options = dataclasses.asdict(how) | {"variant": manifest.digest, "text": _digest(train, held)}
    key = work_key(source, target.base().digest, {"distil": options})
    with Publisher(target.path, key) as publisher:
        walked, deltas, after, curve = _run(sides, train, held, how, publisher.scratch, key, hear)
        told = {
            "fit": how.fit,
            "train": how.train,
            "windows": [len(train.tokens), len(held.tokens)],
            "kl_before": walked.before,
            "kl_after": after,
        }
        result = Distilled(
            name=name,
            began=variant.version,
            version=None,
            windows=(len(train.tokens), len(held.tokens)),
            before=walked.before,
            fitted=walked.after,
            after=min(after, walked.before),
            layers=walked.layers,
            curve=curve,
            bytes=manifest.bytes_on_disk,
            seconds=time.perf_counter() - began,
        )
        if after >= walked.before:
            return result
        record = made(source, manifest.made.get("options", {})) | {
            "distilled": told | {"options": dataclasses.asdict(how), "from": variant.digest},
            "warnings": list(manifest.made.get("warnings", ())),
        }
        for kept in ("kinship", "tokenizer_from_base"):
            if kept in manifest.made:
                record[kept] = manifest.made[kept]
        new = _publish(publisher, target, variant, manifest, deltas, record)
    return dataclasses.replace(
        result,
        version=new.version,
        bytes=new.bytes_on_disk,
        seconds=time.perf_counter() - began,
    )


def read_samples(
    texts: Sequence[Path], tokenizer: Tokenizer, how: Distilling
) -> tuple[Samples, Samples]:
    """Windows of texts to learn from and, spread evenly among them, to compare on.

    Raises:
      ValueError: a text is no UTF-8, or all are too short together.
    """
    stream: list[int] = []
    end = sorted(tokenizer.eos_ids)[:1]
    for path in texts:
        try:
            text = Path(path).read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text: {error}") from error
        stream += [*tokenizer.encode(text), *end]
    count = (len(stream) - 1) // how.length
    if count < 2 * _FEWEST:
        raise ValueError(
            f"the text has {len(stream)} tokens; expected at least "
            f"{2 * _FEWEST * how.length + 1}, for {2 * _FEWEST} windows of {how.length}"
        )
    chosen = np.linspace(0, count - 1, min(how.samples, count)).astype(int)
    every = np.asarray(stream[: count * how.length + 1], np.int32)
    tokens = every[chosen[:, None] * how.length + np.arange(how.length + 1)]
    aside = max(_FEWEST, len(tokens) * _HELD_PERCENT // 100)
    held = np.zeros(len(tokens), bool)
    held[np.linspace(0, len(tokens) - 1, aside).astype(int)] = True
    shares = []
    for part in (tokens[~held], tokens[held]):
        shares.append(Samples(part, np.ones((len(part), how.length), np.float32)))
    return shares[0], shares[1]


def _digest(*samples: Samples) -> str:
    hashed = hashlib.sha256()
    for part in samples:
        hashed.update(repr(part.tokens.shape).encode() + part.tokens.tobytes())
    return hashed.hexdigest()


def _sides(source: Source, store: Store, variant: Variant, manifest: Manifest) -> Sides:
    """The models, a tensor at a time. A head that is tied in the fine-tune is not read."""
    pairs = {pair.name: pair for pair in pair_up(source, store.base())}

    def base(name: str) -> np.ndarray:
        start, shape = store.base_tensor(pairs[name].base), manifest.tensors[name].shape
        more = [(0, wide - own) for wide, own in zip(shape, start.shape, strict=True)]
        return np.pad(start, more)

    def tuned(name: str) -> np.ndarray:
        return source.read(pairs[name].tuned)

    def delta(name: str) -> WeightDelta:
        parts = store.variant_parts(variant, name)
        if "whole" in parts:
            start = base(name).astype(np.float32)
            return WeightDelta(dense=parts["whole"].astype(np.float32) - start)
        return WeightDelta(
            parts.get("bits"), parts.get("scale"), None, parts.get("dense"), parts.get("rows")
        )

    return Sides(source.config, base, tuned, delta)


def _run(
    sides: Sides,
    train: Samples,
    held: Samples,
    how: Distilling,
    folder: Path,
    key: str,
    hear: Callable[[str, int, int], None],
) -> tuple[Walked, Mapping[str, WeightDelta], float, Curve]:
    """The layers, then the logits if asked: deltas, their KL on held-out text, and the curve."""
    once = how.steps or math.ceil(len(train.tokens) / how.rows)
    training = Training(once, how.rate, how.cosine, max(1, once // 8))
    layers = training if how.train == "layers" else None
    walk = Walk(how.fit, how.sweeps, layers, how.rows)
    walked = distill_layers(
        sides, train, held, walk, folder, lambda done, total: hear("layers", done, total)
    )
    # What the layers made worse is not gone on with.
    deltas = walked.deltas if walked.after < walked.before else {}
    after = min(walked.before, walked.after)
    if how.train != "logits":
        return walked, deltas, after, ()
    better, done = distill_logits(
        sides,
        deltas,
        train,
        held,
        training,
        rows=how.rows,
        checkpoint=folder / "scales.safetensors",
        key=key,
        hear=lambda done, total: hear("logits", done, total),
    )
    return walked, better, min(after, done.best), done.curve


def _publish(
    publisher: Publisher,
    store: Store,
    variant: Variant,
    manifest: Manifest,
    deltas: Mapping[str, WeightDelta],
    record: Mapping[str, Any],
) -> Manifest:
    """A version like another one but for signs and scales, cut into files as that one is."""

    def leaves(name: str, entry: TensorEntry) -> Iterator[tuple[str, LazyArray]]:
        delta = deltas.get(name)
        fresh = {} if delta is None else {"bits": delta.bits, "scale": delta.scale}
        for kind, part in entry.parts.items():
            if fresh.get(kind) is not None:
                value = np.ascontiguousarray(fresh[kind])
                yield kind, LazyArray(value.dtype, value.shape, lambda v=value: v, *_cut(part))
                continue

            def read(kind: str = kind) -> np.ndarray:
                return store.variant_parts(variant, name)[kind]

            dtype = store.variant_parts(variant, name)[kind].dtype
            yield kind, LazyArray(dtype, part.shape, read, *_cut(part))

    tree = {n: dict(leaves(n, e)) for n, e in manifest.tensors.items() if e.parts}
    written = publisher.write(tree, store.tokenizer_files(variant))
    entries = {
        n: dataclasses.replace(e, parts={kind: written.parts[f"{n}.{kind}"] for kind in e.parts})
        for n, e in manifest.tensors.items()
    }

    def describe(version: int) -> Manifest:
        return dataclasses.replace(
            manifest,
            version=version,
            digest=content_digest(
                entries, manifest.settings, manifest.base_digest, written.tokenizer
            ),
            tensors=entries,
            tokenizer=written.tokenizer,
            files=written.files,
            made=record,
            quality={},
        )

    return publisher.publish_variant(manifest.name, describe)


def _cut(part: Any) -> tuple[int, int]:
    return part.shards, part.axis
