"""Room on the disk that KV leaves to others, and room that is held for when there is none left.

KV grows until only the *reserve* is free: the databases of index and sessions, logs, and whoever else uses
the file system live on that. The *ballast* is a file in it, as large as what it takes to delete something:
databases write before they give room back. It is thrown off where a database finds no room, and taken on
again later.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

# Of the file system, at most: on a small one the rest has to be of use, too.
_RESERVE_SHARE = 0.25
_BALLAST_SHARE = 0.5  # of the reserve
BALLAST_BYTES_MAX = 32 << 20


def reserve_bytes(folder: Path, wanted_bytes: int) -> int:
    """Of a folder's file system: what the settings say, and less on a small one."""
    found = os.statvfs(folder)
    return min(wanted_bytes, int(found.f_blocks * found.f_frsize * _RESERVE_SHARE))


def free_bytes(folder: Path) -> int:
    """What this process may still write on the folder's file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Ballast:
    """A file that only takes room. Any thread."""

    def __init__(self, path: Path, reserve_bytes: int) -> None:
        """`reserve_bytes`: of the file system, the ballast included. 0: no ballast."""
        self.size_bytes = min(BALLAST_BYTES_MAX, int(reserve_bytes * _BALLAST_SHARE))
        self._path = path
        self._lock = threading.Lock()

    @property
    def held(self) -> bool:
        return self._path.exists()

    def take_on(self) -> bool:
        """Whether it is held now. Nothing stays behind where it cannot be."""
        with self._lock:
            if self.held or not self.size_bytes:
                return self.held
            fresh = self._path.with_suffix(".new")
            try:
                with fresh.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, self.size_bytes)
                fresh.replace(self._path)
            except OSError as error:
                fresh.unlink(missing_ok=True)
                log.debug("no ballast: %s", error)
            return self.held

    def throw_off(self) -> bool:
        """Whether that gave room."""
        with self._lock:
            if not self.held:
                return False
            self._path.unlink()
        log.warning("the disk is full: the ballast was thrown off, so that something can be deleted")
        return True


class DiskReserve:
    """How far KV may grow on a disk, and when it has to shrink: turns cannot be committed without room, and
    KV can be computed again."""

    def __init__(self, size_bytes: int = 0, ballast: Ballast | None = None) -> None:
        """`size_bytes`: what KV leaves free, the ballast included."""
        self.ballast = ballast
        self._size_bytes = size_bytes
        self._short = False

    def growth_bytes(self, free_bytes: int) -> int:
        """Below 0: by how much KV has to shrink. Takes the ballast on again where there is room for it."""
        room_bytes = free_bytes - self._size_bytes
        if self.ballast is not None:
            room_bytes += self.ballast.size_bytes if self.ballast.held else 0
            if room_bytes >= 0:
                self.ballast.take_on()
        short = room_bytes < 0
        if short and not self._short:
            log.warning(
                "less than the reserve is free on the disk: KV gives room back", extra={"free": free_bytes}
            )
        self._short = short
        return room_bytes
