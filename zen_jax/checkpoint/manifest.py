"""What the store knows about a base or a variant: `manifest.json`, and the names of its errors.

The file ends with a checksum of all its bytes before, so that a change of any of them shows. It is
the only thing that says which files a checkpoint has, what they hold and what they should read as;
orbax's own metadata is never trusted for that.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from zen_jax.config import ModelConfig

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
BASE = "base"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

# The parts of a low-rank difference.
FACTORS = {"lora_a", "lora_b", "lora_scale"}
_ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
# "whole": the base's tensor itself; the others say what a variant adds to it.
Policy = Literal["whole", "bit", "low_rank", "dense", "shared"]


class NameRefused(ValueError):
    """A variant's name that the store does not take."""


class NotAStore(ValueError):
    """A folder that is not a store, or may not become one."""


class BaseExists(ValueError):
    """A store that has a base already; a base is never replaced under its variants."""


class VariantNotFound(ValueError):
    """A variant, or a version of it, that the store does not have."""


class WrongBase(ValueError):
    """A variant that was made against other weights than this store's base."""


class NotServedYet(ValueError):
    """A variant that the store holds and that this version of the code cannot load."""


class Corrupt(ValueError):
    """Damage in the store.

    Attributes:
      where: "base", or a variant's "name/version".
      file: the file, relative to its folder.
      problem: what is wrong with it.
    """

    def __init__(self, where: str, file: str, problem: str):
        self.where, self.file, self.problem = where, file, problem
        super().__init__(f"{where}: {file} {problem}")


class BaseCorrupt(Corrupt):
    """Damage in the base."""


class VariantCorrupt(Corrupt):
    """Damage in a variant."""


