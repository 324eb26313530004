"""A variant of a store distilled on text: read from it, fitted and trained, published as its next
version, if that is nearer to its fine-tune than the one before.

With a budget of bytes single matrices get more levels of signs first, where that is measured to
gain most for its bytes. The layers are gone through with one of each model in memory; training on
logits holds both whole. What is interrupted is gone on with by the same call.
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
from zen_jax.delta.distill_gain import measure_errors, spend, with_levels
from zen_jax.delta.distill_layers import Fitting, Samples, Sides, Walk, Walked, distill_layers
from zen_jax.delta.distill_logits import distill_logits
from zen_jax.delta.distill_scales import Curve, Training
from zen_jax.delta.format import WeightDelta
from zen_jax.distillation_budget import Budget, open_budget
from zen_jax.pairs import check_architecture, pair_up
from zen_jax.tokenizer import Tokenizer

Trains = Literal["logits", "layers", "none"]
# Fewest windows to learn from, and to compare on.
_FEWEST = 4
# No figure of a record has more digits.
_LONGEST = -1.2345678901234567e-100
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
      bytes: on disk that the version may have; what is left of it buys more levels of signs, up to
        4 a matrix. None leaves levels as they are.
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
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.fit not in get_args(Fitting) or self.train not in get_args(Trains):
            raise ValueError(
                f"fit is {self.fit!r} and train {self.train!r}; expected one of "
                f"{get_args(Fitting)} and one of {get_args(Trains)}"
            )
        if self.fit == self.train == "none" and self.bytes is None:
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
      levels: of signs, of each matrix of the best that has any.
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
    levels: dict[str, int]
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
      ValueError: an option will not do, a text is too short or no UTF-8, the variant is not in
        signs, or takes more bytes than the budget.
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
    train, held = read_samples(texts, tokenizer, how, source.config.max_position)
    sides = _sides(source, target, variant, manifest)
    options = dataclasses.asdict(how) | {"variant": manifest.digest, "text": _digest(train, held)}
    key = work_key(source, target.base().digest, {"distil": options})
    windows = len(train.tokens), len(held.tokens)

    def record(how: Distilling, before: float, after: float) -> dict[str, Any]:
        return _record(source, variant, manifest, how, windows, (before, after))

    with Publisher(target.path, key) as publisher:
        scratch, before, raised = publisher.scratch, None, list[str]()
        if how.bytes is not None:
            longest = record(dataclasses.replace(how, bytes=10**15), _LONGEST, _LONGEST)
            budget = open_budget(manifest, longest, how.bytes)
            sides, before, raised = _spend(sides, budget, train, held, how, scratch, hear)
        walked, deltas, after, curve = _run(sides, raised, train, held, how, scratch, key, hear)
        before = walked.before if before is None else before
        result = Distilled(
            name=name,
            began=variant.version,
            version=None,
            windows=windows,
            before=before,
            fitted=walked.after,
            after=min(after, before),
            layers=walked.layers,
            curve=curve,
            bytes=manifest.bytes_on_disk,
            levels=_levels(manifest),
            seconds=time.perf_counter() - began,
        )
        if after >= before:
            return result
        made_so = record(how, before, after)
        new = _publish(publisher, target, variant, manifest, deltas, made_so, how.bytes)
    return dataclasses.replace(
        result,
        version=new.version,
        bytes=new.bytes_on_disk,
        levels=_levels(new),
        seconds=time.perf_counter() - began,
    )


def _levels(manifest: Manifest) -> dict[str, int]:
    return {n: entry.levels for n, entry in manifest.tensors.items() if entry.policy == "bit"}


def _record(
    source: Source,
    variant: Variant,
    manifest: Manifest,
    how: Distilling,
    windows: tuple[int, int],
    divergence: tuple[float, float],
) -> dict[str, Any]:
    """How the next version is made; its KL before and after."""
    told = {
        "fit": how.fit,
        "train": how.train,
        "windows": list(windows),
        "kl_before": divergence[0],
        "kl_after": divergence[1],
        "options": dataclasses.asdict(how),
        "from": variant.digest,
    }
    record = made(source, manifest.made.get("options", {})) | {
        "distilled": told,
        "warnings": list(manifest.made.get("warnings", ())),
    }
    for kept in ("kinship", "tokenizer_from_base"):
        if kept in manifest.made:
            record[kept] = manifest.made[kept]
    return record


def _spend(
    sides: Sides,
    budget: Budget,
    train: Samples,
    held: Samples,
    how: Distilling,
    folder: Path,
    hear: Callable[[str, int, int], None],
) -> tuple[Sides, float, list[str]]:
    """The variant with the levels that a budget buys, made of weights alone; the KL on held-out
    text of what was begun with; and the matrices that got more levels."""
    as_it_is = folder / "before"
    as_it_is.mkdir(exist_ok=True)
    few = Samples(held.tokens[:1], held.counted[:1])
    begun = distill_layers(
        sides,
        few,
        held,
        Walk("none", rows=how.rows),
        as_it_is,
        lambda done, total: hear("held-out text", done, total),
    )
    errors = measure_errors(
        sides,
        train,
        Walk(how.fit, how.sweeps, None, how.rows),
        budget.most,
        folder / "gains",
        lambda done, total: hear("gains", done, total),
    )
    levels = spend(budget.held, errors, budget.costs, budget.room)
    raised = [name for name, has in budget.held.items() if levels[name] > has]
    return with_levels(sides, levels, folder / "levels"), begun.before, raised


def read_samples(
    texts: Sequence[Path], tokenizer: Tokenizer, how: Distilling, positions: int
) -> tuple[Samples, Samples]:
    """Windows of texts to learn from and, spread evenly among them, to compare on.

    Args:
      texts: UTF-8 files.
      tokenizer: the variant's.
      how: says how long windows are, and how many.
      positions: of the model.

    Raises:
      ValueError: a text is no UTF-8, all are too short together, or a window has more tokens than
        the model has positions.
    """
    if how.length > positions:
        raise ValueError(f"--length is {how.length}; the model has {positions} positions")
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
    raised: Sequence[str],
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
    # What the layers made worse is not gone on with; more levels are new all the same.
    deltas = walked.deltas if walked.after < walked.before else {}
    deltas = {n: sides.delta(n) for n in raised if n not in deltas} | deltas
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
    most: int | None,
) -> Manifest:
    """A version like another one but for signs and scales, cut into files as that one is.

    Raises:
      ValueError: it takes more bytes than `most`.
    """

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

    def entry(name: str, old: TensorEntry) -> TensorEntry:
        parts = {kind: written.parts[f"{name}.{kind}"] for kind in old.parts}
        levels = parts["bits"].shape[0] if "bits" in parts else old.levels
        return dataclasses.replace(old, parts=parts, levels=levels)

    entries = {name: entry(name, old) for name, old in manifest.tensors.items()}

    def describe(version: int) -> Manifest:
        new = dataclasses.replace(
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
        if most is not None and new.bytes_on_disk > most:
            raise ValueError(
                f"the new version would take {new.bytes_on_disk:,} bytes, more than the {most:,} "
                "allowed; nothing was published, allow that many"
            )
        return new

    return publisher.publish_variant(manifest.name, describe)


def _cut(part: Any) -> tuple[int, int]:
    return part.shards, part.axis
