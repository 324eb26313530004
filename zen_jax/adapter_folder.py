"""A folder of adapters that may be asked for: FOLDER/NAME is a PEFT folder with tasks.json.

Nothing outside the folder is ever read: a name is one part of a path, and a link that leads out of
the folder, or a file that is none (a pipe, a device), is as if it were not there.
"""

from pathlib import Path

from zen_jax.checkpoint.manifest import NameRefused, check_name
from zen_jax.checkpoint.peft import CONFIG
from zen_jax.merge.pool_change import Newcomer, Tasks
from zen_jax.merge.pool_simulate import read_newcomer

_TASKS = "tasks.json"


class AdapterUnusable(ValueError):
    """A folder that holds no adapter of the base with tasks, or one that leads out."""


class AdapterFolder:
    """Adapters by name; holds no open files and may be shared by threads.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: Path):
        """Opens it.

        Raises:
          ValueError: it is no folder.
        """
        if not path.is_dir():
            raise ValueError(f"{path} is no folder; --adapters wants one of PEFT folders")
        self.path = path.resolve()

    def names(self) -> list[str]:
        """Every adapter, sorted; none if the folder has gone."""
        try:
            return sorted(path.name for path in self.path.iterdir() if self.holds(path.name))
        except OSError:
            return []

    def holds(self, name: str) -> bool:
        """Whether there is an adapter of that name; `read` shows whether it can be used."""
        try:
            check_name(name)
        except NameRefused:
            return False
        return self._inside(self.path / name / CONFIG)

    def mark(self, name: str) -> str:
        """Of its files: another once one of them is written anew."""
        try:
            files = sorted((self.path / name).iterdir())
            return " ".join(f"{f.name} {(s := f.stat()).st_mtime_ns} {s.st_size}" for f in files)
        except OSError:
            return ""

    def read(self, name: str, shapes: dict[str, tuple[int, ...]], most: int) -> Newcomer:
        """An adapter and its tasks.

        Args:
          name: one that `holds` knows.
          shapes: of the base's tensors.
          most: bytes that its tasks may take.

        Raises:
          AdapterUnusable: it is no adapter of this base, has no tasks, or leads out of the folder.
        """
        folder = self.path / name
        try:
            if not self.holds(name):
                raise ValueError("there is none")
            for path in folder.iterdir():
                if not path.is_dir() and not self._inside(path):
                    raise ValueError(f"{path.name} is no file, or leads out of {self.path}")
            size = (folder / _TASKS).stat().st_size
            if size > most:
                raise ValueError(f"{_TASKS} has {size} bytes; the pool has {most}")
            newcomer = read_newcomer(folder, shapes, name)
            Tasks.parse(newcomer.tasks)
        except (ValueError, OSError) as error:
            raise AdapterUnusable(f"{name}: {error}") from error
        return newcomer

    def _inside(self, path: Path) -> bool:
        """Whether a path is a file whose true place is in the folder."""
        try:
            return path.is_file() and path.resolve(strict=True).is_relative_to(self.path)
        except (OSError, RuntimeError):  # gone, or links in a circle
            return False
