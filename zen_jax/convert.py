"""From checkpoints to a store: a base as it is, a fine-tune as what it adds to the base.

One tensor is held at a time. Names, shapes and dtypes are compared before anything is read;
values are checked as they are read; all problems of a source are reported together, and nothing is
published unless there is none.
"""

import dataclasses
import datetime
import importlib.metadata
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from zen_jax.checkpoint.hf import not_finite
from zen_jax.checkpoint.manifest import (
    BASE,
    BaseExists,
    Manifest,
    Part,
    Policy,
    TensorEntry,
    check_name,
    content_digest,
)
from zen_jax.checkpoint.publish import LazyArray, Publisher, Written
from zen_jax.checkpoint.safetensors import DTYPES, SourceError
from zen_jax.checkpoint.source import Source, open_source
from zen_jax.checkpoint.store import Progress, Store
from zen_jax.config import ModelConfig
from zen_jax.delta.compress import ScaleKind, TensorStats, compress_tensor, keep_vector
from zen_jax.layout import EMBED, HEAD, ParamSpec, map_specs
from zen_jax.sharding import TABLE

EmbedPolicy = Literal["bit", "whole", "shared"]
# A variant may differ from its base in these settings; the others decide what its weights mean.
_FREE = ("vocab_size", "tie_word_embeddings", "max_position")
_PACKAGES = ("jax", "ml_dtypes", "numpy", "orbax-checkpoint", "tensorstore", "zen-jax")


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion made.

    Attributes:
      name: "base", or the variant's name.
      version: the variant's version; 0 for a base.
      digest: of its content.
      bytes: on disk.
      full_copy_bytes: of the same weights in bfloat16.
      ratio: of the two.
      seconds: it took.
      stats: number of tensors by policy; for a variant also "zeros", the share of differences that
        are exactly 0, "alpha_over_base", the mean scale over the base's size, and "relative_error",
        ||delta - alpha s|| / ||delta||, as means over the elements kept as bits.
    """

    name: str
    version: int
    digest: str
    bytes: int
    full_copy_bytes: int
    ratio: float
    seconds: float
    stats: Mapping[str, float]

    def __str__(self) -> str:
        title = f"{self.name} version {self.version}" if self.version else self.name
        lines = [
            f"{title}, {self.digest[:12]}, in {self.seconds:.1f} s",
            f"  {self.bytes:,} bytes on disk, {self.ratio:.4f} of a bfloat16 copy's "
            f"{self.full_copy_bytes:,} bytes",
        ]
        policies = [p for p in get_args(Policy) if self.stats.get(p)]
        lines.append("  tensors: " + ", ".join(f"{self.stats[p]:.0f} {p}" for p in policies))
        if "relative_error" in self.stats:
            lines.append(
                f"  differences of 0: {self.stats['zeros']:.1%}; "
                f"scale over base: {self.stats['alpha_over_base']:.2e}; "
                f"error of the difference: {self.stats['relative_error']:.3f}"
            )
        return "\n".join(lines)


def convert_base(
    src: Path, store: Path, *, shards: int = 1, progress: Progress | None = None
) -> Summary:
    """Puts a base model into a new store.

    Args:
      src: a Hugging Face folder with safetensors, or a GGUF file.
      store: the store's folder, new or empty.
      shards: files that each matrix is cut into along the dimension that a mesh shards, where that
        divides; for its variants too.
      progress: called after each tensor with its name, bytes done and bytes in all.

    Raises:
      SourceError: the source is damaged or not understood; every problem is named.
      NotAStore, BaseExists: the folder cannot become a store, or is one already.
      StoreWriteFailed: there was no room, or the disk failed.
    """
    started = time.perf_counter()
    _check_shards(shards)
    source = open_source(Path(src))
    source.check_spare_head()
    root = Path(store)
    target = Store(root, create=True)
    if (target.path / BASE).exists():
        raise BaseExists(f"{root} has a base already; choose another folder")
    return _summary(_publish_base(source, target, shards, progress), started)


def convert_variant(
    src: Path,
    store: Path,
    name: str,
    *,
    scale: ScaleKind = "row",
    levels: int = 1,
    embed: EmbedPolicy = "bit",
    progress: Progress | None = None,
) -> Summary:
    """Adds a fine-tune of the store's base, as its next version of that name.

    Args:
      src: a Hugging Face folder with safetensors, or a GGUF file, of the base's architecture.
      store: the store's folder.
      name: the variant's name.
      scale: one scale a "row" of outputs, or one a "matrix".
      levels: signs and scales a weight; each level codes what the ones before leave.
      embed: embedding and head as a "bit" like other matrices, "whole", or "shared" with the base.
      progress: called after each tensor with its name, bytes done and bytes in all.

    Raises:
      SourceError: the source is damaged, not understood, or no fine-tune of the base; every problem
        is named.
      NameRefused, NotAStore: the name or the store will not do.
      BaseCorrupt: the store's base is damaged.
      StoreWriteFailed: there was no room, or the disk failed.
      ValueError: an option has a value that it cannot have.
    """
    started = time.perf_counter()
    check_name(name)
    if scale not in get_args(ScaleKind) or embed not in get_args(EmbedPolicy):
        raise ValueError(
            f"scale is {scale!r} and embed {embed!r}; expected one of {get_args(ScaleKind)} and "
            f"one of {get_args(EmbedPolicy)}"
        )
    if type(levels) is not int or not 1 <= levels <= 8:
        raise ValueError(f"levels is {levels!r}; expected a whole number from 1 to 8")
    target = Store(Path(store))
    source = open_source(Path(src))
    source.check_spare_head()
    base = target.base()
    _check_pair(source, base)
    options = {"scale": scale, "levels": levels, "embed": embed}
    manifest = _Conversion(source, target, base, options).publish(name, progress)
    return _summary(manifest, started)


# ---- a base


def _publish_base(source: Source, store: Store, shards: int, progress: Progress | None) -> Manifest:
    meter = _Meter(progress, sum(t.size for t in source.tensors.values()))
    axes, problems = _cut_axes(source.config), list[str]()

    def leaf(name: str) -> LazyArray:
        tensor = source.tensors[name]

        def produce() -> np.ndarray:
            values = source.read(name)
            problem = not_finite(name, values)
            if problem:
                problems.append(problem)
            meter.advance(name, tensor.size)
            return values

        dtype, axis = DTYPES[tensor.dtype], axes[name]
        cuts = _cuts(shards, tensor.shape[axis]) if len(tensor.shape) == 2 else 1
        return LazyArray(dtype, tensor.shape, produce, cuts, axis if cuts > 1 else 0)

    with Publisher(store.path) as publisher:
        tree = {name: leaf(name) for name in source.tensors}
        written = publisher.write(tree, source.tokenizer_files())
        if problems:
            raise SourceError(source.name, problems)
        entries = {
            name: TensorEntry("whole", part.shape, {"weight": part})
            for name, part in sorted(written.parts.items())
        }
        settings = source.config.to_hf()
        digest = content_digest(entries, settings)
        manifest = Manifest(
            name=BASE,
            version=0,
            base_digest=digest,
            digest=digest,
            settings=settings,
            shards=shards,
            tensors=entries,
            tokenizer=written.tokenizer,
            files=written.files,
            made=_made(source, {"shards": shards}),
        )
        publisher.publish_base(manifest)
    return manifest


# ---- a variant


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A tensor of a fine-tune and the base's that it is a difference to."""

    name: str
    tuned: str
    base: str


