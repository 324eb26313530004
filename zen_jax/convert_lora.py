"""LoRA adapters into a store as variants of its base, and back to PEFT unchanged.

The factors are kept as they are, with what scales them beside; the scale is folded into b when a
variant is read, and nowhere else. What an adapter trained whole is kept whole.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zen_jax.checkpoint.hf import HuggingFaceFolder, not_finite
from zen_jax.checkpoint.manifest import (
    Manifest,
    TensorEntry,
    Variant,
    check_name,
    content_digest,
)
from zen_jax.checkpoint.peft import (
    PREFIX,
    PeftAdapter,
    copy_name,
    factor_names,
    open_adapter,
    write_folder,
)
from zen_jax.checkpoint.plan import Meter, package_versions
from zen_jax.checkpoint.publish import LazyArray, Publisher, Written
from zen_jax.checkpoint.safetensors import DTYPES, SourceError, read_tensor
from zen_jax.checkpoint.store import Progress, Store
from zen_jax.checkpoint.tokens import check_tokenizer
from zen_jax.convert import Summary, summarise
from zen_jax.layout import EMBED, HEAD

# What an adapter's own folder may not decide: where its base lay.
_PATH = "base_model_name_or_path"


def convert_lora(src: Path, store: Path, name: str, *, progress: Progress | None = None) -> Summary:
    """Adds a LoRA adapter of the store's base, as the next version of its name.

    Args:
      src: a PEFT folder: adapter_config.json and adapter_model.safetensors, perhaps a tokenizer.
      store: the store's folder.
      name: the variant's name.
      progress: called after each tensor with its name, bytes done and bytes in all.

    Raises:
      SourceError: the adapter is damaged, of a kind that is not computed here (DoRA, biases), or
        does not fit the base; every problem is named.
      NameRefused, NotAStore: the name or the store will not do.
      BaseCorrupt: the store's base is damaged.
      StoreWriteFailed: there was no room, or the disk failed.
    """
    started = time.perf_counter()
    check_name(name)
    target = Store(Path(store))
    shapes = {key: entry.shape for key, entry in target.base().tensors.items()}
    adapter = open_adapter(Path(src), shapes)
    return summarise(_publish(adapter, target, name, progress), started)


def _publish(adapter: PeftAdapter, store: Store, name: str, progress: Progress | None) -> Manifest:
    base = store.base()
    parts, problems = _parts(adapter), list[str]()
    shapes = {key: entry.shape for key, entry in base.tensors.items()}
    for tensor, own in parts.items():
        problems += filter(None, (not_finite(f"{tensor} {k}", v) for k, v in own.items()))
        whole = own.get("whole")
        if whole is not None and whole.shape != shapes.get(tensor, shapes[EMBED]):
            problems.append(f"{tensor} has shape {whole.shape}; expected the base's")
    for tensor, copy in adapter.copies.items():
        values, own = read_tensor(copy), store.base_tensor(tensor if tensor in shapes else EMBED)
        if not np.array_equal(values.astype(np.float32), own.astype(np.float32)):
            problems.append(f"{copy.name} is not the base's {tensor}; it belongs to another base")
    if problems:
        raise SourceError(adapter.name, problems)
    entries = _entries(base, parts)
    settings = dict(base.settings)
    if HEAD in entries:  # PEFT adapts embedding and head apart, tied or not
        settings["tie_word_embeddings"] = False
    tokenizer, borrowed = _tokenizer(adapter, store)
    warnings = check_tokenizer(adapter.name, tokenizer, base.config, borrowed)
    record: dict[str, Any] = {
        "source": adapter.name,
        "coding": "LoRA",
        "options": {},
        "adapter": _public(adapter.settings),
        "copies": {tensor: copy.dtype for tensor, copy in adapter.copies.items()},
        "packages": package_versions(),
        "tokenizer_from_base": borrowed,
        "warnings": warnings,
    }
    meter = Meter(progress, sum(v.nbytes for own in parts.values() for v in own.values()))
    with Publisher(store.path) as publisher:
        tree = {
            tensor: {kind: _leaf(tensor, array, meter) for kind, array in own.items()}
            for tensor, own in parts.items()
        }
        written = publisher.write(tree, tokenizer)
        return publisher.publish_variant(
            name, lambda version: _manifest(name, version, base, settings, entries, written, record)
        )


def _leaf(tensor: str, array: np.ndarray, meter: Meter) -> LazyArray:
    def produce() -> np.ndarray:
        meter.advance(tensor, array.nbytes)
        return array

    return LazyArray(array.dtype, array.shape, produce)


def _parts(adapter: PeftAdapter) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each tensor that an adapter changes, by kind, as stored."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, weight in sorted(adapter.weights.items()):
        a, b = weight.read()
        scale = np.array([weight.scale], np.float32)
        parts[name] = {"lora_a": a, "lora_b": b, "lora_scale": scale}
    for name, tensor in sorted(adapter.saved.items()):
        parts[name] = {"whole": read_tensor(tensor)}
    return parts


def _entries(
    base: Manifest, parts: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, TensorEntry]:
    """Every tensor of the variant; a head of its own where embedding or head are adapted."""
    shapes = {name: entry.shape for name, entry in base.tensors.items()}
    against: dict[str, str | None] = dict.fromkeys(shapes)
    if HEAD not in shapes and {EMBED, HEAD} & set(parts):
        shapes[HEAD], against[HEAD] = shapes[EMBED], EMBED
    return {
        name: TensorEntry(
            "shared" if name not in parts else ("dense" if "whole" in parts[name] else "low_rank"),
            shape,
            against=against[name],
        )
        for name, shape in shapes.items()
    }


def _manifest(
    name: str,
    version: int,
    base: Manifest,
    settings: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    written: Written,
    record: Mapping[str, Any],
) -> Manifest:
    kinds: dict[str, dict[str, Any]] = {}
    for leaf, part in written.parts.items():
        tensor, _, kind = leaf.rpartition(".")
        kinds.setdefault(tensor, {})[kind] = part
    tensors = {
        tensor: TensorEntry(e.policy, e.shape, kinds.get(tensor, {}), against=e.against)
        for tensor, e in entries.items()
    }
    return Manifest(
        name=name,
        version=version,
        base_digest=base.digest,
        digest=content_digest(tensors, settings, base.digest, written.tokenizer),
        settings=settings,
        shards=base.shards,
        tensors=tensors,
        tokenizer=written.tokenizer,
        files=written.files,
        made=record,
    )


def _tokenizer(adapter: PeftAdapter, store: Store) -> tuple[dict[str, bytes], list[str]]:
    """The variant's tokenizer files, and which of them are the base's for want of its own."""
    own = HuggingFaceFolder(adapter.path, store.base().config, {}).tokenizer_files()
    if "tokenizer.json" in own:
        return own, []
    lent = {n: data for n, data in store.tokenizer_files(None).items() if n not in own}
    return own | lent, sorted(lent)


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a path to somebody's folders; the name of a model on a hub stays."""
    kept = dict(settings)
    if os.path.isabs(str(kept.get(_PATH) or "")) or str(kept.get(_PATH) or "").startswith("."):
        kept[_PATH] = None
    return kept


