"""Wrong bytes, a full disk, a disk that returns errors: what is lost is counted, what is served is right."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.index import BlockIndex, open_index
from services.kvstore.tier import PAGE_BYTES
from tests.unit.kvstore.samples import (
    MIB,
    SHAPE,
    block_ids,
    open_store,
    payload,
    put_blocks,
    read_blocks,
    wait_durable,
)
from tests.waiting import wait_until

IDS = block_ids(12)


def stored(folder: Path) -> dict[bytes, int]:
    """Fills a folder and closes it; where in its slab file each block begins."""
    store = open_store(folder)
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    store.close()
    index = BlockIndex(open_index(folder / "index"))
    entries = {block_id: entry for _, block_id, entry in index.scan() if entry}
    index.close()
    assert {entry.slot.region for entry in entries.values()} == {1}
    return {b: PAGE_BYTES + entry.slot.place * SHAPE.slot_bytes for b, entry in entries.items()}


@pytest.mark.parametrize("layer", [0, 2])
def test_a_flipped_bit_drops_its_block_and_no_other(tmp_path: Path, layer: int) -> None:
    place = stored(tmp_path)[IDS[5]] + layer * SHAPE.object_bytes + 1234
    with (tmp_path / "slabs" / "slab-00000001").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    store = open_store(tmp_path)
    assert read_blocks(store, IDS) == 5
    assert store.stats().counters.corrupt == 1
    assert len(store.match(SHAPE.model, IDS)) == 5
    put_blocks(store, IDS)
    assert read_blocks(store, IDS) == len(IDS)
    assert wait_durable(store, IDS) == len(IDS)
    store.close()
    again = open_store(tmp_path)
    assert read_blocks(again, IDS) == len(IDS)
    again.close()


def test_swapped_slots_are_noticed(tmp_path: Path) -> None:
    places = stored(tmp_path)
    with (tmp_path / "slabs" / "slab-00000001").open("r+b") as file:
        contents = []
        for block_id in (IDS[2], IDS[3]):
            file.seek(places[block_id])
            contents.append(file.read(SHAPE.slot_bytes))
        for block_id, content in zip((IDS[3], IDS[2]), contents, strict=True):
            file.seek(places[block_id])
            file.write(content)
    store = open_store(tmp_path)
    assert read_blocks(store, IDS) == 2
    # One of them the scrub may have found just before; it counts what it condemns a moment later.
    wait_until(lambda: store.stats().counters.corrupt == 2)
    store.close()


def test_a_lost_slab_file_loses_its_blocks_only(tmp_path: Path) -> None:
    stored(tmp_path)
    (tmp_path / "slabs" / "slab-00000001").unlink()
    store = open_store(tmp_path)
    assert store.match(SHAPE.model, IDS) == []
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    store.close()


class Disk:
    """Stands between the store and the system calls; `fail` decides about each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: Callable[[str, int], int | None] = lambda call, offset: None
        for call in ("pwritev", "preadv", "fdatasync"):
            monkeypatch.setattr(os, call, self._wrap(call, getattr(os, call)))

    def _wrap(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: int, buffers: object = (), offset: int = 0) -> Any:
            error = self.fail(call, offset)
            if error is not None:
                raise OSError(error, os.strerror(error))
            return real(descriptor) if call == "fdatasync" else real(descriptor, buffers, offset)

        return wrapped


