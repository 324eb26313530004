"""One fine-tune on its way into a store: tensors to parts on disk, then to a checkpoint.

What is done stays on disk until the variant is published. A conversion that was interrupted goes on
from there when it is started again with the same source, base and options.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.checkpoint.chunks import FileDamaged, dtype_of, fast_checksum
from zen_jax.checkpoint.hf import not_finite
from zen_jax.checkpoint.journal import Journal
from zen_jax.checkpoint.manifest import Manifest, Policy, TensorEntry, content_digest
from zen_jax.checkpoint.plan import Meter, cut_axes, cuts, made, work_key
from zen_jax.checkpoint.publish import LazyArray, Publisher, Written
from zen_jax.checkpoint.safetensors import SourceError
from zen_jax.checkpoint.source import Source
from zen_jax.checkpoint.store import Progress, Store
from zen_jax.checkpoint.tokens import check_tokenizer
from zen_jax.delta.compress import compress_tensor, keep_vector
from zen_jax.delta.kinship import Kinship, compare, together
from zen_jax.layout import EMBED, HEAD
from zen_jax.pairs import Pair, check_kinship, look_at, pair_up, tells


@dataclasses.dataclass(frozen=True)
class Converted:
    """One tensor that is done; its parts lie on disk.

    Attributes:
      entry: what the manifest will say of it, but for its parts.
      parts: its arrays, by kind.
      kinship: how it stands to the base's; None for vectors, embedding and head.
    """

    entry: TensorEntry
    parts: Mapping[str, LazyArray]
    kinship: Kinship | None


class Conversion:
    """A fine-tune, its base's store, and how it is to be kept."""

    def __init__(self, source: Source, store: Store, options: Mapping[str, Any], force: bool):
        """Takes what to convert.

        Args:
          source: of the base's architecture.
          store: with the base.
          options: "scale", "levels" and "embed".
          force: convert weights that have nothing to do with the base's.
        """
        self._source, self._store, self._options, self._force = source, store, options, force
        self._base = store.base()
        self._axes = cut_axes(dataclasses.replace(source.config, tie_word_embeddings=False))
        self._done: dict[str, Converted] = {}
        self._problems: list[str] = []

    def publish(self, name: str, progress: Progress | None) -> Manifest:
        """Converts every tensor and publishes the variant's next version.

        Raises:
          SourceError: the source has values that are not finite, or is the base itself; everything
            is named. Or its tokenizer cannot be used.
          Unrelated: the weights have nothing to do with the base's; without `force`.
        """
        pairs = pair_up(self._source, self._base)
        tokenizer, borrowed = self._tokenizer()
        config = self._source.config
        warnings = check_tokenizer(self._source.name, tokenizer, config, borrowed)
        if not self._force:
            check_kinship(self._source.name, look_at(self._source, self._store, pairs))
        sizes = {pair.name: self._source.tensors[pair.tuned].size for pair in pairs}
        meter = Meter(progress, sum(sizes.values()))
        key = work_key(self._source, self._base.digest, self._options)
        with Publisher(self._store.path, key) as publisher:
            spool = Spool(publisher.scratch)
            for pair in pairs:
                self._convert(pair, spool)
                meter.advance(pair.name, sizes[pair.name])
            if not self._problems and not any(done.parts for done in self._done.values()):
                self._problems.append("no tensor differs from the base's; there is nothing to keep")
            if self._problems:
                raise SourceError(self._source.name, self._problems)
            record = made(self._source, self._options) | self._kinship()
            record["tokenizer_from_base"] = borrowed
            record["warnings"] += warnings
            written = publisher.write(self._tree(), tokenizer)
            return publisher.publish_variant(
                name, lambda version: self._manifest(name, version, written, record)
            )

    def _convert(self, pair: Pair, spool: "Spool") -> None:
        earlier = spool.find(pair.name)
        if earlier is not None:
            self._done[pair.name] = earlier
            return
        tuned = self._source.read(pair.tuned)
        problem = not_finite(pair.tuned, tuned)
        if problem:
            self._problems.append(problem)
        if self._problems:
            return  # Nothing will be published; the remaining tensors are still checked.
        base = self._store.base_tensor(pair.base)
        try:
            kinship = compare(base, tuned[: base.shape[0]]) if tuned.ndim == 2 else None
            kept, entry = self._keep(pair, base, tuned, kinship)
        except ValueError as error:
            self._problems.append(f"{pair.name}: {error}")
            return
        self._done[pair.name] = spool.put(pair.name, entry, kept, kinship if tells(pair) else None)

    def _keep(
        self, pair: Pair, base: np.ndarray, tuned: np.ndarray, kinship: Kinship | None
    ) -> tuple[dict[str, np.ndarray], TensorEntry]:
        """The parts that a tensor is kept as, and what the manifest will say of it."""
        against = pair.base if pair.base != pair.name else None

        def entry(policy: Policy, **more: Any) -> TensorEntry:
            return TensorEntry(policy, tuned.shape, against=against, **more)

        if tuned.ndim == 1:
            dense = keep_vector(base, tuned).dense
            return ({}, entry("shared")) if dense is None else ({"dense": dense}, entry("dense"))
        embed = self._options["embed"] if pair.name in (EMBED, HEAD) else "bit"
        overlap, rows = tuned[: base.shape[0]], tuned[base.shape[0] :]
        kept = {"rows": rows} if rows.size else {}
        if embed == "shared" or np.array_equal(base, overlap):
            return kept, entry("shared")
        # A tied head over an untied one, for instance: what is no difference has no 1-bit form.
        stranger = pair.tuned != pair.base and kinship is not None and kinship.unrelated
        if embed == "whole" or stranger:
            return {"whole": tuned}, entry("dense")
        scale, levels = self._options["scale"], self._options["levels"]
        delta, stats = compress_tensor(base, overlap, scale=scale, levels=levels)
        kept |= {"bits": np.asarray(delta.bits), "scale": np.asarray(delta.scale)}
        return kept, entry("bit", levels=levels, scale=scale, stats=dataclasses.asdict(stats))

    def _kinship(self) -> dict[str, Any]:
        """Figures of all matrices for the manifest, with a warning if they had to be forced.

        Raises:
          Unrelated: they ought to be forced and are not.
        """
        parts = [done.kinship for done in self._done.values() if done.kinship is not None]
        figures = together(parts)
        if not self._force:
            check_kinship(self._source.name, figures)
        warning = f"forced, though nothing of these weights comes from the base's: {figures}"
        return {
            "kinship": figures.report(),
            "warnings": [warning] if figures.unrelated else [],
        }

    def _tree(self) -> dict[str, dict[str, LazyArray]]:
        """What orbax is given."""
        return {
            name: {kind: self._leaf(name, kind, array) for kind, array in done.parts.items()}
            for name, done in self._done.items()
            if done.parts
        }

    def _leaf(self, name: str, kind: str, array: LazyArray) -> LazyArray:
        """Cuts a part for the base's number of shards where it divides."""
        axis = self._axes.get(name, 0)
        if kind in ("bits", "scale"):
            axis += 1  # levels come first
        if kind == "rows" or len(array.shape) <= axis or len(array.shape) == 1:
            return array
        if kind == "bits" and axis == 2 and self._source.tensors[name].shape[1] % 8:
            return array  # A shard of inputs would begin inside a byte.
        files = cuts(self._base.shards, array.shape[axis])
        return dataclasses.replace(array, shards=files, axis=axis if files > 1 else 0)

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
        self, name: str, version: int, written: Written, record: Mapping[str, Any]
    ) -> Manifest:
        entries = {
            tensor: dataclasses.replace(
                done.entry, parts={kind: written.parts[f"{tensor}.{kind}"] for kind in done.parts}
            )
            for tensor, done in self._done.items()
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
            made=record,
        )