def _pairs(tuned: Source, base: Manifest) -> list[_Pair]:
    """Every tensor that a variant keeps, the head too as soon as either side has one of its own."""
    pairs = [_Pair(name, name, name) for name in sorted(tuned.tensors) if name != HEAD]
    mine, its = HEAD in tuned.tensors, HEAD in base.tensors
    if mine or its:
        pairs.append(_Pair(HEAD, HEAD if mine else EMBED, HEAD if its else EMBED))
    return pairs


def _check_pair(source: Source, base: Manifest) -> None:
    """Makes sure that a source is of the base's architecture.

    Raises:
      SourceError: it is not; each tensor and setting that differs is named with both values.
    """
    problems = []
    for pair in _pairs(source, base):
        if pair.base not in base.tensors:
            problems.append(f"{pair.name} has no counterpart in the base")
            continue
        mine, its = source.tensors[pair.tuned].shape, base.tensors[pair.base].shape
        if mine == its:
            continue
        rows = pair.name in (EMBED, HEAD) and mine[1:] == its[1:]
        if rows and mine[0] > its[0]:
            continue
        hint = ", and a smaller vocabulary is not supported" if rows else ""
        problems.append(f"{pair.name} has shape {mine}; the base's is {its}{hint}")
    lacking = sorted(set(base.tensors) - set(source.tensors) - {HEAD})
    problems += [f"lacks {name}, which the base has" for name in lacking]
    for field in dataclasses.fields(ModelConfig):
        mine, its = getattr(source.config, field.name), getattr(base.config, field.name)
        if mine != its and field.name not in _FREE:
            problems.append(f"config.json gives {field.name} {mine!r}; the base has {its!r}")
    if problems:
        raise SourceError(f"{source.name} is no fine-tune of this base", problems)


