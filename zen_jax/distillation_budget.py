"""A budget of bytes for a distilled variant: which matrices get another level of signs for it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zen_jax.checkpoint.manifest import Manifest, TensorEntry
from zen_jax.delta.levels import MAX_LEVELS

# Kept free of a budget: figures whose digits are known only at the end.
_RESERVE = 256


@dataclasses.dataclass(frozen=True)
class Budget:
    """What there is to spend, and on what.

    Attributes:
      room: bytes for more levels.
      held: levels of each matrix with signs.
      costs: bytes on disk of one more level of each, its manifest's digits included.
      most: levels that are worth a look: two more than all matrices could have.
    """

    room: int
    held: Mapping[str, int]
    costs: Mapping[str, int]
    most: int


def open_budget(manifest: Manifest, record: Mapping[str, Any], size: int) -> Budget:
    """What a budget leaves for more levels.

    Args:
      manifest: of the version that is distilled.
      record: how the next one will have been made.
      size: bytes on disk that the next version may have.

    Raises:
      ValueError: the version as it is takes more; both sizes and the remedy are named.
    """
    # The next version without another level: the same files, and another record.
    same = dataclasses.replace(manifest, made=record).bytes_on_disk + _RESERVE
    held = {n: e.levels for n, e in manifest.tensors.items() if e.policy == "bit"}
    if size < same:
        fewer = ", or convert it with fewer levels" if max(held.values(), default=1) > 1 else ""
        raise ValueError(
            f"{manifest.name}/{manifest.version} takes {manifest.bytes_on_disk:,} bytes on disk, "
            f"and {same:,} distilled with the levels that it has, more than the {size:,} allowed; "
            f"allow at least {same:,}{fewer}"
        )
    costs = {name: _level_bytes(manifest.tensors[name]) for name in held}
    even = max(
        (n for n in range(1, MAX_LEVELS + 1) if _more(held, costs, n) <= size - same), default=1
    )
    return Budget(size - same, held, costs, min(even + 2, MAX_LEVELS))


def _more(held: Mapping[str, int], costs: Mapping[str, int], levels: int) -> int:
    """Bytes that it takes to bring all matrices to so many levels."""
    return sum(max(levels - has, 0) * costs[name] for name, has in held.items())


def _level_bytes(entry: TensorEntry) -> int:
    bits, scale = entry.parts["bits"], entry.parts["scale"]
    nbytes = math.prod(bits.shape) + 4 * math.prod(scale.shape)
    # A file's size in the manifest may get a digit more.
    return nbytes // entry.levels + len(bits.files()) + len(scale.files())
