"""Whether a file has changed: what was written to it, what took its place, who may read it."""

from pathlib import Path

Mark = tuple[int, int, int, int]


def mark(path: Path) -> Mark | None:
    """Changes whenever a file does, its mode included; None where there is no file to be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