def test_a_disk_that_is_full_serves_from_memory_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    disk = Disk(monkeypatch)
    written = PAGE_BYTES + len(IDS) * SHAPE.slot_bytes
    # As a file system does: what has room behind it can be written, nothing else.
    disk.fail = lambda call, offset: errno.ENOSPC if call == "pwritev" and offset >= written else None
    more = block_ids(8, "more")
    put_blocks(store, more)
    assert wait_durable(store, more) == len(more)  # in the place of older ones
    assert store.durable(SHAPE.model, IDS) < len(IDS)
    assert read_blocks(store, more) == len(more)
    disk.fail = lambda call, offset: errno.ENOSPC if call == "pwritev" else None
    last = block_ids(4, "last")
    put_blocks(store, last)
    assert wait_durable(store, last) == 0
    assert store.stats().counters.write_failures == len(last)
    assert read_blocks(store, last) == len(last)
    store.close()
    disk.fail = lambda call, offset: None
    again = open_store(tmp_path)
    assert again.durable(SHAPE.model, more) == len(more)
    assert read_blocks(again, more) == len(more)
    assert again.match(SHAPE.model, last) == []
    put_blocks(again, last)
    assert wait_durable(again, last) == len(last)
    again.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_what_the_disk_did_not_take_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    disk = Disk(monkeypatch)
    store = open_store(tmp_path)
    disk.fail = lambda called, offset: errno.EIO if called == call else None
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == 0
    assert read_blocks(store, IDS) == len(IDS)
    assert store.stats().pending_writes == 0
    disk.fail = lambda called, offset: None
    more = block_ids(3, "more")
    put_blocks(store, more)
    assert wait_durable(store, more) == len(more)
    store.close()
    again = open_store(tmp_path)
    assert again.match(SHAPE.model, IDS) == []
    assert read_blocks(again, more) == len(more)
    again.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_slots_that_the_disk_failed_in_come_back_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("services.kvstore.writer.ASIDE_S", 0.05)
    monkeypatch.setattr("services.kvstore.blocks._IDLE_S", 0.05)
    disk = Disk(monkeypatch)
    store = open_store(tmp_path)
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    disk.fail = lambda called, offset: errno.EIO if called == call else None
    more = block_ids(8, "more")
    put_blocks(store, more)
    assert wait_durable(store, more) == 0
    assert store.stats().disk_blocks == len(IDS) + len(more)  # what is set aside counts as used
    failures = 0

    def failing(called: str, offset: int) -> int | None:
        nonlocal failures
        failures += called == call
        return errno.EIO if called == call else None

    disk.fail = failing
    wait_until(lambda: failures > 3)  # it looks again and again, and takes nothing back
    assert store.stats().disk_blocks == len(IDS) + len(more)
    disk.fail = lambda called, offset: None
    wait_until(lambda: store.stats().disk_blocks == len(IDS))
    put_blocks(store, block_ids(8, "others"))
    assert wait_durable(store, block_ids(8, "others")) == 8
    store.close()
    again = open_store(tmp_path)
    assert again.match(SHAPE.model, more) == []
    assert read_blocks(again, IDS) == len(IDS)
    assert read_blocks(again, block_ids(8, "others")) == 8
    again.close()


def test_a_read_error_ends_the_run_and_drops_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = stored(tmp_path)[IDS[4]]
    disk = Disk(monkeypatch)
    # Blocks side by side are read at once: let each be read alone, to see which one is lost.
    monkeypatch.setattr("services.kvstore.loader.JOINED_BYTES_MAX", 0)
    disk.fail = lambda call, offset: errno.EIO if call == "preadv" and offset == bad else None
    store = open_store(tmp_path)
    assert read_blocks(store, IDS) == 4
    assert store.stats().counters.read_errors == 1
    disk.fail = lambda call, offset: None
    assert read_blocks(store, IDS[5:]) == len(IDS) - 5
    store.close()


def test_what_is_read_whole_goes_to_its_reader_before_the_disk_has_read_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = stored(tmp_path)
    disk, allowed = Disk(monkeypatch), threading.Event()
    monkeypatch.setattr("services.kvstore.loader.JOINED_BYTES_MAX", 0)
    monkeypatch.setattr("services.kvstore.loader.PIECE_BYTES", 3 * SHAPE.slot_bytes)

    def hold(call: str, offset: int) -> None:
        if call == "preadv" and offset == places[IDS[4]]:
            assert allowed.wait(10)

    disk.fail = hold
    store = open_store(tmp_path)
    with store.open_run(SHAPE.model, IDS) as run:
        sent = []
        for piece in run.pieces():
            for layer in range(SHAPE.layers):
                sent += [bytes(view) for view in run.layer(layer, 10, piece=piece)[2]]
            assert run.more_behind(piece) == (piece.stop < len(IDS))
            allowed.set()
    pieces = [IDS[first : first + 3] for first in range(0, len(IDS), 3)]
    assert sent == [payload(one, layer) for piece in pieces for layer in range(SHAPE.layers) for one in piece]
    with store.open_run(SHAPE.model, IDS) as run:
        assert list(run.pieces()) == [range(len(IDS))], "what is in memory goes layer by layer"
    store.close()


