"""How far the sessions had come, kept outside their database, so that one which was cut off is noticed.

RocksDB cannot tell a log whose end was lost from one whose last write a crash cut off, nor a database that is
gone from one that never was. Both would open, with committed turns missing and no word of it.

<data>/sessions.mark has one line, `step` and 20 decimal digits: the latest step (see `IntegrityTable`) that
was durable in the database when it was written. It is never ahead of the database. After the death of the
process it is not behind either; after a loss of power it may be, by what `sync` had not seen yet."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvcommons.errors import DataLoss
from kvcommons.files import write_whole

_DIGITS = 20
_WORD = b"step "


class Mark:
    """Any thread. `check`, then `begin`, then any number of `note` and `sync`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._noted = 0
        self._behind = False  # a note did not reach the file
        self._synced = 0

    def check(self, step: int, *, whole: bool) -> None:
        """Raises DataLoss where the sessions have come less far than they had, or are not whole; OSError."""
        try:
            line = self._path.read_bytes()
        except FileNotFoundError:
            return  # a new folder, or somebody wants to go on with what is left
        word, digits = line[: len(_WORD)], line[len(_WORD) : len(_WORD) + _DIGITS]
        if word != _WORD or not digits.isdigit():
            return  # of before there was an integrity table
        was = f"had come to step {int(digits)} and is at {step}" if step < int(digits) else "is not whole"
        if step < int(digits) or not whole:
            raise DataLoss(
                f"the database of sessions {self._path.with_suffix('')} {was}: turns that were committed are "
                f"missing. Restore it from a backup, or delete {self._path} to go on with what is left"
            )

    def begin(self, step: int) -> None:
        """Makes the file, durable with its name when it returns. Raises OSError."""
        write_whole(self._path, _line(step))
        with self._lock:
            self._close()
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            self._noted = self._synced = step

    def note(self, step: int) -> None:
        """This step is durable. Costs no wait for the disk; what fails is tried again by `sync`."""
        with self._lock:
            self._noted = step
            try:
                self._write()
                self._behind = False
            except OSError:
                self._behind = True

    def sync(self) -> None:
        """What was noted is durable when it returns. Raises OSError."""
        with self._lock:
            noted, descriptor = self._noted, self._descriptor
            if noted == self._synced or descriptor is None:
                return
            if self._behind:
                self._write()
                self._behind = False
            os.fdatasync(descriptor)  # of one page: nobody waits long for the lock
            self._synced = noted

    def close(self) -> None:
        with self._lock:
            self._close()

    def _write(self) -> None:
        if self._descriptor is not None:
            os.pwrite(self._descriptor, _line(self._noted), 0)  # within one sector: never torn

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _line(step: int) -> bytes:
    return _WORD + f"{step:0{_DIGITS}d}\n".encode()
