"""A RocksDB with small buffers and a synced log, under a few calls that raise this project's errors.

RocksDB calls hold Python's GIL while they run, syncs included: keep values small, and call from threads,
never from an event loop. After a failed write (a full disk) RocksDB refuses further ones: the database is
opened again then, at most once a second, and not before there is room. Until then it can be read.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from kvcommons.errors import DataLoss, StoreUnavailable
from services.kvstore.ballast import Ballast

log = logging.getLogger(__name__)

_MIB = 1 << 20
_REOPEN_PAUSE_S = 1.0
_REOPEN_BYTES = 1 << 20  # of room: new logs, a manifest, and what was in memory

Put = tuple[str, bytes, bytes | None]  # family, key, value; None deletes

# What RocksDB says of files that are damaged or gone, and not of a disk that is full or away for now.
_DAMAGE = ("Corruption:", "No such file or directory")


class DamagedDatabase(DataLoss):
    """What lies on disk is not what was written: opening it again would not help."""


class Table(Protocol):
    """Column families of small values, with atomic batches. Thread-safe. Raises StoreUnavailable."""

    def get(self, family: str, key: bytes) -> bytes | None: ...

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def items(
        self, family: str, start: bytes = b"", prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]: ...

    def write(self, puts: Sequence[Put], *, sync: bool = True) -> None: ...

    def close(self) -> None: ...


class RecoverableTable(Table, Protocol):
    """A table that can find out whether a write that failed is there."""

    def settle(self) -> None:
        """Resolves the last write that failed: reads after this see whether it is there. Raises
        StoreUnavailable while that cannot be known."""


class Database:
    """A table in RocksDB."""

    def __init__(self, path: Path, families: Sequence[str], ballast: Ballast | None = None) -> None:
        """`ballast` is thrown off where there is no room to write."""
        self._path = path
        self._ballast = ballast
        self._families = families
        self._lock = threading.Lock()
        self._cache = Cache(4 * _MIB)
        self._reopen_after: float | None = None  # monotonic; set when the open database is broken
        self._handles: dict[str, Rdict] = {}
        if _headless(path):
            raise DamagedDatabase(f"the database {path} is damaged: it has logs or tables and no CURRENT")
        try:
            self._open()
        except Exception as error:
            if any(sign in str(error) for sign in _DAMAGE):
                raise DamagedDatabase(f"the database {path} is damaged: {error}") from error
            raise StoreUnavailable(f"the database {path} cannot be opened: {error}") from error

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value, or None."""
        return self.get_many(family, [key])[0]

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, None for each that is not there."""
        if not keys:
            return []
        try:
            return list(self._handle(family).get(list(keys)) or ())
        except StoreUnavailable:
            raise
        except Exception as error:
            raise StoreUnavailable(f"reading from {self._path} failed: {error}") from error

    def items(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys from `start` on that begin with `prefix`, in order. Raises DamagedDatabase."""
        try:
            yield from scan(self._handle(family), start, prefix)
        except StoreUnavailable:
            raise
        except Exception as error:
            if "Corruption:" in str(error):
                raise DamagedDatabase(f"the database {self._path} is damaged: {error}") from error
            raise StoreUnavailable(f"reading from {self._path} failed: {error}") from error

    def write(self, puts: Sequence[Put], *, sync: bool = True) -> None:
        """One atomic batch; durable when it returns if `sync`.

        After an error the batch may be there or not.
        """
        options = WriteOptions()
        options.sync = sync
        with self._lock:
            self._recover()
            batch = WriteBatch(raw_mode=True)
            for family, key, value in puts:
                if value is None:
                    batch.delete(key, self._columns[family])
                else:
                    batch.put(key, value, self._columns[family])
            try:
                self._rdict.write(batch, options)
            except Exception as error:
                self._reopen_after = time.monotonic() + _REOPEN_PAUSE_S
                raise StoreUnavailable(
                    f"writing to {self._path} failed: {error}; if the disk is full, make room on it"
                ) from error

    def settle(self) -> None:
        with self._lock:
            self._recover()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _handle(self, family: str) -> Rdict:
        if not self._handles:
            with self._lock:
                self._recover()
        handle = self._handles.get(family)
        if handle is None:
            raise StoreUnavailable(f"the database {self._path} is closed")
        return handle

    def _recover(self) -> None:
        """Opens the database again after a failed write."""
        if self._reopen_after is None:
            return
        if time.monotonic() < self._reopen_after:
            raise StoreUnavailable(f"the database {self._path} failed a moment ago; it is tried again soon")
        try:
            self._make_room()  # once closed on a full disk, it could not even be read
            self._close()
            self._open()
        except Exception as error:
            self._reopen_after = time.monotonic() + _REOPEN_PAUSE_S
            raise StoreUnavailable(
                f"the database {self._path} cannot be opened again: {error}; if the disk is full, "
                "make room on it"
            ) from error
        self._reopen_after = None
        log.warning("the database %s was opened again after a failed write", self._path)

    def _make_room(self) -> None:
        """For the database to be opened again. Raises OSError."""
        try:
            self._check_room()
        except OSError:
            if self._ballast is None or not self._ballast.throw_off():
                raise
            self._check_room()

    def _check_room(self) -> None:
        with tempfile.TemporaryFile(dir=self._path) as file:
            os.posix_fallocate(file.fileno(), 0, _REOPEN_BYTES)

    def _open(self) -> None:
        options = self._options()
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_paranoid_checks(True)
        options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
        # What is in the log when the process dies is written once more at the next start, on a full disk too.
        options.set_max_total_wal_size(8 * _MIB)
        options.set_manifest_preallocation_size(_MIB // 16)
        options.set_max_background_jobs(2)
        options.set_max_open_files(128)
        options.set_keep_log_file_num(2)
        options.set_stats_dump_period_sec(0)
        families = {name: self._options() for name in self._families}
        self._rdict = Rdict(str(self._path), options, families)
        self._handles = {name: self._rdict.get_column_family(name) for name in self._families}
        self._columns = {name: self._rdict.get_column_family_handle(name) for name in self._families}

    def _options(self) -> Options:
        options = Options(raw_mode=True)
        options.set_write_buffer_size(4 * _MIB)
        options.set_max_write_buffer_number(2)
        options.set_compression_type(DBCompressionType.lz4())
        table = BlockBasedOptions()
        table.set_block_cache(self._cache)
        table.set_cache_index_and_filter_blocks(True)
        table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        return options

    def _close(self) -> None:
        handles = [*self._handles.values(), self._rdict] if self._handles else []
        self._handles = {}
        self._columns = {}  # these keep the database open, too
        for handle in handles:
            try:
                handle.close()
            except Exception as error:  # it flushes, which a full disk refuses; the log has everything
                log.warning("closing the database %s: %s", self._path, error)


def scan(handle: Rdict, start: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys of one family from `start` on that begin with `prefix`, in order."""
    options = ReadOptions()
    # Without a bound, a search for what is gone would go through all that was deleted behind it, too.
    if (end := end_of(prefix)) is not None:
        options.set_iterate_upper_bound(end)
    for key, value in handle.items(from_key=max(start, prefix), read_opt=options):
        assert isinstance(key, bytes)  # raw mode
        yield key, value


def end_of(prefix: bytes) -> bytes | None:
    """The first key behind all that begin with the prefix; None where nothing comes behind them."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else None


def _headless(path: Path) -> bool:
    """Whether RocksDB would begin a new database here, over one that lost the file which names its parts."""
    if (path / "CURRENT").exists():
        return False
    parts = [*path.glob("*.sst"), *path.glob("*.log")]
    return any(part.stat().st_size for part in parts)