def export_lora(store: Store, variant: Variant, out: Path) -> None:
    """Writes a variant that was a PEFT adapter as one again: the same tensors and settings.

    Args:
      store: with the variant.
      variant: what `convert_lora` made.
      out: the folder to write; nothing may be there.

    Raises:
      ValueError: the variant was no adapter, or something is at that place.
      VariantCorrupt: a file is damaged.
    """
    manifest = store.manifest(variant)
    settings = manifest.made.get("adapter")
    if settings is None:
        raise ValueError(f"{variant} was made of a whole checkpoint; it has no adapter to write")
    tensors: dict[str, np.ndarray] = {}
    for name, entry in manifest.tensors.items():
        if not entry.parts:
            continue
        parts = store.variant_parts(variant, name)
        if "whole" in parts:
            tensors[PREFIX + name] = parts["whole"]
            continue
        turned = [parts[kind].T if name == EMBED else parts[kind] for kind in ("lora_a", "lora_b")]
        tensors |= zip(factor_names(name), map(np.ascontiguousarray, turned), strict=True)
    for name, dtype in manifest.made["copies"].items():
        own = store.base_tensor(name if name in store.base().tensors else EMBED)
        tensors[copy_name(name)] = own.astype(DTYPES[dtype])
    lent = set(manifest.made["tokenizer_from_base"])
    files = store.tokenizer_files(variant)
    write_folder(out, tensors, settings, {n: d for n, d in files.items() if n not in lent})
