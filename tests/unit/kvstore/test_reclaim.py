"""What is deleted gives its room back: measured by the blocks that the file system counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from services.kvstore.blocks import BlockStore
from services.kvstore.clock import SystemClock
from services.kvstore.database import scan
from services.kvstore.disk import LocalFile
from services.kvstore.session import TurnBegin, TurnCommit
from services.kvstore.sessions import Sessions, open_sessions
from tests.unit.kvstore.samples import OTHER, block_ids, open_store, put_blocks, read_blocks, wait_durable
from tests.waiting import wait_until

SESSIONS = 8
BLOCKS = 12


def used_bytes(folder: Path) -> int:
    used = 0
    for path in (folder / "slabs").iterdir():
        with suppress(FileNotFoundError):  # it went meanwhile
            used += path.stat().st_blocks * 512
    return used


def open_both(folder: Path) -> tuple[BlockStore, Sessions]:
    store = open_store(folder)
    table = open_sessions(folder / "sessions")
    return store, Sessions(table, default_ttl_s=0, clock=SystemClock(), unnamed=store.forget)


def commit(sessions: Sessions, name: str, ids: Sequence[bytes]) -> None:
    wanted = TurnBegin(turn_id=f"{name} {len(ids)}", owner="o", lease_ms=1000)
    begun = sessions.begin("t", name, wanted)
    record, lease = begun.record, begun.lease
    turn = TurnCommit(
        turn_id=lease.turn_id,
        fencing=lease.fencing,
        expected_version=record.version,
        model=OTHER.model,
        model_name="m",
        new_tokens=[1],
        new_messages=[],
        block_ids=ids,
    )
    sessions.commit("t", name, turn)


def fill(store: BlockStore, sessions: Sessions) -> dict[str, list[bytes]]:
    names = {f"s{number}": block_ids(BLOCKS, f"s{number}") for number in range(SESSIONS)}
    for name, ids in names.items():
        put_blocks(store, ids, shape=OTHER)
        assert wait_durable(store, ids, OTHER) == BLOCKS
        commit(sessions, name, ids)
    return names


def test_deleting_half_of_the_sessions_halves_the_room_on_disk(tmp_path: Path) -> None:
    store, sessions = open_both(tmp_path)
    names = fill(store, sessions)
    whole = used_bytes(tmp_path)
    assert whole >= SESSIONS * BLOCKS * OTHER.slot_bytes
    for name in list(names)[::2]:
        sessions.delete("t", name)
    wait_until(lambda: used_bytes(tmp_path) < 0.55 * whole)
    assert used_bytes(tmp_path) > 0.45 * whole
    for name, ids in names.items():
        assert read_blocks(store, ids, OTHER) == (0 if name in list(names)[::2] else BLOCKS)
    put_blocks(store, names["s0"], shape=OTHER)  # room that was given back is taken again
    assert wait_durable(store, names["s0"], OTHER) == BLOCKS
    sessions.close()
    store.close()
    again = open_store(tmp_path)
    assert read_blocks(again, names["s0"], OTHER) == read_blocks(again, names["s1"], OTHER) == BLOCKS
    again.close()


def test_when_nothing_is_left_the_files_go(tmp_path: Path) -> None:
    store, sessions = open_both(tmp_path)
    for name in fill(store, sessions):
        sessions.delete("t", name)
    wait_until(lambda: used_bytes(tmp_path) == 0)
    sessions.close()
    store.close()


def test_blocks_that_another_session_names_stay(tmp_path: Path) -> None:
    store, sessions = open_both(tmp_path)
    ids = fill(store, sessions)["s1"]
    sessions.fork("t", "s1", "fork")
    commit(sessions, "other", ids[:3])
    sessions.delete("t", "s1")
    assert read_blocks(store, ids, OTHER) == BLOCKS
    sessions.delete("t", "fork")
    assert read_blocks(store, ids, OTHER) == 3
    sessions.close()
    store.close()


def test_a_search_does_not_go_through_what_was_deleted_behind_it(tmp_path: Path) -> None:
    """Or each deletion of a session would cost what all former ones left."""
    options = Options(raw_mode=True)
    options.enable_statistics()
    table = Rdict(str(tmp_path / "table"), options)
    names = [number.to_bytes(2, "big") for number in range(1000)]
    for name in names:
        table[name + b"one"] = table[name + b"two"] = b""
    assert [key for key, _ in scan(table, b"", names[7])] == [names[7] + b"one", names[7] + b"two"]
    for name in names:
        del table[name + b"one"], table[name + b"two"]
    assert not any(next(scan(table, b"", name), None) for name in names)
    skipped = re.search(r"number\.iter\.skip COUNT : (\d+)", options.get_statistics() or "")
    assert skipped is not None
    assert int(skipped[1]) < 10 * len(names)
    table.close()


def test_sessions_of_before_there_were_uses_are_counted_too(tmp_path: Path) -> None:
    store, sessions = open_both(tmp_path)
    ids = fill(store, sessions)["s1"]
    sessions.fork("t", "s1", "fork")
    sessions.close()
    table = open_sessions(tmp_path / "sessions")
    table.write([("uses", key, None) for key, _ in table.items("uses")] + [("meta", b"uses", None)])
    table.close()
    table = open_sessions(tmp_path / "sessions")
    again = Sessions(table, default_ttl_s=0, clock=SystemClock(), unnamed=store.forget)
    again.delete("t", "s1")
    assert read_blocks(store, ids, OTHER) == BLOCKS
    again.delete("t", "fork")
    assert read_blocks(store, ids, OTHER) == 0
    again.close()
    store.close()


def test_a_file_system_that_cannot_punch_holes_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LocalFile, "punch", lambda self, offset, length: False)
    store, sessions = open_both(tmp_path)
    names = fill(store, sessions)
    whole = used_bytes(tmp_path)
    for name in list(names)[:4]:
        sessions.delete("t", name)
    wait_until(lambda: "cannot punch holes" in caplog.text)
    more = block_ids(4 * BLOCKS, "more")
    put_blocks(store, more, shape=OTHER)
    assert wait_durable(store, more, OTHER) == len(more)
    assert used_bytes(tmp_path) == whole  # the free slots were taken again
    assert caplog.text.count("cannot punch holes") == 1
    sessions.close()
    store.close()
