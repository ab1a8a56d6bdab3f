"""A child's log on disk: JSON lines, bounded in size."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


class LogFile:
    """Appends lines to `path`; at `bytes_max` the file becomes `path`.old and a new one begins, so that at
    most twice that is kept. A disk that refuses (full, gone) costs lines, never the stack."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._file: BinaryIO | None = None
        self.lines_lost = 0

    def write(self, line: str) -> None:
        data = line.encode(errors="replace") + b"\n"
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            if self._file.tell() + len(data) > self._bytes_max and self._file.tell() > 0:
                self._file.close()
                self._path.replace(self._path.with_suffix(".old"))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data[: self._bytes_max])
        except OSError:
            self.lines_lost += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
