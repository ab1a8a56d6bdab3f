"""A disk that is full, of KV and of what others write: committing, evicting, deleting and starting go on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack.place import Claim
from kvcommons.errors import InvalidInput, SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.ballast import free_bytes
from tests.contract.kvstore_process import KvstoreProcess
from tests.machine import scaled
from tests.unit.kvstore.samples import MIB, OTHER, block_ids

DISK_BYTES = 64 * MIB
MODEL = OTHER.model
TENANT = "alice"
WAIT_S = 60.0


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        commands = [["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs a file system of its own, and {command[0]} may not be used here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def running(socket_folder: Path, disk: Path) -> Iterator[list[KvstoreProcess]]:
    """The processes that a test starts; the last one is ended by its end."""
    started: list[KvstoreProcess] = []
    yield started
    for process in started:
        if process.process.poll() is None:
            assert process.terminate() == 0, process.errors


def start(running: list[KvstoreProcess], sockets: Path, disk: Path) -> KvstoreProcess:
    process = KvstoreProcess(sockets, disk / "data", disk_bytes=1 << 30, staging_s=2)
    running.append(process)
    return process.wait_ready()


def commit(store: KvstoreProcess, session_id: str, ids: list[bytes]) -> int:
    """A turn of a session; its version then."""
    begin = pb.BeginTurnRequest(
        tenant=TENANT,
        session_id=session_id,
        turn_id=f"turn-{time.monotonic_ns()}",
        owner="r",
        lease_ms=30_000,
    )
    begun = store.sessions.BeginTurn(begin, timeout=scaled(20))
    request = pb.CommitTurnRequest(
        tenant=TENANT,
        session_id=session_id,
        turn_id=begin.turn_id,
        fencing=begun.fencing,
        expected_version=begun.record.version,
        model=MODEL,
        model_name="demo",
        new_tokens=range(2000),
        new_messages=[pb.Message(role="user", content="word " * 2000)],
        block_ids=ids,
        durable_wait_ms=2000,
    )
    return int(store.sessions.CommitTurn(request, timeout=scaled(20)).version)


def tokens(store: KvstoreProcess, session_id: str) -> int:
    wanted = pb.GetSessionRequest(tenant=TENANT, session_id=session_id)
    return len(store.sessions.Get(wanted, timeout=scaled(20)).tokens)


def delete(store: KvstoreProcess, session_id: str) -> None:
    store.sessions.Delete(pb.DeleteSessionRequest(tenant=TENANT, session_id=session_id), timeout=scaled(20))


def fill(path: Path) -> None:
    """Somebody else takes all the room that is left."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
        os.fsync(file.fileno())


def _disk_blocks(store: KvstoreProcess) -> int:
    return int(store.blocks.Stats(pb.StatsRequest(), timeout=scaled(20)).disk_blocks)


def talk(store: KvstoreProcess, turns: int, name: str) -> None:
    """Turns of several sessions, with more KV than the disk has room for."""
    for turn in range(turns):
        ids = block_ids(50, f"{name} {turn}")
        store.put_blocks(ids, shape=OTHER)
        commit(store, f"s{turn % 8}", ids)


def test_kv_leaves_room_for_sessions_and_survives_a_kill(
    running: list[KvstoreProcess], socket_folder: Path, disk: Path
) -> None:
    store = start(running, socket_folder, disk)
    talk(store, 48, "first")  # 96 MB
    stats = store.wait_written()
    assert 300 < stats.disk_blocks < DISK_BYTES // OTHER.slot_bytes
    latest = block_ids(50, "first 47")
    assert free_bytes(disk) > 4 * MIB
    store.kill()

    store = start(running, socket_folder, disk)
    assert [tokens(store, f"s{at}") for at in range(8)] == [6 * 2000] * 8
    found = store.get_blocks(latest, shape=OTHER)[0]
    assert found == len(latest), "eviction makes room for the next turn's blocks"
    talk(store, 8, "second")
    delete(store, "s0")
    with pytest.raises(SessionNotFound):
        tokens(store, "s0")


def test_a_disk_that_others_fill_stays_of_use(
    running: list[KvstoreProcess], socket_folder: Path, disk: Path
) -> None:
    """KV gives back what it has, until the reserve is there again."""
    store = start(running, socket_folder, disk)
    talk(store, 24, "first")
    before = store.wait_written().disk_blocks
    fill(disk / "filler")
    deadline_s = time.monotonic() + WAIT_S
    while (blocks := _disk_blocks(store)) >= before or free_bytes(disk) < 6 * MIB:
        assert time.monotonic() < deadline_s, (blocks, free_bytes(disk))
        time.sleep(0.05)
    assert blocks > 0
    talk(store, 8, "second")
    delete(store, "s0")


def test_a_store_starts_on_a_disk_without_any_room(
    running: list[KvstoreProcess], socket_folder: Path, disk: Path
) -> None:
    store = start(running, socket_folder, disk)
    talk(store, 24, "first")
    store.wait_written()
    store.kill()
    fill(disk / "filler")
    assert free_bytes(disk) < 4096

    store = start(running, socket_folder, disk)
    assert [tokens(store, f"s{at}") for at in range(8)] == [3 * 2000] * 8
    delete(store, "s0")
    assert commit(store, "s1", []) == 4
    store.kill()
    # And once more, with nothing thrown off in between that is left to throw off.
    fill(disk / "filler")
    store = start(running, socket_folder, disk)
    assert tokens(store, "s1") == 4 * 2000
    assert commit(store, "s1", []) == 5


def test_a_store_that_has_nothing_to_give_up_says_so(
    running: list[KvstoreProcess], socket_folder: Path, disk: Path
) -> None:
    (disk / "data").mkdir()
    (disk / "stack").mkdir()
    fill(disk / "filler")
    process = KvstoreProcess(socket_folder, disk / "data")
    assert process.process.wait(WAIT_S) != 0
    process._end()
    assert "No space left" in process.errors or "make room" in process.errors
    assert "Traceback" not in process.errors
    with pytest.raises(InvalidInput, match="make room"):  # what `kvcommons up` does first
        Claim(disk / "stack")
