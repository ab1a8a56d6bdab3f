"""Under the sessions where there are several shards: a table that stamps every change of a session.

Two shards compare stamps instead of records; of two states the one with the higher stamp is newer. A session
that is deleted leaves its stamp: the tombstone. A shard that never had company writes none of it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcommons.errors import WrongShard
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView, decode_view, encode_view
from services.kvstore.clock import Clock
from services.kvstore.database import Put, Table
from services.kvstore.families import HEADS, LEASES, META, RECORDS, STAMPS
from services.kvstore.folder import UnknownFormat

STAMP_FORMAT = 1

_VIEW_KEY = b"view"
_STAMPING_KEY = b"stamping"
_REVISION_KEY = b"revision"
_SYNCED_KEY = b"synced"
_ROW = struct.Struct("<BQQq")  # format, epoch, revision, changed ms
_NUMBER = struct.Struct("<Q")


class Stamp(NamedTuple):
    epoch: int
    revision: int


UNSTAMPED = Stamp(0, 0)


class StampedTable:
    """A `Table`. The caller's lock is held around each call that changes something.

    Writes to sessions whose home is another shard are refused with WrongShard: what a deposed shard still
    does must not look like what its successor does.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._now_ms = clock.now_ms
        self.name = ""  # of this shard; set once it is known
        stored = table.get(META, _VIEW_KEY)
        self.view: ShardView | None = decode_view(pb.ShardView.FromString(stored)) if stored else None
        self.synced_epoch = self._number(_SYNCED_KEY)
        self.revision = self._number(_REVISION_KEY)
        self.removals: Counter[bytes] = Counter()  # of records, for as long as their tombstones stay
        self.touched: set[bytes] = set()  # changed here; the others may not know of it yet
        self._stamping = table.get(META, _STAMPING_KEY) is not None

    def adopt(self, view: ShardView) -> None:
        """Durable when it returns: no earlier view is ever followed again."""
        stamping = self._stamping or not view.alone or view.serving != (self.name,)
        puts: list[Put] = [(META, _VIEW_KEY, encode_view(view).SerializeToString(deterministic=True))]
        if stamping:
            puts.append((META, _STAMPING_KEY, b"\1"))
        self._table.write(puts)
        self.view, self._stamping = view, stamping

    def synced(self, epoch: int) -> None:
        """In this epoch, all others have what they need from here. Durable when it returns."""
        self._table.write([(META, _SYNCED_KEY, _NUMBER.pack(epoch))])
        self.synced_epoch = epoch

    def is_home(self, key: bytes) -> bool:
        return self.view is None or self.view.home(key) == self.name

    def stamp(self, key: bytes) -> Stamp | None:
        """None: nothing was ever heard of the session, or nothing is left of it."""
        row = self._table.get(STAMPS, key)
        if row is not None:
            return decode_row(row)[0]
        if self._table.get(HEADS, key) is None and self._table.get(LEASES, key) is None:
            return None
        return UNSTAMPED

    def take(self, key: bytes, stamp: Stamp, puts: Sequence[Put]) -> None:
        """Another shard's change, with its stamp."""
        self._table.write([*puts, (STAMPS, key, encode_row(stamp, self._now_ms()))])

    def drop(self, puts: Sequence[Put]) -> None:
        """What is not this shard's to keep: no tombstone is left of it."""
        self._table.write(puts)

    # ---- as a table

    def get(self, family: str, key: bytes) -> bytes | None:
        return self._table.get(family, key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._table.get_many(family, keys)

    def items(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return self._table.items(family, start, prefix)

    def write(self, puts: Sequence[Put], *, sync: bool = True) -> None:
        keys = {key for family, key, _ in puts if family in (RECORDS, LEASES)}
        for key in keys:
            if not self.is_home(key):
                raise WrongShard("another shard has taken this session over: ask that one")
        if not keys or not self._stamping:
            self._table.write(puts, sync=sync)
            return
        assert self.view is not None
        self.revision += 1  # never used twice, even if the write fails: it may be in the log all the same
        row = encode_row(Stamp(self.view.epoch, self.revision), self._now_ms())
        for family, key, value in puts:
            if family == RECORDS and value is None:
                self.removals[key] += 1
        # Before the write: where it fails, the change may be there after all.
        self.touched |= keys
        # Synced, whatever it is: what another shard has heard of must not be lost here.
        stamps: list[Put] = [(STAMPS, key, row) for key in keys]
        self._table.write([*puts, *stamps, (META, _REVISION_KEY, _NUMBER.pack(self.revision))])

    def close(self) -> None:
        self._table.close()

    def _number(self, key: bytes) -> int:
        stored = self._table.get(META, key)
        return int(_NUMBER.unpack(stored)[0]) if stored else 0


def encode_row(stamp: Stamp, changed_ms: int) -> bytes:
    return _ROW.pack(STAMP_FORMAT, stamp.epoch, stamp.revision, changed_ms)


def decode_row(row: bytes) -> tuple[Stamp, int]:
    """And when the change was written here, in ms since 1970. Raises UnknownFormat."""
    if len(row) != _ROW.size or row[0] != STAMP_FORMAT:
        raise UnknownFormat(
            f"session stamp of an unknown format; this version of kvcommons reads {STAMP_FORMAT}"
        )
    _, epoch, revision, changed_ms = _ROW.unpack(row)
    return Stamp(epoch, revision), changed_ms
