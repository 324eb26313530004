"""A checkpoint in a Hugging Face folder: configuration, tensors and tokenizer files.

Opening one reads headers only and compares them with what the configuration calls for; every
problem is reported, not the first. Tensors are read one at a time. Knows nothing of the store.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.checkpoint.safetensors import (
    DTYPES,
    MAX_TENSORS,
    SourceError,
    SourceTensor,
    count_not_finite,
    read_header,
    read_json,
    read_tensor,
)
from zen_jax.config import ModelConfig
from zen_jax.layout import EMBED, HEAD, tensor_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What a variant may bring of its own besides weights: text <-> tokens, template, stop ids.
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_MAX_TOKENIZER_BYTES = 128 * 2**20
# Settings that say where somebody's files once lay.
_PRIVATE = ("_name_or_path", "name_or_path")


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """An opened checkpoint whose tensors are exactly those its configuration calls for.

    Attributes:
      path: the folder.
      config: its architecture.
      tensors: every tensor, by name; `HEAD` only when it is untied.
      spare_head: the head that a checkpoint with tied weights holds all the same, or None.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    spare_head: SourceTensor | None = None

    @property
    def name(self) -> str:
        """The folder's own name, without the path to it."""
        return self.path.resolve().name

    @property
    def coding(self) -> str:
        """What most weights are coded in, "BF16" for instance."""
        sizes = Counter[str]()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0]

    @property
    def files(self) -> tuple[Path, ...]:
        """The configuration and what the weights are read from."""
        return (self.path / "config.json", *sorted({t.file for t in self.tensors.values()}))

    def read(self, name: str) -> np.ndarray:
        """One tensor as it is stored: bfloat16, float16 or float32; its values are not checked.

        Raises:
          SourceError: the file has become shorter.
        """
        return read_tensor(self.tensors[name])

    def check_spare_head(self) -> None:
        """Makes sure that a head beside tied weights is the embedding again.

        Raises:
          SourceError: it differs, so leaving it out would change the model.
        """
        if self.spare_head is None:
            return
        if not np.array_equal(read_tensor(self.spare_head), read_tensor(self.tensors[EMBED])):
            raise SourceError(
                self.name,
                f"{HEAD} differs from {EMBED} although config.json ties them; "
                "set tie_word_embeddings to false, or remove the head",
            )

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer, template and generation settings of this checkpoint, by file name.

        Paths that name somebody's folders are left out of the JSON ones.

        Raises:
          SourceError: a file is larger than any tokenizer, cannot be read, or is no JSON; or there
            is something of that name that is no file.
        """
        found: dict[str, bytes] = {}
        for name in TOKENIZER_FILES:
            file = self.path / name
            if not os.path.lexists(file):
                continue
            try:
                found[name] = _tokenizer_file(file)
            except OSError as error:
                problem = f"{name} cannot be read ({error.strerror})"
                raise SourceError(self.name, problem) from error
        return found


def not_finite(name: str, values: np.ndarray) -> str | None:
    """A line that says how many values of a tensor are NaN or infinite, or None if none are."""
    bad = count_not_finite(values)
    return f"{name} has {bad} of {values.size} values that are NaN or infinite" if bad else None


def _tokenizer_file(file: Path) -> bytes:
    if not file.is_file():  # opening a pipe would wait for somebody to write
        what = "a link to nothing" if not file.exists() else "a folder or a device"
        raise SourceError(file.parent.resolve().name, f"{file.name} is {what}; expected a file")
    if file.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise SourceError(file.name, f"is larger than {_MAX_TOKENIZER_BYTES} bytes")
    return _without_paths(file) if file.name.endswith("config.json") else file.read_bytes()


def _without_paths(file: Path) -> bytes:
    """A JSON file's bytes; written anew only if a private path has to go."""
    settings = read_json(file)
    kept = {key: value for key, value in settings.items() if key not in _PRIVATE}
    if len(kept) == len(settings):
        return file.read_bytes()
    return json.dumps(kept, indent=2, ensure_ascii=False).encode() + b"\n"


