"""Fine-tunes kept as int8 residuals to the base: a quarter of float32, half of bfloat16.

A matrix of a fine-tune is W = bfloat16(W_base + scale q), with q int8[O, I] and scale float32[O]; a
vector is kept whole. The model so rounded is the fine-tune: nothing else is ever scored or served.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zen_jax.config import ModelConfig
from zen_jax.layout import Params, fuse, tensor_shapes

Tensors = dict[str, np.ndarray]
WEIGHTS = "model.safetensors"
_FORMAT = "zen-residual-1"


def round_tensors(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """All tensors in bfloat16, as a folder of weights holds them."""
    return {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def float32_params(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Params:
    """Hugging Face tensors as float32 ``Params``."""
    return fuse(config, {name: value.astype(np.float32) for name, value in tensors.items()})


def encode(base: Mapping[str, np.ndarray], tuned: Mapping[str, np.ndarray]) -> Tensors:
    """Residuals of a fine-tune: NAME.q and NAME.scale for a matrix, NAME for a vector.

    Args:
      base: bfloat16 tensors, as stored.
      tuned: of the same names and shapes, any float dtype.

    Raises:
      ValueError: names or shapes differ, or a residual is not finite.
    """
    if set(base) != set(tuned):
        raise ValueError(f"tensors differ: {', '.join(sorted(set(base) ^ set(tuned)))}")
    encoded: Tensors = {}
    for name, start in base.items():
        value = np.asarray(tuned[name], np.float32)
        if value.shape != start.shape:
            raise ValueError(f"{name} has shape {value.shape}; the base's is {start.shape}")
        residual = value - start.astype(np.float32)
        if not np.isfinite(residual).all():
            raise ValueError(f"{name} is not finite")
        if value.ndim == 1:
            encoded[name] = value.astype(ml_dtypes.bfloat16)
            continue
        scale = np.abs(residual).max(axis=1) / np.float32(127)
        divisor = np.where(scale > 0, scale, 1)[:, None]
        encoded[name + ".q"] = np.rint(residual / divisor).astype(np.int8)
        encoded[name + ".scale"] = scale.astype(np.float32)
    return encoded


def decode(base: Mapping[str, np.ndarray], encoded: Mapping[str, np.ndarray]) -> Tensors:
    """The fine-tune's tensors in bfloat16; the inverse of `encode` up to its rounding.

    Raises:
      ValueError: a tensor is missing, does not belong to the base, or has another shape or dtype.
    """
    wanted = {part for name, value in base.items() for part in _parts(name, value)}
    if set(encoded) != wanted:
        raise ValueError(
            f"residuals do not fit the base: {', '.join(sorted(wanted ^ set(encoded))[:4])}"
        )
    tuned: Tensors = {}
    for name, start in base.items():
        for part, (shape, dtype) in _parts(name, start).items():
            if encoded[part].shape != shape or encoded[part].dtype != dtype:
                raise ValueError(
                    f"{part} is {encoded[part].dtype}{encoded[part].shape}; expected {dtype}{shape}"
                )
        if start.ndim == 1:
            tuned[name] = encoded[name]
            continue
        residual = encoded[name + ".scale"][:, None] * encoded[name + ".q"].astype(np.float32)
        tuned[name] = (start.astype(np.float32) + residual).astype(ml_dtypes.bfloat16)
    return tuned


def _parts(name: str, base: np.ndarray) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each tensor that a residual keeps for one of the base's."""
    if base.ndim == 1:
        return {name: (base.shape, np.dtype(ml_dtypes.bfloat16))}
    return {
        name + ".q": (base.shape, np.dtype(np.int8)),
        name + ".scale": (base.shape[:1], np.dtype(np.float32)),
    }


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors of a file, and its metadata.

    Raises:
      ValueError: the file is missing or damaged.
    """
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_folder(folder: Path) -> tuple[ModelConfig, Tensors]:
    """Configuration and bfloat16 tensors of a folder as `write_folder` makes it.

    Raises:
      ValueError: a file is missing or damaged, or tensors are not those that the config asks for.
    """
    try:
        config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from error
    tensors, _ = read_safetensors(folder / WEIGHTS)
    shapes = {name: value.shape for name, value in tensors.items()}
    if shapes != tensor_shapes(config):
        raise ValueError(f"{folder / WEIGHTS} does not hold the tensors that its config asks for")
    return config, tensors


def save_residual(path: Path, base: Path, encoded: Tensors, metadata: Mapping[str, str]) -> None:
    """Writes a residual, bound to the base's file of weights by its digest; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bound = {"format": _FORMAT, "base_sha256": file_digest(base / WEIGHTS), **metadata}
    temporary = path.with_name(path.name + ".part")
    save_file(encoded, temporary, metadata=bound)
    temporary.replace(path)


def load_residual(path: Path, base: Path, base_tensors: Tensors) -> Tensors:
    """The fine-tune's bfloat16 tensors.

    Args:
      path: a file that `save_residual` wrote.
      base: the base's folder.
      base_tensors: its tensors.

    Raises:
      ValueError: the file is missing, damaged, of another format, or made against another base.
    """
    encoded, metadata = read_safetensors(path)
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is no residual; expected format {_FORMAT}")
    if metadata.get("base_sha256") != file_digest(base / WEIGHTS):
        raise ValueError(f"{path} was made against another base than {base}")
    return decode(base_tensors, encoded)


def write_folder(folder: Path, tensors: Tensors, like: Path) -> None:
    """A Hugging Face folder: bfloat16 weights, and config and tokenizer copied from another one.

    It appears whole or not at all. A folder of weights that is there already is replaced.

    Raises:
      ValueError: something else is at that place.
    """
    if folder.exists() and not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} exists and holds no {WEIGHTS}; choose another place")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.part")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    for path in sorted(like.glob("*.json")):
        shutil.copyfile(path, temporary / path.name)
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def write_full(family: Path, out: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Writes fine-tunes of a family as full Hugging Face folders OUT/NAME.

    Args:
      family: a folder with base/ and residuals/NAME.safetensors.
      out: where to write; made if need be.
      names: which; all by default.

    Returns:
      The folders written.

    Raises:
      ValueError: the family or a residual is missing or damaged, a residual belongs to another
        base, or there is no variant of a name.
    """
    base = family / "base"
    found = {path.stem: path for path in sorted((family / "residuals").glob("*.safetensors"))}
    if not found:
        raise ValueError(f"{family} holds no residuals/*.safetensors; is it a family?")
    unknown = sorted(set(names or ()) - set(found))
    if unknown:
        raise ValueError(f"no variant is called {', '.join(unknown)}; there are {', '.join(found)}")
    _, base_tensors = read_folder(base)
    written = []
    for name in names or found:
        tensors = load_residual(found[name], base, base_tensors)
        write_folder(out / name, tensors, base)
        written.append(out / name)
    return written
