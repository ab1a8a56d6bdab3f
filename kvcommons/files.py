"""Files that are there whole or not at all, whatever dies meanwhile, and who may read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Of every process of a stack: sessions, KV, logs and sockets are nobody else's on the machine.
PRIVATE_UMASK = 0o077


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """In the place of what is there; durable, with its name, when it returns. `mode`: of a new file, less the
    umask. Raises OSError."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # of a write that was cut, with a mode of its own
    with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def make_private(folder: Path) -> None:
    """Nobody but its owner can look into it: one that was made before is closed. Raises OSError."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        folder.chmod(mode & 0o700)


def sync_folder(folder: Path) -> None:
    """The names in it are durable when it returns. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