class ManifestError(ValueError):
    """A manifest that is damaged or not understood."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One published version of a fine-tune.

    Attributes:
      name: as users give it.
      version: counts up from 1.
      digest: of its content; what caches are keyed by, never the name. "" of an adapter that is not
        in its pool yet.
      path: its folder.
      bytes: of host memory that its files, and what is made of them, take at most while it is read.
      merged: the adapters that it answers for, of a member of a pool.
    """

    name: str
    version: int
    digest: str
    path: Path
    bytes: int = dataclasses.field(default=0, compare=False)
    merged: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """One file as it was written.

    Attributes:
      size: bytes.
      xxh3: xxh3_128 in hex; checked at every load.
      sha256: in hex; checked by `zen verify`.
    """

    size: int
    xxh3: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a tensor, stored as one orbax leaf.

    Attributes:
      leaf: name of the leaf, which is its folder.
      dtype: NumPy's name for it, or bfloat16.
      shape: of the whole array.
      shards: how many files it lies in, in order.
      axis: the dimension that is cut for them; 0 when there is one file.
      sha256: of the whole array's bytes in row-major order.
    """

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    shards: int
    axis: int
    sha256: str

    def files(self) -> tuple[str, ...]:
        """The chunk files in the order of the shards, relative to the checkpoint's folder.

        A part in several files is stored as [shards, ...] and each file is one index of that axis.
        """
        return self._files

    @functools.cached_property
    def _files(self) -> tuple[str, ...]:
        zeros = ["0"] * len(self.shape)
        if self.shards == 1:
            return (f"{self.leaf}/{'.'.join(zeros)}",)
        return tuple(f"{self.leaf}/{'.'.join([str(s), *zeros])}" for s in range(self.shards))


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """How one Hugging Face tensor is stored.

    Attributes:
      policy: see `Policy`.
      shape: its true shape; bits are padded, and a variant may have more rows than the base.
      parts: "weight" for a base. For a variant "bits" and "scale"; "dense", a difference in
        float32; "whole", the fine-tune's own values in its dtype; "rows", only those of the rows
        that the base lacks; "lora_a" [R, I], "lora_b" [O, R] and "lora_scale" [1], of an adapter.
      levels: of bits and scales.
      scale: "row" or "matrix" when there are bits.
      against: the base's tensor that it is a difference to, if that has another name.
      stats: figures of its conversion: zeros, alpha_mean, base_rms, relative_error.
    """

    policy: Policy
    shape: tuple[int, ...]
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    levels: int = 0
    scale: str | None = None
    against: str | None = None
    stats: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
      name: "base", or the variant's name.
      version: the variant's version; 0 for a base.
      base_digest: of the base that a variant belongs to; a base's own digest.
      digest: of the content, see `content_digest`.
      settings: the architecture as in a Hugging Face config.json; a variant's differs from its
        base's in vocabulary, tying and length only.
      shards: how many files each large array was cut into.
      tensors: by Hugging Face name.
      tokenizer: file name -> SHA-256; the files lie in the folder `tokenizer`.
      files: every file of the folder except the manifest, by relative path.
      made: source, options and versions of packages.
      quality: measured figures, empty until someone measures.
    """

    name: str
    version: int
    base_digest: str
    digest: str
    settings: Mapping[str, Any]
    shards: int
    tensors: Mapping[str, TensorEntry]
    tokenizer: Mapping[str, str]
    files: Mapping[str, FileEntry]
    made: Mapping[str, Any]
    quality: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The architecture."""
        return ModelConfig.from_hf(self.settings)

    @property
    def is_base(self) -> bool:
        """Whether this is the base's."""
        return self.version == 0

    @property
    def bytes_on_disk(self) -> int:
        """Bytes on disk, the manifest itself included."""
        return sum(file.size for file in self.files.values()) + len(self.render())

    @property
    def load_bytes(self) -> int:
        """Bytes of host memory that reading takes at most: every file once, arrays in several files
        once more as they are joined; for one kept whole its difference, and the base's tensor as
        stored, in float32 and beside the difference."""
        size = sum(file.size for file in self.files.values())
        for tensor in self.tensors.values():
            for kind, part in tensor.parts.items():
                if part.shards > 1:
                    size += sum(self.files[file].size for file in part.files())
                if kind == "whole":
                    size += 16 * math.prod(part.shape)
        return size

    @property
    def full_copy_bytes(self) -> int:
        """Bytes of the same model's weights whole in bfloat16."""
        return 2 * sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def ratio(self) -> float:
        """Bytes on disk over those of a full copy."""
        return self.bytes_on_disk / self.full_copy_bytes

    def render(self) -> bytes:
        """The file's bytes."""
        return self._rendered

    @functools.cached_property
    def _rendered(self) -> bytes:
        text = json.dumps(self._fields(), sort_keys=True, indent=1, allow_nan=False)
        body = text.removesuffix("\n}").encode() + b",\n"
        return body + _seal(body)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"format_version": FORMAT_VERSION}
        fields["kind"] = "base" if self.is_base else "variant"
        for name in ("name", "version", "base_digest", "digest", "shards"):
            fields[name] = getattr(self, name)
        fields["config"] = dict(self.settings)
        fields["tensors"] = {key: dataclasses.asdict(t) for key, t in self.tensors.items()}
        fields["tokenizer"] = dict(self.tokenizer)
        fields["files"] = {key: dataclasses.asdict(f) for key, f in self.files.items()}
        fields["made"], fields["quality"] = dict(self.made), dict(self.quality)
        return fields

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Reads the file's bytes.

        Raises:
          ManifestError: they are damaged, or belong to a format that this version does not read.
        """
        try:
            fields = json.loads(data)
            if not isinstance(fields, dict):
                raise ManifestError("is not an object")
            version = fields.get("format_version")
            if version != FORMAT_VERSION:
                raise ManifestError(f"has format version {version!r}; expected {FORMAT_VERSION}")
            body = data[: -len(_seal(b""))]
            if data != body + _seal(body):
                raise ManifestError("does not match its own checksum")
            return cls._from_fields(fields)
        except ManifestError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestError(f"cannot be read ({str(error)[:200]})") from error

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> "Manifest":
        tensors = {key: _tensor_entry(entry) for key, entry in fields["tensors"].items()}
        files = {key: FileEntry(**entry) for key, entry in fields["files"].items()}
        for path in files:
            if path.startswith("/") or ".." in path.split("/"):
                raise ManifestError(f"names the file {path!r}, which is outside its folder")
        for name, tensor in tensors.items():
            _check_parts(name, tensor, files)
        ModelConfig.from_hf(fields["config"])
        if (fields["kind"] == "base") != (fields["version"] == 0):
            raise ManifestError("does not say whether it is a base or a variant")
        return cls(
            name=fields["name"],
            version=fields["version"],
            base_digest=fields["base_digest"],
            digest=fields["digest"],
            settings=fields["config"],
            shards=fields["shards"],
            tensors=tensors,
            tokenizer=fields["tokenizer"],
            files=files,
            made=fields["made"],
            quality=fields["quality"],
        )


def _tensor_entry(entry: Mapping[str, Any]) -> TensorEntry:
    parts = {
        kind: Part(**(part | {"shape": tuple(part["shape"])}))
        for kind, part in entry["parts"].items()
    }
    return TensorEntry(**{**entry, "shape": tuple(entry["shape"]), "parts": parts})


def _check_parts(name: str, tensor: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    """Raises ManifestError unless a tensor's arrays are possible and lie in listed files."""
    kinds = set(tensor.parts)
    if ("bits" in kinds) != ("scale" in kinds):
        raise ManifestError(f"gives {name} the parts {sorted(kinds)}")
    factors = kinds & FACTORS
    if factors:
        parts = [tensor.parts.get(kind) for kind in ("lora_a", "lora_b", "lora_scale")]
        shapes = [() if part is None else part.shape for part in parts]
        if factors != FACTORS or not _fit(tensor.shape, *shapes):
            raise ManifestError(f"gives {name} factors of shapes {shapes}, which do not fit it")
    for part in tensor.parts.values():
        numbers = (*part.shape, part.shards)
        if part.dtype not in _ITEMSIZE or any(type(n) is not int or n < 1 for n in numbers):
            raise ManifestError(f"gives {part.leaf} a malformed array")
        if part.axis not in range(len(part.shape)) or part.shape[part.axis] % part.shards:
            raise ManifestError(f"cuts {part.leaf} in a way that does not divide")
        lost = [file for file in part.files() if file not in files]
        if lost:
            raise ManifestError(f"places {part.leaf} in {lost[0]}, which it does not list")
        size = sum(files[file].size for file in part.files())
        if size != math.prod(part.shape) * _ITEMSIZE[part.dtype]:
            raise ManifestError(f"gives {part.leaf} files of {size} bytes, which do not fit it")