class _Conversion:
    """One fine-tune on its way into a store: tensors to parts on disk, then to a checkpoint."""

    def __init__(self, source: Source, store: Store, base: Manifest, options: Mapping[str, Any]):
        self._source, self._store, self._base, self._options = source, store, base, options
        self._axes = _cut_axes(dataclasses.replace(source.config, tie_word_embeddings=False))
        self._entries: dict[str, TensorEntry] = {}
        self._tree: dict[str, dict[str, LazyArray]] = {}
        self._problems: list[str] = []

    def publish(self, name: str, progress: Progress | None) -> Manifest:
        """Converts every tensor and publishes the variant's next version."""
        pairs = _pairs(self._source, self._base)
        sizes = {pair.name: self._source.tensors[pair.tuned].size for pair in pairs}
        meter = _Meter(progress, sum(sizes.values()))
        with Publisher(self._store.path) as publisher:
            spool = _Spool(publisher.scratch)
            for pair in pairs:
                self._convert(pair, spool)
                meter.advance(pair.name, sizes[pair.name])
            if not self._problems and not self._tree:
                self._problems.append("no tensor differs from the base's; there is nothing to keep")
            if self._problems:
                raise SourceError(self._source.name, self._problems)
            tokenizer, borrowed = self._tokenizer()
            written = publisher.write(self._tree, tokenizer)
            made = _made(self._source, self._options) | {"tokenizer_from_base": borrowed}
            return publisher.publish_variant(
                name, lambda version: self._manifest(name, version, written, made)
            )

    def _convert(self, pair: _Pair, spool: "_Spool") -> None:
        tuned = self._source.read(pair.tuned)
        problem = not_finite(pair.tuned, tuned)
        if problem:
            self._problems.append(problem)
        if self._problems:
            return  # Nothing will be published; the remaining tensors are still checked.
        base = self._store.base_tensor(pair.base)
        try:
            kept, stats = self._keep(pair.name, base, tuned)
        except ValueError as error:
            self._problems.append(f"{pair.name}: {error}")
            return
        leaves = {kind: self._leaf(pair.name, kind, spool.put(a)) for kind, a in kept.items()}
        if leaves:
            self._tree[pair.name] = leaves
        policy: Policy = "dense" if {"dense", "whole"} & set(kept) else "shared"
        self._entries[pair.name] = TensorEntry(
            policy="bit" if "bits" in kept else policy,
            shape=tuned.shape,
            levels=kept["bits"].shape[0] if "bits" in kept else 0,
            scale=self._options["scale"] if "bits" in kept else None,
            against=pair.base if pair.base != pair.name else None,
            stats={} if stats is None else dataclasses.asdict(stats),
        )

    def _keep(
        self, name: str, base: np.ndarray, tuned: np.ndarray
    ) -> tuple[dict[str, np.ndarray], TensorStats | None]:
        """The parts that a tensor is kept as, and figures of those that are packed."""
        if tuned.ndim == 1:
            dense = keep_vector(base, tuned).dense
            return {} if dense is None else {"dense": dense}, None
        embed = self._options["embed"] if name in (EMBED, HEAD) else "bit"
        overlap, rows = tuned[: base.shape[0]], tuned[base.shape[0] :]
        kept = {"rows": rows} if rows.size else {}
        if embed == "shared" or np.array_equal(base, overlap):
            return kept, None
        if embed == "whole":
            return {"whole": tuned}, None
        options = self._options
        delta, stats = compress_tensor(
            base, overlap, scale=options["scale"], levels=options["levels"]
        )
        return {"bits": np.asarray(delta.bits), "scale": np.asarray(delta.scale), **kept}, stats

    def _leaf(self, name: str, kind: str, array: LazyArray) -> LazyArray:
        """Cuts a part for the base's number of shards where it divides."""
        axis = self._axes.get(name, 0)
        if kind in ("bits", "scale"):
            axis += 1  # levels come first
        if kind == "rows" or len(array.shape) <= axis or len(array.shape) == 1:
            return array
        if kind == "bits" and axis == 2 and self._source.tensors[name].shape[1] % 8:
            return array  # A shard of inputs would begin inside a byte.
        cuts = _cuts(self._base.shards, array.shape[axis])
        return dataclasses.replace(array, shards=cuts, axis=axis if cuts > 1 else 0)

    def _tokenizer(self) -> tuple[dict[str, bytes], list[str]]:
        """The variant's tokenizer files, and which of them are the base's for want of its own."""
        files = self._source.tokenizer_files()
        if "tokenizer.json" in files:
            return files, []
        lent = {
            name: data
            for name, data in self._store.tokenizer_files(None).items()
            if name not in files
        }
        return files | lent, sorted(lent)

    def _manifest(
        self, name: str, version: int, written: Written, made: Mapping[str, Any]
    ) -> Manifest:
        entries = {
            tensor: dataclasses.replace(entry, parts=self._parts(tensor, written))
            for tensor, entry in self._entries.items()
        }
        settings = self._source.config.to_hf()
        base = self._base.digest
        return Manifest(
            name=name,
            version=version,
            base_digest=base,
            digest=content_digest(entries, settings, base, written.tokenizer),
            settings=settings,
            shards=self._base.shards,
            tensors=entries,
            tokenizer=written.tokenizer,
            files=written.files,
            made=made,
        )

    def _parts(self, tensor: str, written: Written) -> dict[str, Part]:
        return {kind: written.parts[f"{tensor}.{kind}"] for kind in self._tree.get(tensor, {})}


