"""Which sessions name which blocks: so that the blocks of a deleted session go, but for those others share.

One empty value for each pair, key = block identity (32 bytes), then the session's key; written in the batch
that changes the session. docs/formats/session-record.md has the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.database import Put, Table

USES = "uses"
_META = "meta"
_COMPLETE_KEY = b"uses"
_BATCH_MAX = 10_000


class BlockUses:
    """`unnamed` is called with the blocks of a model that no session names any more. Raises
    StoreUnavailable."""

    def __init__(self, table: Table, unnamed: Callable[[bytes, Sequence[bytes]], None]) -> None:
        self._table = table
        self._unnamed = unnamed

    def changes(self, key: bytes, before: Sequence[bytes], after: Sequence[bytes]) -> list[Put]:
        """What to write as a session goes over from one list of blocks to another."""
        old, new = set(before), set(after)
        puts: list[Put] = [(USES, block_id + key, b"") for block_id in after if block_id not in old]
        puts += [(USES, block_id + key, None) for block_id in before if block_id not in new]
        return puts

    def released(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        """A session that named these blocks is gone, durably."""
        dead = [b for b in block_ids if next(self._table.items(USES, prefix=b), None) is None]
        if dead:
            self._unnamed(model, dead)

    def migrate(self, records: Iterator[tuple[bytes, pb.SessionRecord]]) -> None:
        """Once: a folder of before there were uses gets those of all its sessions."""
        if self._table.get(_META, _COMPLETE_KEY) is not None:
            return
        puts: list[Put] = []
        for key, record in records:
            puts += self.changes(key, [], record.block_ids)
            if len(puts) > _BATCH_MAX:
                self._table.write(puts)
                puts = []
        self._table.write([*puts, (_META, _COMPLETE_KEY, b"\1")])
