from __future__ import annotations

from pathlib import Path

from services.kvstore.database import Database
from services.kvstore.index import BlockIndex, IndexEntry, StoredCopy, encode_key, open_index
from services.kvstore.tier import Slot
from tests.unit.kvstore.samples import block_ids

MODEL = b"m" * 32
IDS = block_ids(3)
ENTRY = IndexEntry(
    model=MODEL,
    tenant="t",
    parent=b"",
    first_index=0,
    slot=Slot(1, 2),
    generation=1,
    created_ms=0,
    checksums=(1, 2),
)


def test_entries_survive_and_generations_never_repeat(tmp_path: Path) -> None:
    index = BlockIndex(open_index(tmp_path))
    index.add([(IDS[0], ENTRY), (IDS[1], ENTRY._replace(slot=Slot(1, 3)))])
    index.remove([(MODEL, IDS[1])])
    first = index.first_generation
    index.close()
    again = BlockIndex(open_index(tmp_path))
    assert [again.get(MODEL, one) for one in IDS] == [ENTRY, None, None]
    assert list(again.scan()) == [(MODEL, IDS[0], ENTRY)]
    assert again.first_generation > first + 2**32
    again.close()


def test_a_damaged_entry_is_reported_not_raised(tmp_path: Path) -> None:
    index = BlockIndex(open_index(tmp_path))
    index.add([(IDS[0], ENTRY)])
    index.close()
    database = Database(tmp_path, ["blocks", "meta"])
    database.write([("blocks", encode_key(MODEL, IDS[1]), b"\x01short")])
    database.close()
    again = BlockIndex(open_index(tmp_path))
    assert {block_id: entry for _, block_id, entry in again.scan()} == {IDS[0]: ENTRY, IDS[1]: None}
    assert [again.get(MODEL, one) for one in IDS[:2]] == [ENTRY, None]
    copy = StoredCopy(ENTRY.slot, ENTRY.generation, ENTRY.checksums)
    assert again.stored(MODEL, IDS[:2]) == [copy, None]
    again.close()
