"""Session records in the folders of kvstores that are stopped, which are read and never written.

A kvstore that was one of several, a *shard*, kept copies of others' sessions and stamped each change of a
session; so a session may lie in several folders in several states, and the one with the highest stamp is the
newest. A stamp without a record is the newest state, too: the session was deleted. A kvstore that was always
alone has no stamps. docs/formats/session-record.md has the bytes.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from rocksdict import AccessType, DBRecoveryMode, Options, Rdict

from kvcommons.errors import InvalidInput, StoreUnavailable
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore import session as rules
from services.kvstore.database import Put, scan
from services.kvstore.families import DOCUMENTS, HEADS, LEASES, META, RECORDS, STAMPS
from services.kvstore.folder import DataFolder, UnknownFormat
from services.kvstore.integrity import open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.turn_lease import names_in

STAMP_FORMAT = 1

_STAMP = struct.Struct("<BQQq")  # format, epoch, revision, when it was written (ms)


class ChangeStamp(NamedTuple):
    epoch: int
    revision: int


UNSTAMPED = ChangeStamp(0, 0)  # from before the kvstore had company


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerView:
    """Which shards served, by their names, as a folder knew it last. The highest epoch is the newest."""

    epoch: int
    serving: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSession:
    """A session's newest state. `disputed`: several have the same stamp and differ; this is the longest."""

    record: pb.SessionRecord
    disputed: bool


def decode_stamp(row: bytes) -> ChangeStamp:
    """Raises UnknownFormat."""
    if len(row) != _STAMP.size or row[0] != STAMP_FORMAT:
        raise UnknownFormat(
            f"session stamp of an unknown format; this version of kvcommons reads {STAMP_FORMAT}"
        )
    return ChangeStamp(*_STAMP.unpack(row)[1:3])


def folders_in(paths: Sequence[Path]) -> list[Path]:
    """The kvstores' folders: the paths themselves, or what lies in a stack's folder. Raises InvalidInput."""
    found: list[Path] = []
    for path in paths:
        folders = [path] if _is_folder(path) else sorted(filter(_is_folder, path.glob("*")))
        if not folders:
            raise InvalidInput(
                f"{path} is no kvstore's folder, and has none in it: name what `--data` of `kvcommons up` "
                "names, or what the setting `data` of each kvstore does",
                param="data",
            )
        found += [folder.resolve() for folder in folders]
    return list(dict.fromkeys(found))


def _is_folder(path: Path) -> bool:
    return (path / "format").is_file()


class SourceFolder:
    """One kvstore's folder. Holds its lock until `close`.

    Raises Conflict where a kvstore uses it, UnknownFormat where another version wrote it, DataLoss where not
    all is there that was committed, StoreUnavailable where it cannot be read.
    """

    def __init__(self, root: Path) -> None:
        with ExitStack() as opened:
            folder = DataFolder(root)
            opened.callback(folder.close)
            database = _ReadOnlyDatabase(folder.sessions)
            opened.callback(database.close)
            table = open_integrity_table(database, folder.sessions)
            Mark(folder.mark).check(table.step, whole=table.whole)
            self._table = database
            self._close = opened.pop_all().close
        self.name = (database.get(META, b"shard") or b"").decode()
        self.view = _decode_view(database.get(META, b"view"))

    def close(self) -> None:
        self._close()

    def stamps(self) -> Iterator[tuple[bytes, ChangeStamp]]:
        """Keys in their order, those of deleted sessions and of leases without a record among them."""
        families = [self._table.items(family) for family in (HEADS, LEASES, STAMPS)]
        for key, _ in itertools.groupby(map(itemgetter(0), heapq.merge(*families, key=itemgetter(0)))):
            row = self._table.get(STAMPS, key)
            yield key, decode_stamp(row) if row is not None else UNSTAMPED

    def documents(self) -> Iterator[bytes]:
        """Keys of sessions that a document was on its way into."""
        return (key for key, _ in self._table.items(DOCUMENTS))

    def record(self, key: bytes) -> pb.SessionRecord | None:
        value = self._table.get(RECORDS, key)
        return rules.decode_record(value) if value is not None else None


