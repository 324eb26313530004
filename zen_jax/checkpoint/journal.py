"""A file of records that outlives the process that writes it, whenever that dies."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """JSON objects, one a line, each complete or not there.

    A record is appended by one write, so a process that is killed leaves at most a torn last line.
    After a loss of power more may be missing; what a record says of other files has to be checked.
    """

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """The records in order, up to the first line that is not whole."""
        records: list[dict[str, Any]] = []
        if not self._path.is_file():
            return records
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                break
            records.append(record)
        return records

    def start(self, records: list[dict[str, Any]]) -> None:
        """Begins anew with some records, in place of all that was there."""
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(b"".join(_line(record) for record in records))
        os.replace(fresh, self._path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        handle = os.open(self._path, flags, 0o644)
        line = _line(record)
        try:
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        finally:
            os.close(handle)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
