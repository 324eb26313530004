"""A store: one base and the variants of it, read with every byte checked.

STORE/base and STORE/variants/NAME/VERSION are orbax checkpoints with a manifest each and a folder
`tokenizer`. Orbax can restore them; reading here goes straight to the chunk files, since orbax
restores damaged data without a word. Nothing is read through a symbolic link below the store.
"""

import dataclasses
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.checkpoint.chunks import (
    FileDamaged,
    describe_file,
    empty_pieces,
    join,
    open_regular,
    read_checked,
)
from zen_jax.checkpoint.manifest import (
    BASE,
    FACTORS,
    MANIFEST,
    BaseCorrupt,
    Corrupt,
    Manifest,
    ManifestError,
    NotAStore,
    NotServedYet,
    Part,
    Variant,
    VariantCorrupt,
    VariantNotFound,
    WrongBase,
    check_name,
    inconsistent,
)
from zen_jax.checkpoint.publish import PUBLISHING, TOKENIZER, VARIANTS, Publisher
from zen_jax.checkpoint.raw import RawVariant, Span, along, folded, listing_problems, read_all
from zen_jax.delta.format import WeightDelta

_MAX_MANIFEST_BYTES = 64 * 2**20
_LOADED = {"bits", "scale", "dense", "whole", "rows", *FACTORS}