class Source:
    """All folders of a stack. Raises what `SourceFolder` does, and InvalidInput where one is missing that has
    to be there, unless `without` names it."""

    def __init__(self, folders: Sequence[Path], without: Collection[str] = ()) -> None:
        with ExitStack() as opened:
            self._folders = []
            for path in folders:
                self._folders.append(SourceFolder(path))
                opened.callback(self._folders[-1].close)
            self._refuse_missing(without)
            self.close = opened.pop_all().close

    def sessions(self) -> Iterator[SourceSession]:
        """The newest state of each session that there is, in the order of their keys."""
        merged = heapq.merge(*(self._states(index) for index in range(len(self._folders))))
        for key, states in itertools.groupby(merged, key=itemgetter(0)):
            newest = self._newest(key, {index: stamp for _, index, stamp in states})
            if newest is not None:
                yield newest

    def documents(self) -> list[tuple[str, str]]:
        """Tenants and ids of sessions that a document was on its way into, which is not moved."""
        keys = {key for folder in self._folders for key in folder.documents()}
        return [names_in(key) for key in sorted(keys)]

    def _states(self, index: int) -> Iterator[tuple[bytes, int, ChangeStamp]]:
        return ((key, index, stamp) for key, stamp in self._folders[index].stamps())

    def _newest(self, key: bytes, stamps: Mapping[int, ChangeStamp]) -> SourceSession | None:
        highest = max(stamps.values())
        records = [self._folders[index].record(key) for index, stamp in stamps.items() if stamp == highest]
        longest = max(
            (record for record in records if record is not None),
            key=lambda record: (len(record.tokens), record.version),
            default=None,
        )
        if longest is None:
            return None
        return SourceSession(record=longest, disputed=any(record != longest for record in records))

    def _refuse_missing(self, without: Collection[str]) -> None:
        """A view's names are FOLDER.NAME, where NAME is the database's own."""
        views = [folder.view for folder in self._folders if folder.view is not None]
        if not views:
            return
        newest = max(views, key=lambda view: view.epoch)
        here = {folder.name for folder in self._folders}
        missing = [
            name for name in newest.serving if name.rpartition(".")[2] not in here and name not in without
        ]
        if missing:
            raise InvalidInput(
                f"the kvstores {', '.join(newest.serving)} served together, and the folders given lack "
                f"{', '.join(missing)}: name all folders with --data, or --without {missing[0]} where it is "
                "lost, to go on without what only it has",
                param="data",
            )


def _decode_view(value: bytes | None) -> FormerView | None:
    """From a message whose proto is gone: field 1 is the epoch, field 2 the names of who serves."""
    if value is None:
        return None
    unknown = UnknownFieldSet(Empty.FromString(value))
    fields = [unknown[index] for index in range(len(unknown))]
    epochs = [field.data for field in fields if field.field_number == 1]
    serving = tuple(field.data.decode() for field in fields if field.field_number == 2)
    return FormerView(epoch=epochs[0] if epochs else 0, serving=serving)


class _ReadOnlyDatabase:
    """A `RecoverableTable` over a RocksDB that stays as it is, its log too; empty where there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handles: dict[str, Rdict] = {}
        if not path.exists():
            return
        try:
            options = Options(raw_mode=True)
            options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
            families = [name for name in Rdict.list_cf(str(path), options) if name != "default"]
            self._rdict = Rdict(
                str(path),
                options,
                {name: Options(raw_mode=True) for name in families},
                AccessType.read_only(),
            )
            self._handles = {name: self._rdict.get_column_family(name) for name in families}
        except Exception as error:
            raise StoreUnavailable(f"the database {path} cannot be read: {error}") from error

    def get(self, family: str, key: bytes) -> bytes | None:
        return self.get_many(family, [key])[0]

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        handle = self._handles.get(family)
        if handle is None or not keys:
            return [None] * len(keys)
        try:
            return list(handle.get(list(keys)) or ())
        except Exception as error:
            raise StoreUnavailable(f"reading from {self._path} failed: {error}") from error

    def items(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        handle = self._handles.get(family)
        if handle is None:
            return
        try:
            yield from scan(handle, start, prefix)
        except Exception as error:
            raise StoreUnavailable(f"reading from {self._path} failed: {error}") from error

    def write(self, puts: Sequence[Put], *, sync: bool = True) -> None:
        raise StoreUnavailable(f"{self._path} is open for reading only")

    def settle(self) -> None:
        """Nothing is written, so no write fails."""

    def close(self) -> None:
        for handle in (*self._handles.values(), *([self._rdict] if self._handles else ())):
            handle.close()
        self._handles = {}