def test_a_read_error_ends_a_run_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = stored(tmp_path)[IDS[4]]
    disk = Disk(monkeypatch)
    monkeypatch.setattr("services.kvstore.loader.JOINED_BYTES_MAX", 0)
    monkeypatch.setattr("services.kvstore.loader.PIECE_BYTES", 3 * SHAPE.slot_bytes)
    disk.fail = lambda call, offset: errno.EIO if call == "preadv" and offset == bad else None
    store = open_store(tmp_path)
    with store.open_run(SHAPE.model, IDS) as run:
        counts, more = [], []
        for piece in run.pieces():
            counts.append([len(run.layer(layer, 10, piece=piece)[0]) for layer in range(SHAPE.layers)])
            more.append(run.more_behind(piece))
    assert (counts, more) == ([[3, 3, 3], [1, 1, 1]], [True, False])
    store.close()


def test_a_reader_that_goes_away_leaves_nothing_pinned(tmp_path: Path) -> None:
    stored(tmp_path)
    store = open_store(tmp_path, dram_bytes=MIB)
    for _ in range(5):
        store.open_run(SHAPE.model, IDS).close()
    wait_until(lambda: store.stats().counters.disk_read_bytes == len(IDS) * SHAPE.slot_bytes)
    ids = block_ids(100, "other")
    for start in range(0, 100, 10):
        put_blocks(store, ids[start : start + 10])
        wait_durable(store, ids[start : start + 10])
    assert store.stats().counters.refused == 0
    store.close()


_FULL_DISK = """
import resource, sys
from pathlib import Path
from kvcommons.errors import StoreUnavailable
from services.kvstore.clock import SystemClock
from services.kvstore.session import TurnBegin, TurnCommit
from services.kvstore.sessions import Sessions, open_sessions
from tests.unit.kvstore.samples import *
from tests.waiting import wait_until

folder = Path(sys.argv[1])
ids = block_ids(12)
store = open_store(folder)
sessions = Sessions(open_sessions(folder / "sessions"), default_ttl_s=0, clock=SystemClock())

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def turn(number, session="s"):
    wanted = TurnBegin(turn_id=f"turn {number}", owner="o", lease_ms=60_000)
    begun = sessions.begin("t", session, wanted)
    record, lease = begun.record, begun.lease
    return lease, record, TurnCommit(
        turn_id=f"turn {number}", fencing=lease.fencing, expected_version=record.version, model=b"m",
        model_name="m", new_tokens=list(range(number, number + 5000)), new_messages=[], block_ids=[])

lease, record, first = turn(1)
sessions.commit("t", "s", first)
lease, record, second = turn(2)
limit(int(sys.argv[2]))             # no file grows beyond this: as good as a full disk
put_blocks(store, ids)
assert wait_durable(store, ids) == 0
assert read_blocks(store, ids) == len(ids)
try:
    sessions.commit("t", "s", second)
    raise SystemExit("a commit on a full disk went through")
except StoreUnavailable as error:
    assert "room" in error.message, error.message
assert sessions.get("t", "s").version == 1
# However often it is tried to write again: what was committed can be read.
def tried():
    try:
        turn(3, "other")
    except StoreUnavailable as error:
        assert sessions.get("t", "s").version == 1
        assert [head.session_id for head in sessions.page("t", "", 10)[0]] == ["s"]
        return "cannot be opened again" in error.message
wait_until(tried, "it is opened again")
wait_until(tried, "it is opened again more than once")
limit(resource.RLIM_INFINITY)
def again():
    try:
        return sessions.commit("t", "s", second).version == 2
    except StoreUnavailable:
        return False
wait_until(again, "it recovers")
assert list(sessions.get("t", "s").tokens) == list(first.new_tokens) + list(second.new_tokens)
print("recovered")
"""


@pytest.mark.parametrize("capacity", [0, 4096])
def test_a_commit_on_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, capacity: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path), str(capacity)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "recovered\n", result.stderr
