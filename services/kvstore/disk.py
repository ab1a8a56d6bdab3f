"""The boundary to the file system: a folder of preallocated files that are read and written in whole pages.

I/O goes past the page cache (O_DIRECT) where the file system allows it. Every method blocks and raises
OSError; calls on different parts of a file may run at once on several threads. `SlabFiles` decides what lies
in the files; the simulation puts a disk of its own here, one that tears writes and loses power.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvcommons.files import sync_folder
from services.kvstore.ballast import free_bytes
from services.kvstore.tier import PAGE_BYTES

log = logging.getLogger(__name__)

_GATHER_MAX = 512  # buffers in one call; below IOV_MAX
_KEEP_SIZE = 0x01  # of fallocate(2)
_PUNCH_HOLE = 0x02


class DiskFile(Protocol):
    """One open file. Offsets, lengths and buffers are whole pages."""

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fills the buffers. A file that ends early is EIO."""

    def write(self, offset: int, payload: Sequence[memoryview]) -> None:
        """Durable after `sync`."""

    def sync(self) -> None:
        """What was written is durable when it returns; after an error nobody knows."""

    def punch(self, offset: int, length: int) -> bool:
        """Gives the room behind a part of the file back.

        False: this file system does not do that.
        """

    def close(self) -> None: ...


class Disk(Protocol):
    """One folder of such files."""

    def free_bytes(self) -> int:
        """What can still be written."""

    def names(self) -> list[str]:
        """Of the files that are there, in order."""

    def head(self, name: str, length: int) -> tuple[bytes, int]:
        """The first bytes of a file, and its size."""

    def open(self, name: str) -> DiskFile: ...

    def create(self, name: str, head: bytes, size: int) -> DiskFile:
        """A sparse file of `size` bytes, durable with its name; nothing stays behind after an error."""

    def remove(self, name: str) -> None:
        """Deletes a file; one that is not there is no error."""


class LocalDisk:
    """A folder of the machine's file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("probe-*"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        self._flags = os.O_RDWR | os.O_CLOEXEC
        if _probe_direct(folder):
            self._flags |= os.O_DIRECT
        else:
            log.warning(
                "the file system of %s refuses O_DIRECT: slab files go through the page cache, "
                "which costs memory bandwidth and memory; put `data` on a local disk (ext4, xfs) to avoid it",
                folder,
            )
        self._punch = _fallocate()

    def free_bytes(self) -> int:
        return free_bytes(self._folder)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def head(self, name: str, length: int) -> tuple[bytes, int]:
        path = self._folder / name
        with path.open("rb") as file:
            return file.read(length), path.stat().st_size

    def open(self, name: str) -> LocalFile:
        return LocalFile(os.open(self._folder / name, self._flags), self._punch)

    def create(self, name: str, head: bytes, size: int) -> LocalFile:
        path = self._folder / name
        try:
            with path.open("xb") as file:
                file.write(head)
                file.truncate(size)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self._folder)
            return self.open(name)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class LocalFile:
    """A file of the machine's file system."""

    def __init__(self, descriptor: int, punch: Callable[[int, int, int], bool]) -> None:
        self._descriptor = descriptor
        self._punch = punch

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        _transfer(os.preadv, self._descriptor, into, offset)

    def write(self, offset: int, payload: Sequence[memoryview]) -> None:
        _transfer(os.pwritev, self._descriptor, payload, offset)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def punch(self, offset: int, length: int) -> bool:
        return self._punch(self._descriptor, offset, length)

    def close(self) -> None:
        os.close(self._descriptor)


def _transfer(call, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:  # type: ignore[no-untyped-def]
    """preadv or pwritev until all buffers are through."""
    left = list(buffers)
    while left:
        moved = call(descriptor, left[:_GATHER_MAX], offset)
        if moved <= 0:
            raise OSError(errno.EIO, "the slab file ends before the slot does")
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]


def _fallocate() -> Callable[[int, int, int], bool]:
    """Punches holes by fallocate(2), which Python's `os` does not have."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return lambda descriptor, offset, length: False
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def punch(descriptor: int, offset: int, length: int) -> bool:
        if call(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length) == 0:
            return True
        error = ctypes.get_errno()
        if error in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise OSError(error, os.strerror(error))

    return punch


def _probe_direct(folder: Path) -> bool:
    """Whether the file system takes O_DIRECT writes."""
    path = folder / f"probe-{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(descriptor, [page], 0)
        return True
    except OSError as error:
        return error.errno == errno.ENOSPC  # full, but willing
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