def _fit(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], scale: Any) -> bool:
    """Whether arrays of these shapes can be the factors of a tensor [O, I], and their scale."""
    return (
        len(shape) == 2 and (a[1:], b[:1], scale) == (shape[1:], shape[:1], (1,)) and a[:1] == b[1:]
    )


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _seal(body: bytes) -> bytes:
    """The last lines of a manifest: a checksum of all bytes before them."""
    return b' "checksum": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def content_digest(
    tensors: Mapping[str, TensorEntry],
    settings: Mapping[str, Any],
    base_digest: str | None = None,
    tokenizer: Mapping[str, str] | None = None,
) -> str:
    """The identity of a base or a variant: what it computes, not how or when it was written.

    It covers each tensor's name, true shape and arrays (dtype, shape, values) and the
    architecture; for a variant also its base's digest and its tokenizer files, so that two variants
    of equal digest answer alike. Shards, orbax's metadata and times are left out.

    Returns:
      SHA-256 in hex.
    """
    arrays = {
        name: {
            "policy": entry.policy,
            "shape": entry.shape,
            "against": entry.against,
            "parts": {k: [p.dtype, p.shape, p.sha256] for k, p in entry.parts.items()},
        }
        for name, entry in tensors.items()
    }
    whole = {
        "tensors": arrays,
        "config": dict(settings),
        "base": base_digest,
        "tokenizer": dict(tokenizer or {}),
    }
    return hashlib.sha256(_canonical(whole)).hexdigest()


def inconsistent(manifest: Manifest, bases: Sequence[str]) -> Iterator[str]:
    """What a manifest says against itself or against the base."""
    tensors, settings = manifest.tensors, manifest.settings
    if manifest.is_base:
        digest = content_digest(tensors, settings)
    else:
        digest = content_digest(tensors, settings, manifest.base_digest, manifest.tokenizer)
    if digest != manifest.digest:
        yield "has a digest that does not fit its tensors"
    for tensor in manifest.tensors.values():
        for part in tensor.parts.values():
            if part.shards == 1 and manifest.files[part.files()[0]].sha256 != part.sha256:
                yield f"gives {part.leaf} two checksums"
    if bases and manifest.base_digest != bases[0]:
        yield "belongs to another base"


def check_name(name: str) -> str:
    """Returns a variant's name if the store takes it.

    Raises:
      NameRefused: it does not match [A-Za-z0-9][A-Za-z0-9._-]{0,127}, or is "base".
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NameRefused(
            f"{name!r:.140} is not a variant's name; expected a letter or digit, then at most 127 "
            "letters, digits, '.', '_' or '-'"
        )
    if name == BASE:
        raise NameRefused(f"{name!r} is reserved for the base; choose another name")
    return name
