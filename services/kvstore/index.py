"""Which block lies where: the RocksDB index over the slab files. docs/formats/index-entry.md has the bytes.

An entry is written only once the block's payload is durable, and deleted before its slot is used again:
whatever the index names is whole on disk, at whatever moment the process was killed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from services.kvstore.ballast import Ballast
from services.kvstore.database import Database, Put, RecoverableTable
from services.kvstore.folder import UnknownFormat
from services.kvstore.tier import Slot

FORMAT = 1

# format, flags, layers, slab, slot, first index, generation, created ms, length of model, parent, tenant
_HEAD = struct.Struct("<BBHIIIQqHHH")
_EPOCH_KEY = b"epoch"
_COUNTER_BITS = 40
_BLOCKS = "blocks"
_META = "meta"

T = TypeVar("T")


class IndexEntry(NamedTuple):
    """All that is known of a stored block but its payload.

    `generation` is unique among all blocks ever stored in this folder. `parent` is empty at the beginning of
    a sequence; `first_index` is the block's place in the sequence it was first computed for.
    """

    model: bytes
    tenant: str
    parent: bytes
    first_index: int
    slot: Slot
    generation: int
    created_ms: int
    checksums: tuple[int, ...]


def encode_entry(entry: IndexEntry) -> bytes:
    tenant = entry.tenant.encode()
    head = _HEAD.pack(
        FORMAT,
        0,
        len(entry.checksums),
        entry.slot.region,
        entry.slot.place,
        entry.first_index,
        entry.generation,
        entry.created_ms,
        len(entry.model),
        len(entry.parent),
        len(tenant),
    )
    checksums = struct.pack(f"<{len(entry.checksums)}Q", *entry.checksums)
    return head + entry.model + entry.parent + tenant + checksums


class StoredCopy(NamedTuple):
    """What a reader has to know of an entry."""

    slot: Slot
    generation: int
    checksums: tuple[int, ...]


def _decode_head(value: bytes) -> tuple[int, ...]:
    """The fields of _HEAD. Raises as `decode_entry`."""
    if not value or value[0] != FORMAT:
        version = value[0] if value else "none"
        raise UnknownFormat(f"index entry of format {version}; this version of kvcommons reads {FORMAT}")
    if len(value) < _HEAD.size:
        raise ValueError("an index entry is cut off")
    head = _HEAD.unpack_from(value)
    if len(value) != _HEAD.size + sum(head[-3:]) + 8 * head[2]:
        raise ValueError("an index entry has a wrong length")
    return head


def decode_stored(value: bytes) -> StoredCopy:
    """Raises as `decode_entry`, of whose work it does a third."""
    _, _, layers, region, place, _, generation, *_ = _decode_head(value)
    checksums = struct.unpack_from(f"<{layers}Q", value, len(value) - 8 * layers)
    return StoredCopy(Slot(region, place), generation, checksums)


def decode_entry(value: bytes) -> IndexEntry:
    """Raises UnknownFormat for an entry that another version wrote, ValueError for one that is cut off."""
    _, _, layers, region, place, first, generation, created, models, parents, tenants = _decode_head(value)
    parent_at = _HEAD.size + models
    tenant_at = parent_at + parents
    return IndexEntry(
        model=value[_HEAD.size : parent_at],
        parent=value[parent_at:tenant_at],
        tenant=value[tenant_at : tenant_at + tenants].decode(),
        first_index=first,
        slot=Slot(region, place),
        generation=generation,
        created_ms=created,
        checksums=struct.unpack_from(f"<{layers}Q", value, tenant_at + tenants),
    )


def encode_key(model: bytes, block_id: bytes) -> bytes:
    return struct.pack("<H", len(model)) + model + block_id


def decode_key(key: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from("<H", key)
    return key[2 : 2 + length], key[2 + length :]


def open_index(path: Path, ballast: Ballast | None = None) -> Database:
    """The index's database. Raises StoreUnavailable, DamagedDatabase."""
    return Database(path, [_BLOCKS, _META], ballast)


class BlockIndex:
    """The index of one data folder. Blocks; thread-safe. Raises StoreUnavailable where RocksDB fails."""

    def __init__(self, table: RecoverableTable) -> None:
        self._table = table
        stored = self._table.get(_META, _EPOCH_KEY)
        epoch = (struct.unpack("<Q", stored)[0] if stored else 0) + 1
        self._table.write([(_META, _EPOCH_KEY, struct.pack("<Q", epoch))])
        # Unique over restarts: a condemnation from before one cannot hit what was written after it.
        self.first_generation = epoch << _COUNTER_BITS

    def get(self, model: bytes, block_id: bytes) -> IndexEntry | None:
        """The entry; None where there is none that can be read."""
        return _readable(self._table.get(_BLOCKS, encode_key(model, block_id)), decode_entry)

    def stored(self, model: bytes, block_ids: Sequence[bytes]) -> list[StoredCopy | None]:
        """Of many entries, as `get`."""
        values = self._table.get_many(_BLOCKS, [encode_key(model, block_id) for block_id in block_ids])
        return [_readable(value, decode_stored) for value in values]

    def scan(self) -> Iterator[tuple[bytes, bytes, IndexEntry | None]]:
        """(model, block id, entry) of all blocks; entry None where it is damaged. Raises UnknownFormat."""
        for key, value in self._table.items(_BLOCKS):
            model, block_id = decode_key(key)
            try:
                entry = decode_entry(value)
            except ValueError:
                yield model, block_id, None
                continue
            yield model, block_id, entry

    def add(self, entries: Sequence[tuple[bytes, IndexEntry]]) -> None:
        """Publishes blocks on disk, all or none, durable when it returns."""
        self._table.write(
            [(_BLOCKS, encode_key(entry.model, block_id), encode_entry(entry)) for block_id, entry in entries]
        )

    def remove(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Deletes the entries of (model, block id), durable when it returns."""
        deletions: list[Put] = [(_BLOCKS, encode_key(model, block_id), None) for model, block_id in blocks]
        self._table.write(deletions)

    def settle(self) -> None:
        """After a failed write: from now on what is read is what became of it."""
        self._table.settle()

    def close(self) -> None:
        self._table.close()


def _readable(value: bytes | None, decode: Callable[[bytes], T]) -> T | None:
    if value is None:
        return None
    try:
        return decode(value)
    except ValueError:
        return None
