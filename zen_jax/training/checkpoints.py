"""The folder of a run with merges: orbax checkpoints of masters, raw and merged weights, apart.

FOLDER/STEP/master is what training goes on from: float32 weights and the optimizer's state. raw
holds the weights of that step in bfloat16, merged those of each merge in float32, record what else
there is to know. A step appears whole or not at all; the one before is removed only then.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from zen_jax.checkpoint.publish import quiet_orbax

Tensors = Mapping[str, np.ndarray]
_ITEMS = ("master", "raw", "merged")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a folder held.

    Attributes:
      master: the arrays that were saved, in order.
      merged: float32 tensors by method and name.
      record: what was saved with them.
    """

    master: list[Any]
    merged: Mapping[str, dict[str, np.ndarray]]
    record: Mapping[str, Any]


class RunFolder:
    """A run's checkpoints, of which the newest is kept."""

    def __init__(self, folder: Path) -> None:
        """Takes a folder; it is made when it is first written to."""
        self._folder = Path(folder).resolve()

    def save(
        self,
        step: int,
        master: Sequence[Any],
        raw: Tensors,
        merged: Mapping[str, Tensors],
        record: Mapping[str, Any],
    ) -> None:
        """Writes a checkpoint; one of the same step that is there already stays.

        Args:
          step: of training.
          master: arrays that training goes on from.
          raw: weights as they are, by name.
          merged: weights by method and name.
          record: JSON values.
        """
        # Orbax takes no empty trees.
        trees = {"master": _numbered(master), "raw": dict(raw), "merged": dict(merged)}
        args = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items() if tree}
        self._folder.mkdir(parents=True, exist_ok=True)
        with quiet_orbax(), self._manager() as manager:
            saved = ocp.args.Composite(record=ocp.args.JsonSave(dict(record)), **args)
            if step not in manager.all_steps():
                manager.save(step, args=saved)

    def record(self) -> Mapping[str, Any] | None:
        """The newest checkpoint's record, None if there is none; a run may be under way."""
        steps = [int(p.name) for p in self._folder.glob("*") if p.name.isdecimal()]
        if not steps:
            return None
        text = (self._folder / str(max(steps)) / "record" / "metadata").read_text()
        return json.loads(text)

    def restore(self, identity: str, like: Sequence[Any]) -> Restored | None:
        """The newest checkpoint, None if there is none.

        Args:
          identity: that its record has to have.
          like: arrays whose shapes and dtypes its masters have to have.

        Raises:
          ValueError: it is of another run or model, or damaged.
        """
        if not self._folder.is_dir():
            return None
        with quiet_orbax(), self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                return None
            try:
                record = self._read(manager, step, record=ocp.args.JsonRestore())["record"]
                self._check(record["identity"], identity)
                names = [n for n, shadow in record["shadows"].items() if shadow["kept"]]
                items = ("master", "merged") if names else ("master",)
                found = self._read(manager, step, **dict.fromkeys(items, ocp.args.PyTreeRestore()))
            except _Another:
                raise
            except Exception as error:  # orbax and tensorstore have many kinds of their own
                text = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
                raise ValueError(
                    f"{self._folder}/{step} cannot be read ({text}); remove it to go on from none"
                ) from error
        stored = [found["master"][key] for key in sorted(found["master"])]
        shapes = [(value.shape, np.dtype(value.dtype)) for value in stored]
        if shapes != [(value.shape, np.dtype(value.dtype)) for value in like]:
            raise ValueError(f"{self._folder} belongs to another model or optimizer; remove it")
        merged = {
            name: {key: np.asarray(value) for key, value in found["merged"][name].items()}
            for name in names
        }
        return Restored([jnp.asarray(value) for value in stored], merged, record)

    def _check(self, found: str, wanted: str) -> None:
        if found != wanted:
            raise _Another(
                f"{self._folder} is of a run with {found}; this one has {wanted}; choose another "
                "folder, or remove it"
            )

    def _read(self, manager: ocp.CheckpointManager, step: int, **items: Any) -> Any:
        return manager.restore(step, args=ocp.args.Composite(**items))

    def _manager(self) -> ocp.CheckpointManager:
        handlers = {
            name: ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
            for name in _ITEMS
        }
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
            item_handlers={**handlers, "record": ocp.JsonCheckpointHandler()},
        )


class _Another(ValueError):
    """A folder of another run."""


def _numbered(arrays: Sequence[Any]) -> dict[str, Any]:
    """Arrays by their place; paths of a tree are no names for files."""
    return {f"{i:05d}": jax.device_get(array) for i, array in enumerate(arrays)}
