"""The data directory of a stack, held by one stack at a time, and its short-lived runtime directory."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devstack.plan import Place
from kvcommons.errors import Conflict, InvalidInput
from kvcommons.files import make_private

# A Unix socket's path has 107 bytes; "attention_pool-64.d" and a margin have to fit behind the directory.
RUNTIME_PATH_BYTES_MAX = 80
RECORD = "stack.json"


class Claim:
    """Holds a data directory for this process; the lock goes with the process, however that ends.

    Raises Conflict while another stack holds it, naming its process, and InvalidInput where it cannot be
    written.
    """

    def __init__(self, data: Path) -> None:
        data = data.expanduser().resolve()
        try:
            data.mkdir(parents=True, exist_ok=True)
            make_private(data)
            # Never inherited: a child that outlives us by a moment must not keep the directory.
            self._lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(
                f"the data directory {data} cannot be used: {error.strerror}", param="data"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise Conflict(
                f"{data} is in use by another stack (process {holder}): stop it, or choose another --data",
                param="data",
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
            self._remove_stale_runtime(data)
            self.place = Place(data=data, runtime=_new_runtime())
            self.place.logs.mkdir(exist_ok=True)
            make_private(self.place.logs)
            _make_secret(self.place.secret_file)
            self.record({})
        except OSError as error:
            os.close(self._lock)
            raise InvalidInput(
                f"the data directory {data} cannot be written: {error.strerror}; "
                "make room on its disk, or choose another --data",
                param="data",
            ) from error

    def record(self, facts: Mapping[str, Any]) -> None:
        """Notes facts about the running stack (address, processes) where tools and tests find them."""
        path = self.place.data / RECORD
        text = json.dumps({"pid": os.getpid(), "runtime": str(self.place.runtime), **facts})
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(path)

    def release(self) -> None:
        _remove_runtime(self.place)
        (self.place.data / RECORD).unlink(missing_ok=True)
        os.close(self._lock)

    @staticmethod
    def _remove_stale_runtime(data: Path) -> None:
        """A stack that was killed left its sockets behind; nobody else uses them now that the lock is
        ours."""
        try:
            stale = Path(json.loads((data / RECORD).read_text())["runtime"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if stale.name.startswith("kvc-"):
            _remove_runtime(Place(data=data, runtime=stale))


def _remove_runtime(place: Place) -> None:
    for folder in (place.runtime, place.postgres_sockets):
        shutil.rmtree(folder, ignore_errors=True)


def _new_runtime() -> Path:
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) + len("/kvc-12345678") > RUNTIME_PATH_BYTES_MAX:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="kvc-", dir=base))


def _make_secret(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
