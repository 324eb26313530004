"""How a checkpoint is made: the cuts of its arrays, progress, the key of work that can be gone on
with, and the record of its making.
"""

import datetime
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from typing import Any

from zen_jax.checkpoint.source import Source
from zen_jax.checkpoint.store import Progress
from zen_jax.config import ModelConfig
from zen_jax.layout import ParamSpec, map_specs
from zen_jax.sharding import TABLE

_PACKAGES = ("jax", "ml_dtypes", "numpy", "orbax-checkpoint", "tensorstore", "zen-jax")
# Counts up when parts of an older version of this code must not be gone on with.
_WORK_VERSION = 1


class Meter:
    """Tells a progress callback how many bytes are done."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def advance(self, name: str, size: int) -> None:
        """Adds a tensor's bytes."""
        self._done += size
        if self._progress is not None:
            self._progress(name, self._done, self._total)


def check_shards(shards: int) -> None:
    """Raises ValueError unless a matrix may be cut into so many files."""
    if type(shards) is not int or not 1 <= shards <= 1024:
        raise ValueError(f"shards is {shards!r}; expected a whole number from 1 to 1024")


def cut_axes(config: ModelConfig) -> dict[str, int]:
    """For each tensor [O, I], the dimension that a mesh shards: inputs of o and down, else rows."""
    axes: dict[str, int] = {}

    def add(spec: ParamSpec) -> None:
        last = spec.axes[-1]
        by_inputs = spec.kind != "vector" and last is not None and TABLE[last] is not None
        axes.update(dict.fromkeys(spec.sources, int(by_inputs)))

    map_specs(add, config)
    return axes


def cuts(shards: int, size: int) -> int:
    """How many files a dimension is cut into: all that were asked for, or one."""
    return shards if size % shards == 0 else 1


def work_key(source: Source, against: str, options: Mapping[str, Any]) -> str:
    """What an interrupted conversion is found again by.

    It covers the source's configuration, its tensors' names, types and shapes, the name, size and
    time of change of each of its files, the options, and the versions of packages. The weights are
    not read for it: files that change keep neither size nor time.

    Args:
      source: what is converted.
      against: the base's digest; "" for a base.
      options: of the conversion.

    Returns:
      40 hexadecimal digits.
    """
    files = []
    for file in source.files:
        state = file.stat()
        files.append([file.name, state.st_size, state.st_mtime_ns])
    tensors = [[name, t.dtype, t.shape] for name, t in sorted(source.tensors.items())]
    settings = source.config.to_hf()
    whole = [_WORK_VERSION, package_versions(), settings, tensors, files, against, dict(options)]
    text = json.dumps(whole, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def made(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint came about; names no path beyond the source's own name."""
    return {
        "source": source.name,
        "coding": source.coding,
        "options": dict(options),
        "packages": package_versions(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide how a checkpoint is written."""
    return dict(_versions())


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
