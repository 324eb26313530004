"""From checkpoints to a store: a base as it is, a fine-tune as what it adds to the base.

One tensor is held at a time. Names, shapes and dtypes are compared before anything is read;
values are checked as they are read; all problems of a source are reported together, and nothing is
published unless there is none. What is interrupted is gone on with by the same call.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from zen_jax.checkpoint.hf import not_finite
from zen_jax.checkpoint.manifest import (
    BASE,
    BaseExists,
    Manifest,
    Policy,
    TensorEntry,
    check_name,
    content_digest,
)
from zen_jax.checkpoint.plan import Meter, check_shards, cut_axes, cuts, made, work_key
from zen_jax.checkpoint.publish import LazyArray, Publisher
from zen_jax.checkpoint.safetensors import DTYPES, SourceError
from zen_jax.checkpoint.source import Source, open_source
from zen_jax.checkpoint.store import Progress, Store
from zen_jax.checkpoint.tokens import check_tokenizer
from zen_jax.conversion import Conversion
from zen_jax.delta.compress import ScaleKind
from zen_jax.delta.levels import MAX_LEVELS
from zen_jax.pairs import check_architecture

EmbedPolicy = Literal["bit", "whole", "shared"]


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
        ||delta - alpha s|| / ||delta||, as means over the elements kept as bits; and, over the
        layers' matrices, "distance", "signs_kept", "sign_entropy" and "energy_left" of
        `zen_jax.delta.kinship`.
      coding: what the source's weights are coded in.
      warnings: what the manifest warns of, and that no matrix was cut although it was asked for.
    """

    name: str
    version: int
    digest: str
    bytes: int
    full_copy_bytes: int
    ratio: float
    seconds: float
    stats: Mapping[str, float]
    coding: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        title = f"{self.name} version {self.version}" if self.version else self.name
        lines = [
            f"{title}, {self.digest[:12]}, from {self.coding}, in {self.seconds:.1f} s",
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
        if "distance" in self.stats:
            lines.append(
                f"  difference over base: {self.stats['distance']:.3f}; "
                f"signs kept: {self.stats['signs_kept']:.1%}; "
                f"entropy of signs: {self.stats['sign_entropy']:.3f}; "
                f"energy left: {self.stats['energy_left']:.3f}"
            )
        lines += [f"  warning: {warning}" for warning in self.warnings]
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
    check_shards(shards)
    source = open_source(Path(src))
    source.check_spare_head()
    files = source.tokenizer_files()
    warnings = check_tokenizer(source.name, files, source.config)
    root = Path(store)
    target = Store(root, create=True)
    if (target.path / BASE).exists():
        raise BaseExists(f"{root} has a base already; choose another folder")
    manifest = _publish_base(source, target, shards, files, warnings, progress)
    return summarise(manifest, started)


def convert_variant(
    src: Path,
    store: Path,
    name: str,
    *,
    scale: ScaleKind = "row",
    levels: int = 1,
    embed: EmbedPolicy = "bit",
    force: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Adds a fine-tune of the store's base, as its next version of that name.

    Args:
      src: a Hugging Face folder with safetensors, or a GGUF file, of the base's architecture.
      store: the store's folder.
      name: the variant's name.
      scale: one scale a "row" of outputs, or one a "matrix".
      levels: signs and scales a weight, 1 to 4, fitted together.
      embed: embedding and head as a "bit" like other matrices, "whole", or "shared" with the base.
      force: convert a checkpoint whose weights have nothing to do with the base's; the manifest
        keeps a warning.
      progress: called after each tensor with its name, bytes done and bytes in all.

    Raises:
      SourceError: the source is damaged, not understood, or no fine-tune of the base; every problem
        is named. `zen_jax.pairs.Unrelated` if only the weights say so.
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
    if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"levels is {levels!r}; expected a whole number from 1 to {MAX_LEVELS}")
    target = Store(Path(store))
    source = open_source(Path(src))
    source.check_spare_head()
    check_architecture(source, target.base())
    options = {"scale": scale, "levels": levels, "embed": embed}
    manifest = Conversion(source, target, options, force).publish(name, progress)
    return summarise(manifest, started)


# ---- a base


def _publish_base(
    source: Source,
    store: Store,
    shards: int,
    tokenizer: Mapping[str, bytes],
    warnings: list[str],
    progress: Progress | None,
) -> Manifest:
    meter = Meter(progress, sum(t.size for t in source.tensors.values()))
    axes, problems = cut_axes(source.config), list[str]()
    options = {"shards": shards}
    publisher = Publisher(store.path, work_key(source, "", options))

    def leaf(name: str) -> LazyArray:
        tensor = source.tensors[name]

        def advance() -> None:
            meter.advance(name, tensor.size)

        def produce() -> np.ndarray:
            values = source.read(name)
            problem = not_finite(name, values)
            if problem:
                problems.append(problem)
                publisher.give_up()
            advance()
            return values

        dtype, axis = DTYPES[tensor.dtype], axes[name]
        files = cuts(shards, tensor.shape[axis]) if len(tensor.shape) == 2 else 1
        return LazyArray(dtype, tensor.shape, produce, files, axis if files > 1 else 0, advance)

    with publisher:
        tree = {name: leaf(name) for name in source.tensors}
        written = publisher.write(tree, tokenizer)
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
            made=made(source, options) | {"warnings": warnings},
        )
        publisher.publish_base(manifest)
    return manifest


def summarise(manifest: Manifest, started: float) -> Summary:
    """What a conversion made, that began at `started` by `time.perf_counter`."""
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
    kinship = dict(manifest.made.get("kinship", {}))
    for name in ("distance", "signs_kept", "sign_entropy", "energy_left"):
        if name in kinship:
            stats[name] = kinship[name]
    return Summary(
        name=manifest.name,
        version=manifest.version,
        digest=manifest.digest,
        bytes=manifest.bytes_on_disk,
        full_copy_bytes=manifest.full_copy_bytes,
        ratio=manifest.ratio,
        seconds=time.perf_counter() - started,
        stats=stats,
        coding=manifest.made["coding"],
        warnings=(*manifest.made.get("warnings", ()), *_uncut(manifest)),
    )


def _uncut(manifest: Manifest) -> list[str]:
    """A line if a base was to be cut and nothing of it could be; its variants follow it."""
    parts = [part for tensor in manifest.tensors.values() for part in tensor.parts.values()]
    if manifest.name != BASE or manifest.shards == 1 or any(part.shards > 1 for part in parts):
        return []
    return [f"no matrix divides by {manifest.shards} shards, so each is one file"]
