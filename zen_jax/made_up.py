"""A variant of random signs on disk, to measure loads of any size with.

Its base is a manifest and nothing else: a load never reads the base.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from zen_jax.checkpoint.chunks import describe_bytes
from zen_jax.checkpoint.manifest import (
    BASE,
    MANIFEST,
    Manifest,
    Part,
    TensorEntry,
    Variant,
    content_digest,
)
from zen_jax.checkpoint.publish import LazyArray, Publisher
from zen_jax.checkpoint.store import Store
from zen_jax.config import ModelConfig
from zen_jax.layout import tensor_shapes

_SCALE = 1e-3


def made_up_variant(folder: Path, config: ModelConfig) -> tuple[Store, Variant]:
    """A store with one variant, "noise", of a model.

    Args:
      folder: empty; becomes the store.
      config: the model, whose input sizes are multiples of 8.
    """
    shapes = tensor_shapes(config)
    base = _base(config)
    (folder / BASE).mkdir(parents=True)
    (folder / BASE / MANIFEST).write_bytes(base.render())
    draw = np.random.default_rng(1)

    def leaf(dtype: type, shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> LazyArray:
        return LazyArray(np.dtype(dtype), shape, make)

    def parts(shape: tuple[int, ...]) -> dict[str, LazyArray]:
        if len(shape) == 1:
            return {"dense": leaf(np.float32, shape, lambda: np.zeros(shape, np.float32))}
        bits, scale = (1, shape[0], shape[1] // 8), (1, shape[0])
        return {
            "bits": leaf(np.uint8, bits, lambda: draw.integers(0, 256, bits, np.uint8)),
            "scale": leaf(np.float32, scale, lambda: np.full(scale, _SCALE, np.float32)),
        }

    with Publisher(folder) as publisher:
        written = publisher.write({name: parts(shape) for name, shape in shapes.items()}, {})
        entries: dict[str, TensorEntry] = {}
        for name, shape in shapes.items():
            matrix = len(shape) == 2
            kinds = ("bits", "scale") if matrix else ("dense",)
            own = {kind: written.parts[f"{name}.{kind}"] for kind in kinds}
            policy, scale = ("bit", "row") if matrix else ("dense", None)
            entries[name] = TensorEntry(policy, shape, own, int(matrix), scale)
        digest = content_digest(entries, base.settings, base.digest, {})
        publisher.publish_variant(
            "noise",
            lambda version: Manifest(
                name="noise",
                version=version,
                base_digest=base.digest,
                digest=digest,
                settings=base.settings,
                shards=1,
                tensors=entries,
                tokenizer={},
                files=written.files,
                made={"source": "random signs"},
            ),
        )
    store = Store(folder)
    return store, store.variant("noise")


def _base(config: ModelConfig) -> Manifest:
    """A base's manifest; what it names lies nowhere."""
    entries: dict[str, TensorEntry] = {}
    files = {}
    for name, shape in tensor_shapes(config).items():
        part = Part(name, "bfloat16", shape, 1, 0, "")
        entries[name] = TensorEntry("whole", shape, {"weight": part})
        entry = describe_bytes(b"")
        [file] = part.files()
        files[file] = type(entry)(2 * math.prod(shape), entry.xxh3, entry.sha256)
    settings = config.to_hf()
    digest = content_digest(entries, settings)
    return Manifest(BASE, 0, digest, digest, settings, 1, entries, {}, files, {"source": "none"})
