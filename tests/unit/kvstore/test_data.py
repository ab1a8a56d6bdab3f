"""How the data plane sends what DRAM does not hold at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.checksum import checksum
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange
from services.kvstore.block import Block
from services.kvstore.blocks import BlockStore
from services.kvstore.data import DataHandler
from services.kvstore.loader import Loader, Outcome, ReadPart
from tests.unit.kvstore.samples import MIB, SHAPE, block_ids, open_store, payload, put_blocks, wait_durable
from tests.waiting import wait_until

ROOM = MIB // SHAPE.slot_bytes  # blocks in DRAM
PASSED = ROOM // 8  # that pass through it together
STAY = ROOM - 2 * PASSED
IDS = block_ids(2 * ROOM + ROOM // 4)


class Reader:
    """The connection that asked. `sees` is called before each reply is taken, with how many blocks came."""

    def __init__(self, sees: Callable[[int], object] = lambda blocks: None) -> None:
        self.deadline = Deadline.after(20)
        self.layers: list[list[bytes]] = [[] for _ in range(SHAPE.layers)]
        self.pieces: list[int] = []  # blocks of each
        self.more = False  # whether others were said to follow
        self._sees = sees

    def reply(self, reply: pb.DataReply, objects: Sequence[memoryview]) -> None:
        got = reply.got_layer
        self._sees(len(self.layers[-1]))
        came = [bytes(view) for view in objects]
        ids = IDS[len(self.layers[got.layer]) :]
        sums = [checksum(block_id, got.layer, one) for block_id, one in zip(ids, came, strict=False)]
        assert sums == list(got.checksums)
        self.layers[got.layer] += came
        if got.layer == SHAPE.layers - 1:
            self.pieces.append(len(came))
            self.more = got.more


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    """All blocks are on disk, and the first ones not in DRAM."""
    opened = open_store(tmp_path, dram_bytes=MIB)
    for first in range(0, len(IDS), ROOM // 2):
        put_blocks(opened, IDS[first : first + ROOM // 2])
        wait_durable(opened, IDS[: first + ROOM // 2])
    opened.close()
    opened = open_store(tmp_path, dram_bytes=MIB)
    yield opened
    opened.close()


def ask(store: BlockStore, reader: Reader) -> None:
    request = pb.DataRequest(
        get_layers=pb.GetLayers(model=SHAPE.model, block_ids=IDS, first_layer=0, layers=SHAPE.layers)
    )
    DataHandler(store, Telemetry.off("kvstore"))(request, cast(Exchange, reader))


def test_what_comes_next_is_read_while_its_predecessors_are_sent(store: BlockStore) -> None:
    """A reader that takes nothing more before the next run is there."""

    def sees(blocks: int) -> None:
        behind = STAY if not blocks else blocks + PASSED
        if (blocks - STAY) % PASSED == 0 and behind < len(IDS):
            wait_until(lambda: store.match(SHAPE.model, IDS[: behind + 1], peek=True)[-1])

    reader = Reader(sees)
    ask(store, reader)
    behind, last = divmod(len(IDS) - STAY, PASSED)
    assert reader.pieces == [STAY] + [PASSED] * behind + [last] * bool(last)
    assert not reader.more
    for layer, came in enumerate(reader.layers):
        assert came == [payload(block_id, layer) for block_id in IDS]
    assert store.stats().counters.disk_read_bytes == len(IDS) * SHAPE.slot_bytes


def test_the_beginning_of_what_dram_does_not_hold_stays_in_it(store: BlockStore) -> None:
    """Nothing is evicted for what passes through behind it, and its room is free afterwards."""
    for _ in range(3):
        ask(store, Reader())
    stats = store.stats()
    assert stats.counters.disk_read_bytes == (len(IDS) + 2 * (len(IDS) - STAY)) * SHAPE.slot_bytes
    assert stats.counters.evictions_dram == 0
    assert stats.dram_blocks == STAY


@pytest.mark.parametrize("after", [0, STAY])
def test_a_reader_that_goes_away_holds_no_room(store: BlockStore, after: int) -> None:
    def sees(blocks: int) -> None:
        if blocks == after:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        ask(store, Reader(sees))
    others = block_ids(ROOM, "another session")
    wait_until(lambda: put_blocks(store, others, writer="another") == [])


def test_where_others_hold_dram_a_run_waits_for_no_room(store: BlockStore) -> None:
    """Most of it is somebody's: what is behind a run is read once it was sent, and not before."""
    with store.open_run(SHAPE.model, IDS[ROOM:]) as theirs:
        assert len(theirs) == STAY
        reader = Reader()
        ask(store, reader)
    assert sum(reader.pieces) == len(IDS)
    assert [len(came) for came in reader.layers] == [len(IDS)] * SHAPE.layers


@pytest.mark.parametrize("wrong", [5, STAY + 5])
def test_a_wrong_block_ends_it_and_what_was_being_read_behind_it(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    verify = Loader._verify

    def verified(self: Loader, block: Block, part: ReadPart) -> Outcome:
        return Outcome.CORRUPT if block.block_id == IDS[wrong] else verify(self, block, part)

    monkeypatch.setattr(Loader, "_verify", verified)
    reader = Reader()
    ask(store, reader)
    assert [len(came) for came in reader.layers] == [wrong] * SHAPE.layers
    assert not reader.more
    monkeypatch.undo()
    others = block_ids(ROOM, "another session")
    wait_until(lambda: put_blocks(store, others, writer="another") == [])