def open_folder(path: Path) -> HuggingFaceFolder:
    """Opens a checkpoint and checks that it is whole; no tensor is read.

    Args:
      path: a folder with config.json and either model.safetensors or shards with their index.

    Raises:
      SourceError: it is no such folder, or names, shapes or dtypes are not what its configuration
        calls for; all problems are named together.
    """
    if not path.is_dir():
        raise SourceError(str(path), "is not a folder; expected one with config.json and weights")
    try:
        config = ModelConfig.from_hf(read_json(path / "config.json"))
    except SourceError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(path.name, str(error)) from error
    tensors, problems = _find_tensors(path)
    # Without all shards, what is missing or unexpected is not known.
    if not problems:
        problems = _compare(config, tensors)
    if problems:
        raise SourceError(path.name, problems)
    spare = tensors.pop(HEAD) if config.tie_word_embeddings and HEAD in tensors else None
    return HuggingFaceFolder(path, config, tensors, spare)


def _find_tensors(path: Path) -> tuple[dict[str, SourceTensor], list[str]]:
    """Every tensor of the folder, and what is wrong with its files."""
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE), []
    if (path / INDEX).is_file():
        return _read_shards(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0]), []
    if files:
        raise SourceError(path.name, f"has {len(files)} safetensors files but no {INDEX}")
    others = sorted(p.name for p in path.iterdir() if p.suffix in (".gguf", ".bin", ".pt", ".pth"))
    hint = f"; {others[0]} is not read, save it as safetensors" if others else ""
    if others and others[0].endswith(".gguf"):
        hint = f"; give the file {others[0]} itself"
    raise SourceError(path.name, f"has no {SINGLE} and no {INDEX}{hint}")


def _read_shards(path: Path) -> tuple[dict[str, SourceTensor], list[str]]:
    where = read_json(path / INDEX).get("weight_map")
    if not isinstance(where, dict) or len(where) > MAX_TENSORS:
        raise SourceError(INDEX, f"needs a weight_map of at most {MAX_TENSORS} tensors")
    tensors: dict[str, SourceTensor] = {}
    problems: list[str] = []
    for shard in sorted({str(file) for file in where.values()}):
        named = {name for name, file in where.items() if file == shard}
        if shard != Path(shard).name or shard in (".", ".."):
            problems.append(f"{INDEX} names the file {shard!r}, which is not in this folder")
            continue
        try:
            found = read_header(path / shard)
        except SourceError as error:
            problems.append(str(error))
            continue
        for name in sorted(named - set(found)):
            problems.append(f"{shard} lacks {name}, which {INDEX} places there")
        for name in sorted(set(found) - named):
            problems.append(f"{shard} holds {name}, which {INDEX} does not place there")
        tensors |= {name: found[name] for name in named & set(found)}
    return tensors, problems


def _compare(config: ModelConfig, tensors: Mapping[str, SourceTensor]) -> list[str]:
    """Problems in names, shapes and dtypes, measured against the configuration."""
    expected: dict[str, Any] = tensor_shapes(config)
    problems = []
    missing = sorted(set(expected) - set(tensors))
    if missing:
        problems.append(f"lacks {listed(missing)}, which config.json calls for")
    if config.tie_word_embeddings and HEAD in tensors:
        expected[HEAD] = expected[EMBED]
    extra = sorted(set(tensors) - set(expected))
    if extra:
        problems.append(f"has {listed(extra)}, which this architecture does not use")
    for name in sorted(set(expected) & set(tensors)):
        tensor = tensors[name]
        if tensor.shape != expected[name]:
            problems.append(f"{name} has shape {tensor.shape}; config.json says {expected[name]}")
        if tensor.dtype not in DTYPES:
            problems.append(f"{name} is {tensor.dtype}; expected one of {', '.join(DTYPES)}")
    return problems


def listed(names: list[str]) -> str:
    """The first names of many, for an error."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