# (what is worked on, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that `Store.verify` found wrong.

    Attributes:
      where: "base", a variant's "name/version", or "store".
      file: relative to its folder.
      problem: completes "FILE ...".
    """

    where: str
    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.file} {self.problem}"


class Store:
    """A store on disk; holds no open files and may be shared by threads.

    Attributes:
      path: its folder.
    """

    def __init__(self, path: Path, create: bool = False):
        """Opens a store.

        Args:
          path: its folder.
          create: make it if there is none; a folder that holds other things is never taken.

        Raises:
          NotAStore: it is no store, or cannot become one.
        """
        self.path = Path(path)
        self._base: tuple[tuple[int, int, int], Manifest] | None = None
        if create:
            self._create()
        elif not any(_is_folder(self.path / name) for name in (BASE, VARIANTS)):
            raise NotAStore(f"{path} is not a store; make one with `zen convert base SRC STORE`")

    def _create(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise NotAStore(f"{self.path} is a file; a store is a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in self.path.iterdir())
        others = [name for name in others if name not in (BASE, VARIANTS, PUBLISHING)]
        if others:
            raise NotAStore(
                f"{self.path} holds {others[0]!r}, which is no part of a store; "
                "choose an empty or a new folder"
            )

    # ---- what there is

    def base(self) -> Manifest:
        """The base's manifest.

        Raises:
          BaseCorrupt: it is missing or damaged.
        """
        folder = self._folder(BASE)
        try:
            state = os.stat(folder / MANIFEST, follow_symlinks=False)
        except OSError as error:
            raise BaseCorrupt(BASE, MANIFEST, f"cannot be read ({error.strerror})") from error
        key = (state.st_ino, state.st_mtime_ns, state.st_size)
        if self._base is None or self._base[0] != key:
            self._base = key, _read_manifest(folder, BASE, 0, BaseCorrupt)
        return self._base[1]

    def names(self) -> list[str]:
        """Names of the variants that have a version, sorted."""
        folder = self.path / VARIANTS
        if not _is_folder(folder):
            return []
        return sorted(name for name in os.listdir(folder) if _allowed(name) and self.versions(name))

    def versions(self, name: str) -> list[int]:
        """The versions of a variant, oldest first; none for one that is not in the store.

        Raises:
          NameRefused: no variant can have this name.
        """
        folder = self.path / VARIANTS / check_name(name)
        if not _is_folder(folder.parent) or not _is_folder(folder):
            return []
        found = os.listdir(folder)
        return sorted(int(v) for v in found if _is_version(v) and _is_folder(folder / v))

    def variant(self, name: str, version: int | None = None) -> Variant:
        """A variant, the newest version by default.

        Raises:
          NameRefused: no variant can have this name.
          VariantNotFound: the store does not have it.
          VariantCorrupt: its manifest is damaged.
        """
        versions = self.versions(name)
        if not versions:
            raise VariantNotFound(f"the store has no variant {name!r}")
        if version is None:
            version = versions[-1]
        if version not in versions:
            listed = ", ".join(map(str, versions))
            raise VariantNotFound(f"{name!r} has no version {version}; it has {listed}")
        folder = self._folder(VARIANTS, name, str(version))
        manifest = _read_manifest(folder, name, version, VariantCorrupt)
        return Variant(name, version, manifest.digest, folder, manifest.load_bytes)

    def manifest(self, variant: Variant) -> Manifest:
        """A variant's manifest.

        Raises:
          VariantCorrupt: it is missing, damaged, or not the one that `variant` was found by.
        """
        folder = self._folder(*_steps(variant))
        manifest = _read_manifest(folder, variant.name, variant.version, VariantCorrupt)
        if manifest.digest != variant.digest:
            raise VariantCorrupt(
                str(variant), MANIFEST, "has another digest than when it was found"
            )
        return manifest

    def tokenizer_folder(self, variant: Variant | None) -> Path:
        """The folder of a variant's own tokenizer files, or of the base's if it has none."""
        if variant is not None and self.manifest(variant).tokenizer:
            return self._folder(*_steps(variant), TOKENIZER)
        return self._folder(BASE, TOKENIZER)

    # ---- reading

    def base_tensor(self, name: str) -> np.ndarray:
        """One tensor of the base as it is stored, checked.

        Raises:
          BaseCorrupt: its file is damaged.
          KeyError: the base has no such tensor.
        """
        manifest = self.base()
        part = manifest.tensors[name].parts["weight"]
        return _read_part(self._folder(BASE), manifest, part, BaseCorrupt)

    def base_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """The base's tensors, one at a time: Hugging Face name, array in its stored dtype.

        Raises:
          BaseCorrupt: a file is damaged.
        """
        for name in self.base().tensors:
            yield name, self.base_tensor(name)

    def read_variant(self, variant: Variant) -> dict[str, WeightDelta]:
        """What a variant adds to each of the base's tensors: `read_files`, then `check`.

        Raises:
          VariantCorrupt, WrongBase, NotServedYet: as they do.
        """
        return self.check(self.read_files(variant))

    def read_files(
        self,
        variant: Variant,
        hear: Callable[[RawVariant, str], None] = lambda raw, file: None,
        files: Collection[str] | None = None,
        rooms: Iterable[Sequence[Sequence[str]]] = (),
        pause: Callable[[], None] = lambda: None,
    ) -> RawVariant:
        """The files of a variant, each read once into host memory and hashed, several at a time.

        Args:
          variant: found in this store.
          hear: called after each file, by the thread that has read it, while others read on.
          files: those that are read; None: all. That the others are there is seen all the same.
          rooms: see `RawVariant`.
          pause: called after each megabyte of a larger file.

        Raises:
          VariantCorrupt: a file is missing, too much or of another size; it is named.
          WrongBase: it was made against another base.
          NotServedYet: a later version of this code made it, with parts that are not known here.
        """
        manifest = self.manifest(variant)
        self.check_base(manifest)
        kinds = {kind for tensor in manifest.tensors.values() for kind in tensor.parts}
        if not kinds <= _LOADED:
            raise NotServedYet(
                f"{variant} has parts of a kind that this version does not know: "
                f"{', '.join(sorted(kinds - _LOADED))}; serve it with the version that made it"
            )
        raw = RawVariant(str(variant), manifest, files, rooms)
        return read_all(self._folder(*_steps(variant)), raw, hear, pause)

    def check_base(self, manifest: Manifest) -> None:
        """Raises WrongBase unless a variant was made against this store's base."""
        mine, its = self.base().digest, manifest.base_digest
        if its != mine:
            raise WrongBase(
                f"{manifest.name}/{manifest.version} was made against another base ({its[:12]}) "
                f"than this store's ({mine[:12]}); convert it again"
            )

    def variant_parts(self, variant: Variant, name: str) -> dict[str, np.ndarray]:
        """One tensor's arrays by kind; only its files are read, and checked.

        Raises:
          VariantCorrupt: a file is damaged.
        """
        manifest, folder = self.manifest(variant), self._folder(*_steps(variant))
        parts = manifest.tensors[name].parts
        return {k: _read_part(folder, manifest, p, VariantCorrupt) for k, p in parts.items()}

    def check(self, raw: RawVariant) -> dict[str, WeightDelta]:
        """What a variant adds to each of the base's tensors, by Hugging Face name.

        Nothing is read again: what lies in memory is compared with the manifest. The head is there
        if the base or the variant has one of its own; where only the variant has, it is a
        difference to the embedding. Rows that only the variant has are the tail, in its own dtype.
        Where the variant keeps a matrix whole, the base's is read too, and the difference given in
        float32.

        Raises:
          VariantCorrupt: a file does not match its checksum; it is named.
        """
        raw.check()
        return {name: self.delta(raw, name) for name in raw.manifest.tensors}

    def delta(self, raw: RawVariant, name: str, span: Span | None = None) -> WeightDelta:
        """One tensor's parts as they are held in memory, or a span of them; what it needs of files
        is read, and checked. A tail is given whole."""
        arrays = raw.arrays(name, span)
        dense, tail, whole = arrays.get("dense"), arrays.get("rows"), arrays.get("whole")
        if whole is not None:
            against = raw.manifest.tensors[name].against or name

            def difference() -> np.ndarray:
                start = self.base_tensor(against).astype(np.float32)
                return whole[: start.shape[0]].astype(np.float32) - start

            dense = raw.once(f"{name} less the base's", difference)
            tail = whole[dense.shape[0] :] if whole.shape[0] > dense.shape[0] else None
            if span is not None:
                dense = along(dense, span.dimension, span.start, span.stop)
        low_rank = folded(arrays) if "lora_a" in arrays else None
        return WeightDelta(arrays.get("bits"), arrays.get("scale"), low_rank, dense, tail)

    def tokenizer_files(self, variant: Variant | None) -> dict[str, bytes]:
        """A variant's tokenizer files, or the base's: name -> contents, checked.

        Raises:
          Corrupt: a file is damaged.
        """
        manifest = self.base() if variant is None else self.manifest(variant)
        where = BASE if variant is None else str(variant)
        folder = self._folder(*_steps(variant))
        found: dict[str, bytes] = {}
        for name in manifest.tokenizer:
            file = f"{TOKENIZER}/{name}"
            try:
                found[name] = bytes(read_checked(folder / file, manifest.files[file]))
            except FileDamaged as error:
                kind = BaseCorrupt if variant is None else VariantCorrupt
                raise kind(where, file, str(error)) from error
        return found

    # ---- looking after it

    def record_quality(self, variant: Variant | None, figures: Mapping[str, Any]) -> Manifest:
        """Keeps measured figures in a manifest; figures of other names stay.

        Args:
          variant: or None for the base.
          figures: JSON values by name.

        Returns:
          The new manifest; its digest is the old one.
        """

        def describe() -> Manifest:
            old = self.base() if variant is None else self.manifest(variant)
            return dataclasses.replace(old, quality={**old.quality, **figures})

        with Publisher(self.path) as publisher:
            return publisher.replace_manifest(self._folder(*_steps(variant)), describe)

    def verify(self, progress: Progress | None = None) -> list[Finding]:
        """Checks the SHA-256 of every file of the base and of every variant.

        Args:
          progress: called after each file with its folder, bytes done and bytes in all.

        Returns:
          What is wrong; empty if nothing is.
        """
        findings = [Finding("store", name, "is no part of a store") for name in self._strangers()]
        manifests: list[tuple[str, Path, Manifest]] = []
        for where, path in self._checkpoints():
            try:
                folder = self._folder(*path)
                name, version = (path[1], int(path[2])) if len(path) == 3 else (BASE, 0)
                kind = VariantCorrupt if version else BaseCorrupt
                manifests.append((where, folder, _read_manifest(folder, name, version, kind)))
            except Corrupt as error:
                findings.append(Finding(where, error.file, error.problem))
        bases = [m.digest for _, _, m in manifests if m.is_base]
        total = sum(f.size for _, _, m in manifests for f in m.files.values())
        done = 0
        for where, folder, manifest in manifests:
            findings += [Finding(where, MANIFEST, p) for p in inconsistent(manifest, bases)]
            findings += [Finding(where, *pair) for pair in listing_problems(folder, manifest)]
            for file, entry in manifest.files.items():
                try:
                    if describe_file(folder / file) != entry:
                        findings.append(Finding(where, file, "does not match its SHA-256"))
                except FileDamaged as error:
                    findings.append(Finding(where, file, str(error)))
                done += entry.size
                if progress is not None:
                    progress(where, done, total)
        return list(dict.fromkeys(findings))

    def _checkpoints(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield BASE, (BASE,)
        for name in self.names():
            for version in self.versions(name):
                yield f"{name}/{version}", (VARIANTS, name, str(version))

    def _strangers(self) -> list[str]:
        known = (BASE, VARIANTS, PUBLISHING)
        found = [name for name in os.listdir(self.path) if name not in known]
        folder = self.path / VARIANTS
        for name in os.listdir(folder) if _is_folder(folder) else []:
            if not _allowed(name) or not _is_folder(folder / name):
                found.append(f"{VARIANTS}/{name}")
                continue
            for version in os.listdir(folder / name):
                if not _is_version(version) or not _is_folder(folder / name / version):
                    found.append(f"{VARIANTS}/{name}/{version}")
        return sorted(found)

    def _folder(self, *names: str) -> Path:
        """A folder of the store; every step to it is a folder, not a link.

        Raises:
          Corrupt: it is missing or something else.
        """
        folder = self.path
        for name in names:
            folder = folder / name
            if not _is_folder(folder):
                kind = BaseCorrupt if names[0] == BASE else VariantCorrupt
                where = "/".join(names[1:3]) if names[0] == VARIANTS else names[0]
                raise kind(where, name, "is missing, or is no folder of the store")
        return folder


def _steps(variant: Variant | None) -> tuple[str, ...]:
    """From the store's folder to a checkpoint's."""
    if variant is None:
        return (BASE,)
    return VARIANTS, check_name(variant.name), str(int(variant.version))


def _is_folder(path: Path) -> bool:
    """Whether there is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and text[0] != "0" and len(text) < 10


def _allowed(name: str) -> bool:
    try:
        return bool(check_name(name))
    except ValueError:
        return False


# The manifests read last, by folder, with the bytes that they were parsed from.
_PARSED: dict[Path, tuple[bytes, Manifest]] = {}
_PARSED_KEPT = 64


def _parsed(folder: Path, data: bytes) -> Manifest:
    """A manifest from its bytes; the same bytes of the same folder are not parsed again.

    Raises:
      ManifestError: they are damaged.
    """
    before = _PARSED.get(folder)
    if before is not None and before[0] == data:
        return before[1]
    manifest = Manifest.parse(data)
    while len(_PARSED) >= _PARSED_KEPT:
        _PARSED.pop(next(iter(_PARSED)), None)
    _PARSED[folder] = data, manifest
    return manifest


def _read_manifest(folder: Path, name: str, version: int, kind: type[Corrupt]) -> Manifest:
    where = f"{name}/{version}" if version else name
    try:
        handle = open_regular(folder / MANIFEST)
        with open(handle, "rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
        if len(data) > _MAX_MANIFEST_BYTES:
            raise ManifestError(f"is larger than {_MAX_MANIFEST_BYTES} bytes")
        manifest = _parsed(folder, data)
    except (FileDamaged, ManifestError) as error:
        raise kind(where, MANIFEST, str(error)) from error
    if (manifest.name, manifest.version) != (name, version):
        raise kind(where, MANIFEST, f"is that of {manifest.name}/{manifest.version}")
    return manifest


def _read_part(folder: Path, manifest: Manifest, part: Part, kind: type[Corrupt]) -> np.ndarray:
    pieces = empty_pieces(part)
    for file, piece in zip(part.files(), pieces, strict=True):
        try:
            read_checked(folder / file, manifest.files[file], piece)
        except FileDamaged as error:
            where = BASE if manifest.is_base else f"{manifest.name}/{manifest.version}"
            raise kind(where, file, str(error)) from error
    return join(pieces, part)
