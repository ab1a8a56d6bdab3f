"""How far the sessions had come, kept outside their database, so that one which was cut off is noticed.

RocksDB cannot tell a log whose end was lost from one whose last write a crash cut off, nor a database that is
gone from one that never was. Both would open, with committed turns missing and no word of it.

<data>/sessions.mark has one line, the decimal number of the latest step (see `Sessions.step`) that was
durable when it was written. It may lag behind the database by a second or two, and is never ahead of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvcommons.errors import DataLoss


class Mark:
    """Raises OSError where the file cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0

    def check(self, step: int) -> None:
        """Raises DataLoss where the sessions have come less far than they had."""
        try:
            text = self._path.read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return
        if not text.isdigit():
            return  # cut off by a crash of the machine: it is written anew
        if step < int(text):
            raise DataLoss(
                f"the database of sessions beside {self._path} has come to step {step} only, and was at "
                f"{text} before: turns that were committed are missing. Restore it from a backup, or delete "
                f"{self._path} to go on with the sessions that are left"
            )

    def write(self, step: int) -> None:
        """Durable when it returns."""
        if step == self._written:
            return
        fresh = self._path.with_suffix(".new")
        with fresh.open("w", encoding="ascii") as file:
            file.write(f"{step}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        self._written = step