class Spool:
    """Parts that wait on disk until orbax writes them: their number is known only at the end.

    A journal beside them says which tensors are done, so that they are found again.
    """

    def __init__(self, folder: Path):
        """Opens a folder, empty or of an interrupted conversion with the same key."""
        self._folder = folder
        self._journal = Journal(folder / "done.jsonl")
        self._records = {str(record.get("tensor")): record for record in self._journal.read()}
        # A torn line would hide those that come after it.
        self._journal.start(list(self._records.values()))

    def find(self, tensor: str) -> Converted | None:
        """A tensor that was done before, if all of its parts are there and whole."""
        record = self._records.get(tensor)
        if record is None:
            return None
        try:
            for part in record["parts"].values():
                if fast_checksum(self._folder / part["file"]) != part["xxh3"]:
                    return None
            return self._converted(record)
        except (FileDamaged, KeyError, TypeError):  # damaged, or of another version of this code
            return None

    def put(
        self,
        tensor: str,
        entry: TensorEntry,
        arrays: Mapping[str, np.ndarray],
        kinship: Kinship | None,
    ) -> Converted:
        """Writes a tensor's arrays out and notes that it is done."""
        parts = {}
        for kind, array in arrays.items():
            file = self._folder / f"{tensor}.{kind}"
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
            parts[kind] = {
                "file": file.name,
                "dtype": array.dtype.name,
                "shape": array.shape,
                "xxh3": fast_checksum(file),
            }
        record = {
            "tensor": tensor,
            "entry": dataclasses.asdict(entry),
            "parts": parts,
            "kinship": None if kinship is None else dataclasses.asdict(kinship),
        }
        self._journal.append(record)
        return self._converted(record)

    def _converted(self, record: Mapping[str, Any]) -> Converted:
        entry, kinship = record["entry"], record["kinship"]
        return Converted(
            TensorEntry(**{**entry, "shape": tuple(entry["shape"])}),
            {kind: self._array(part) for kind, part in record["parts"].items()},
            None if kinship is None else Kinship(**kinship),
        )

    def _array(self, part: Mapping[str, Any]) -> LazyArray:
        path, dtype, shape = self._folder / part["file"], dtype_of(part["dtype"]), part["shape"]

        def produce() -> np.ndarray:
            return np.fromfile(path, np.uint8).view(dtype).reshape(shape)

        return LazyArray(dtype, tuple(shape), produce)
