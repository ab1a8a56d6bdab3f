"""The data folder: one process at a time, one format.

<data>/lock        held (flock) by the process that uses the folder
<data>/format      "kvcommons-kvstore 1"
<data>/shard       what the folder is called, where the settings do not say
<data>/slabs/      slab files
<data>/index/      RocksDB: block index
<data>/index.damaged/  the last one that could not be read, for whoever wants to know why
<data>/sessions/   RocksDB: session records and turn leases
<data>/ballast     takes room only (ballast.py)
<data>/sessions.mark   how far the sessions had come (mark.py)
<data>/records.place   where the stack's session records lie (place.py)
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from pathlib import Path

from kvcommons.errors import Conflict, DataLoss, StoreUnavailable
from kvcommons.files import make_private, write_whole
from services.kvstore.ballast import Ballast, free_bytes

log = logging.getLogger(__name__)

FORMAT = "kvcommons-kvstore 1"


class UnknownFormat(DataLoss):
    """What lies on disk was written by another version: it is refused, not guessed at."""


def folder_name(root: Path, given: str) -> str:
    """What a data folder is called: as the settings say, or drawn at its first start and kept in it.

    Raises StoreUnavailable.
    """
    if given:
        return given
    path = root / "shard"
    try:
        if not path.exists():
            write_whole(path, f"{secrets.token_hex(6)}\n".encode())
        return path.read_text().strip()
    except OSError as error:
        raise StoreUnavailable(f"the folder's name in {path} cannot be kept: {error}") from error


class DataFolder:
    """Holds the folder's lock from construction to `close`; the kernel drops it when the process dies.

    Raises Conflict where another process has it, UnknownFormat where another version wrote it,
    StoreUnavailable where it cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.slabs = root / "slabs"
        self.index = root / "index"
        self.sessions = root / "sessions"
        self.mark = root / "sessions.mark"
        self.ballast = root / "ballast"
        self.clock = root / "clock"
        self.place = root / "records.place"
        try:
            root.mkdir(parents=True, exist_ok=True)
            make_private(root)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"the data folder {root} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise Conflict(
                f"the data folder {root} is in use by another process: stop that one, or use another folder"
            ) from error
        try:
            self._check_format(root / "format")
        except (UnknownFormat, StoreUnavailable):
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def make_room(self, ballast: Ballast, needed_bytes: int) -> None:
        """Before anything is opened: databases write when they are opened, and a full disk would not let
        them.

        First the ballast goes, then slab files, the one that was not written for longest first: their blocks
        can be computed again. Raises StoreUnavailable where that is not enough."""
        root = self.ballast.parent
        if free_bytes(root) >= needed_bytes:
            return
        ballast.throw_off()
        slabs = sorted(self.slabs.glob("slab-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        while free_bytes(root) < needed_bytes and slabs:
            log.warning(
                "the disk is full: slab file %s is given up, its blocks will be computed again", slabs[-1]
            )
            slabs.pop().unlink()
        if (free := free_bytes(root)) < needed_bytes:
            raise StoreUnavailable(
                f"the disk of {root} is full: {free} bytes are free, and to open the sessions takes "
                f"{needed_bytes}; nothing of the kvstore is left to give up, so make room on the disk"
            )

    def set_index_aside(self) -> None:
        """The next index is a new one, and so are the slab files: those that no index names are deleted.

        Raises OSError.
        """
        aside = self.index.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self.index.rename(aside)

    @staticmethod
    def _check_format(path: Path) -> None:
        try:
            if not path.exists():
                write_whole(path, f"{FORMAT}\n".encode())
            found = path.read_text().strip()
        except OSError as error:
            raise StoreUnavailable(f"the data folder {path.parent} cannot be used: {error}") from error
        if found != FORMAT:
            raise UnknownFormat(
                f"{path.parent} was written in format {found!r}; this version of kvcommons reads {FORMAT!r}: "
                "use the version that wrote it, or another data folder"
            )