class _Spool:
    """Parts that wait on disk until orbax writes them: their number is known only at the end."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0

    def put(self, array: np.ndarray) -> LazyArray:
        """Writes an array out; it is read back, and its file removed, when it is produced."""
        path = self._folder / str(self._count)
        self._count += 1
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(path)
        shape, dtype = array.shape, array.dtype

        def produce() -> np.ndarray:
            values = np.fromfile(path, np.uint8).view(dtype).reshape(shape)
            path.unlink()
            return values

        return LazyArray(dtype, shape, produce)


class _Meter:
    """Tells a progress callback how many bytes are done."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def advance(self, name: str, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(name, self._done, self._total)


def _check_shards(shards: int) -> None:
    if type(shards) is not int or not 1 <= shards <= 1024:
        raise ValueError(f"shards is {shards!r}; expected a whole number from 1 to 1024")


def _cut_axes(config: ModelConfig) -> dict[str, int]:
    """For each tensor [O, I], the dimension that a mesh shards: inputs of o and down, else rows."""
    axes: dict[str, int] = {}

    def add(spec: ParamSpec) -> None:
        last = spec.axes[-1]
        by_inputs = spec.kind != "vector" and last is not None and TABLE[last] is not None
        axes.update(dict.fromkeys(spec.sources, int(by_inputs)))

    map_specs(add, config)
    return axes


def _cuts(shards: int, size: int) -> int:
    """How many files a dimension is cut into: all that were asked for, or one."""
    return shards if size % shards == 0 else 1


def _made(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint came about; names no path beyond the source folder's own name."""
    return {
        "source": source.name,
        "coding": source.coding,
        "options": dict(options),
        "packages": dict(_versions()),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _summary(manifest: Manifest, started: float) -> Summary:
    stats: dict[str, float] = {}
    for policy in get_args(Policy):
        stats[policy] = sum(t.policy == policy for t in manifest.tensors.values())
    packed = [t for t in manifest.tensors.values() if t.stats]
    if packed:
        sizes = [math.prod(t.shape) for t in packed]
        names = ("zeros", "relative_error", "alpha_mean", "base_rms")
        means = {n: float(np.average([t.stats[n] for t in packed], weights=sizes)) for n in names}
        stats |= {name: means[name] for name in ("zeros", "relative_error")}
        base = means["base_rms"]
        stats["alpha_over_base"] = means["alpha_mean"] / base if base else 0.0
    return Summary(
        name=manifest.name,
        version=manifest.version,
        digest=manifest.digest,
        bytes=manifest.bytes_on_disk,
        full_copy_bytes=manifest.full_copy_bytes,
        ratio=manifest.ratio,
        seconds=time.perf_counter() - started,
        stats=stats,
    )
