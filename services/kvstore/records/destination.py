"""Where session records are moved to: a database, or another kvstore's folder.

A session is one step there, and one that is there at its version or a later one is left as it is. So a move
that was killed goes on where it was, and none undoes what was done since.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from kvcommons.errors import InvalidInput
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore import session as rules
from services.kvstore.families import LEASES, RECORDS, STAMPS
from services.kvstore.folder import DataFolder
from services.kvstore.integrity import open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.sessions import open_sessions, puts_of
from services.kvstore.uses import BlockUses


class Destination(Protocol):
    async def put(self, record: pb.SessionRecord) -> bool:
        """Whether the record was written: not if the session is there at this version or a later one, or if
        it is another one, which the record does not go on from. Durable when it returns."""

    async def get(self, tenant: str, session_id: str) -> pb.SessionRecord | None:
        """What is there, expired or not."""

    async def close(self) -> None: ...


def goes_on_from(later: pb.SessionRecord, earlier: pb.SessionRecord) -> bool:
    """Whether all that the earlier record has is in the later one, too."""
    return earlier.version <= later.version and later.tokens[: len(earlier.tokens)] == earlier.tokens


class FolderDestination:
    """The folder of a kvstore that was always alone, or a new one. Holds its lock until `close`.

    Raises what `SourceFolder` does, and InvalidInput where the folder has something else in it.
    """

    def __init__(self, root: Path) -> None:
        if root.is_dir() and any(root.iterdir()) and not (root / "format").is_file():
            raise InvalidInput(f"{root} is not empty, and no kvstore's folder: name another one", param="to")
        with ExitStack() as opened:
            folder = DataFolder(root)
            opened.callback(folder.close)
            database = open_sessions(folder.sessions)
            opened.callback(database.close)
            if next(database.items(STAMPS), None) is not None:
                raise InvalidInput(f"{root} was a shard's folder itself: name another one", param="to")
            self._table = open_integrity_table(database, folder.sessions)
            self._mark = Mark(folder.mark)
            self._table.begin(self._mark)
            self._uses = BlockUses(self._table, lambda model, block_ids: None)
            self._uses.migrate((key, rules.decode_record(value)) for key, value in self._table.items(RECORDS))
            self._close = opened.pop_all().close

    async def put(self, record: pb.SessionRecord) -> bool:
        key = session_key(record.tenant, record.session_id)
        there = await self.get(record.tenant, record.session_id)
        if there is not None and (there.version >= record.version or not goes_on_from(record, there)):
            return False
        before = there.block_ids if there is not None else ()
        uses = self._uses.changes(key, before, record.block_ids)
        self._table.write([*puts_of(record), (LEASES, key, None), *uses])
        return True

    async def get(self, tenant: str, session_id: str) -> pb.SessionRecord | None:
        value = self._table.get(RECORDS, session_key(tenant, session_id))
        return rules.decode_record(value) if value is not None else None

    async def close(self) -> None:
        self._mark.sync()
        self._mark.close()
        self._close()
