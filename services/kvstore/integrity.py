"""The integrity table: a table under the sessions that finds out at its start whether anything that was
written is missing.

RocksDB checks each record and each block that it reads. It still opens silently where the end of its manifest
or of one of its logs is gone, and goes on without the column families, files or batches that were named
there. So every batch carries a step number and a digest of all that the families hold after it: the exclusive
or of the hashes of (family, key, value). At the start everything is read once and compared with the digest,
which also finds blocks that went bad at rest. The step is compared with the mark, which lies outside the
database."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import xor
from pathlib import Path

import xxhash

from services.kvstore.database import DamagedDatabase, Put, RecoverableTable
from services.kvstore.families import HEADS, META, RECORDS, STAMPS
from services.kvstore.folder import UnknownFormat
from services.kvstore.mark import Mark

log = logging.getLogger(__name__)

# The families of the sessions: what was committed, how far it had come, and what other kvstores knew of it.
_FAMILIES = (RECORDS, HEADS, META, STAMPS)
_KEY = b"witness"  # bytes on disk keep the former name
_FORMAT = 2
_VALUE = struct.Struct("<BQ16s")  # format, step, digest
_VALUE_1 = struct.Struct("<Q16s")  # format 1 had no format byte and left the stamps out


class IntegrityTable:
    """A `Table` over the sessions', whose families stay whole or are found not to be.

    Raises DamagedDatabase, StoreUnavailable, UnknownFormat. Call `begin` before the first write.
    """

    def __init__(self, table: RecoverableTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._mark: Mark | None = None
        self._uncertain = False  # the last write failed: it may be there or not
        stored = table.get(META, _KEY)
        found = {family: self._survey(family) for family in _FAMILIES}
        self._digest = _combined(found.values())
        self._step, recorded, format_1 = _decode(stored) if stored else (0, None, False)
        self._recorded = recorded == self._digest and not format_1
        if format_1:
            found.pop(STAMPS, None)
        # None: a new database, or one from before there was an integrity table
        self.whole = recorded is None or recorded == _combined(found.values())

    @property
    def step(self) -> int:
        """Grows with every batch that changes the families."""
        return self._step

    def begin(self, mark: Mark) -> None:
        """Compares the table with its mark. Raises DataLoss where something is missing, and OSError."""
        mark.check(self._step, whole=self.whole)
        if not self.whole:
            log.error("the sessions are not whole; going on with what is left, as there is no mark")
        if not self._recorded:
            self._table.write([self._entry(self._step, self._digest)])
            self._recorded = True
        mark.begin(self._step)
        self._mark = mark

    # ---- as a table

    def get(self, family: str, key: bytes) -> bytes | None:
        return self._table.get(family, key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._table.get_many(family, keys)

    def items(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return self._table.items(family, start, prefix)

    def write(self, puts: Sequence[Put], *, sync: bool = True) -> None:
        """No key twice in one batch."""
        with self._lock:
            if self._uncertain:
                self._resolve()
            step, digest = self._step + 1, self._digest ^ self._change(puts)
            self._uncertain = True
            self._table.write([*puts, self._entry(step, digest)], sync=sync)
            self._uncertain = False
            self._step, self._digest = step, digest
            if sync and self._mark is not None:  # a mark must not be ahead of what a loss of power leaves
                self._mark.note(step)

    def close(self) -> None:
        self._table.close()

    # ---- within

    def _resolve(self) -> None:
        """Finds out whether the write that failed is there."""
        self._table.settle()
        stored = self._table.get(META, _KEY)
        self._step, self._digest, _ = _decode(stored) if stored else (0, 0, False)
        self._uncertain = False

    def _change(self, puts: Sequence[Put]) -> int:
        change = 0
        for family in _FAMILIES:
            new = {key: value for name, key, value in puts if name == family}
            old = self._table.get_many(family, list(new))
            for key, before in zip(new, old, strict=True):
                after = new[key]
                change ^= _hash(family, key, before) if before is not None else 0
                change ^= _hash(family, key, after) if after is not None else 0
        return change

    def _survey(self, family: str) -> int:
        return _combined(
            _hash(family, key, value)
            for key, value in self._table.items(family)
            if (family, key) != (META, _KEY)
        )

    def _entry(self, step: int, digest: int) -> Put:
        return META, _KEY, _VALUE.pack(_FORMAT, step, digest.to_bytes(16, "little"))


def open_integrity_table(table: RecoverableTable, path: Path) -> IntegrityTable:
    """The table of the database at `path`; it is closed where it is damaged."""
    try:
        return IntegrityTable(table)
    except UnknownFormat:
        table.close()
        raise
    except DamagedDatabase as error:
        table.close()
        raise damaged_sessions(error, path) from error


def damaged_sessions(error: DamagedDatabase, path: Path) -> DamagedDatabase:
    """The error of their database, with what to do."""
    return DamagedDatabase(
        f"{error.message}. It has the tokens of all sessions: restore it from a backup, or repair it; to "
        f"begin anew without any session, move {path} and {path}.mark away"
    )


def _decode(value: bytes) -> tuple[int, int, bool]:
    """Step, digest, and whether it is of format 1. Raises UnknownFormat."""
    format_1 = len(value) == _VALUE_1.size
    if not format_1 and (len(value) != _VALUE.size or value[0] != _FORMAT):
        raise UnknownFormat(
            f"integrity entry of an unknown format; this version of kvcommons reads 1 and {_FORMAT}"
        )
    step, digest = _VALUE_1.unpack(value) if format_1 else _VALUE.unpack(value)[1:]
    return step, int.from_bytes(digest, "little"), format_1


def _combined(digests: Iterable[int]) -> int:
    return reduce(xor, digests, 0)


def _hash(family: str, key: bytes, value: bytes) -> int:
    where = xxhash.xxh3_64_intdigest(family.encode() + b"\0" + key)
    return xxhash.xxh3_128_intdigest(value, seed=where)
