"""The golden folders are what a kvstore takes for its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.homes import session_key
from services.kvstore.database import Database
from services.kvstore.families import RECORDS
from services.kvstore.folder import DataFolder
from services.kvstore.integrity import open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.session import decode_record
from tests.contract.shard_folders import STACKS, write_stack


@pytest.mark.parametrize("name", STACKS)
def test_golden_folders_are_whole_and_one_has_the_last_state_of_each_session(
    tmp_path: Path, name: str
) -> None:
    stack = write_stack(name, tmp_path)
    found: dict[bytes, list[bytes]] = {}
    for path in stack.folders:
        folder = DataFolder(path)
        families = sorted(STACKS[name]["folders"][path.name]["families"])
        database = Database(folder.sessions, families)
        table = open_integrity_table(database, folder.sessions)
        assert table.whole
        mark = Mark(folder.mark)
        table.begin(mark)
        mark.close()
        for key, value in table.items(RECORDS):
            found.setdefault(key, []).append(value)
        table.close()
        folder.close()
    for (tenant, session_id), record in stack.records.items():
        values = found[session_key(tenant, session_id)]
        assert record in [decode_record(value) for value in values]
    assert len(stack.records) > 3
    assert stack.gone
