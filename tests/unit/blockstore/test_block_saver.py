"""Saving in the background: what is sent, what is not, and that every `done` is called once."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvcommons.blockstore.lane import Lane, Save
from kvcommons.blockstore.progress import Progress
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.errors import CapacityExhausted
from kvcommons.rblock.checksum import checksum
from kvcommons.rpc.dialer import UNSECURED
from kvcommons.transport.deadline import Deadline
from tests.unit.blockstore.dictionary_store import LAYOUT, MODEL, DictionaryStore, content, ids


def soon() -> Deadline:
    return Deadline.after(10)


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="kvc-")
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def store(folder: Path) -> Iterator[DictionaryStore]:
    store = DictionaryStore(f"unix:{folder}/data")
    yield store
    store.may_reply.set()
    store.server.stop(5)


class Writer:
    """Saves blocks with their content, and counts `done`."""

    def __init__(self, saver: BlockSaver) -> None:
        self.saver = saver
        self.asked = 0
        self.done: Counter[int] = Counter()

    def save(self, address: str, block_ids: list[bytes], layer: int, *, first_index: int = 0) -> bool:
        number, self.asked = self.asked, self.asked + 1
        return self.saver.save(
            address=address,
            model=MODEL,
            layers=LAYOUT.layers,
            tenant="t",
            parent=b"p" * 32 if first_index else b"",
            first_index=first_index,
            block_ids=block_ids,
            layer=layer,
            payload=[content(block_id, layer) for block_id in block_ids],
            done=self._finished(number),
        )

    def _finished(self, number: int) -> Callable[[], None]:
        return lambda: self.done.update([number])

    def check(self) -> None:
        """Every save has ended, once."""
        assert self.done == Counter(range(self.asked))


def test_layers_arrive_with_checksums_and_places(store: DictionaryStore) -> None:
    saver = BlockSaver("writer-1")
    writer = Writer(saver)
    for layer in range(3):
        assert writer.save(store.server.address, ids(4), layer, first_index=6)
        assert saver.flush(soon())
    writer.check()
    assert store.objects == {(b, layer): content(b, layer) for b in ids(4) for layer in range(3)}
    assert all(checksum(b, layer, store.objects[b, layer]) == s for (b, layer), s in store.sums.items())
    put = store.puts[1]
    assert (put.writer, put.tenant, put.layer, put.layers) == ("writer-1", "t", 1, 3)
    assert (put.parent, put.first_block) == (b"p" * 32, 6)
    stats = saver.stats()
    assert (stats.saved_objects, stats.unwanted_objects, stats.dropped_objects, stats.pending_bytes) == (
        12, 0, 0, 0,
    )  # fmt: skip
    saver.close(soon())


def test_unwanted_blocks_are_not_sent_on(store: DictionaryStore) -> None:
    saver = BlockSaver("w")
    writer = Writer(saver)
    store.unwanted = {ids(5)[0], ids(5)[2]}
    for layer in range(3):
        writer.save(store.server.address, ids(5), layer)
        assert saver.flush(soon())
    sent = [(put.layer, put.first_block, put.parent[:1], len(put.block_ids)) for put in store.puts]
    assert sent == [
        (0, 0, b"", 5),
        (1, 1, b"\x00", 1),
        (1, 3, b"\x02", 2),
        (2, 1, b"\x00", 1),
        (2, 3, b"\x02", 2),
    ]
    assert saver.stats().unwanted_objects == 6
    assert saver.stats().saved_objects == 9
    writer.check()
    saver.close(soon())


def test_layers_of_the_same_blocks_go_out_together(store: DictionaryStore) -> None:
    saver = BlockSaver("w")
    writer = Writer(saver)
    for block_ids in (ids(2), ids(3, 2)):
        for layer in range(3):
            writer.save(store.server.address, block_ids, layer)
    writer.save(store.server.address, ids(1, 5), 0)  # its other layers do not come
    assert saver.flush(soon())
    assert [(put.layer, put.count, len(put.block_ids)) for put in store.puts] == [
        (0, 3, 2), (0, 3, 3), (0, 1, 1),
    ]  # fmt: skip
    assert saver.stats().saved_objects == 16
    assert all(checksum(b, layer, store.objects[b, layer]) == s for (b, layer), s in store.sums.items())
    writer.check()
    saver.close(soon())


def test_no_more_waits_for_others_than_is_sent_in_a_moment(folder: Path) -> None:
    lane = Lane(
        f"unix:{folder}/none", writer="w", call_s=1, changed=threading.Condition(),
        settle=lambda save, saved, unwanted: None, dialer=UNSECURED,
    )  # fmt: skip

    def put(layer: int) -> None:
        view = memoryview(bytes(1000))
        lane.put(
            Save(
                model=MODEL, layers=8, tenant="t", parent=b"", first_index=0, block_ids=(ids(1)[0],),
                part=range(8), layer=layer, payload=((view,),), bytes=1000, done=lambda: None, give_up=soon(),
                traceparent="",
            )
        )  # fmt: skip

    with lane._changed:
        for layer in range(5):
            put(layer)
        assert lane._leading() == (5, False)
    lane._pace(sent_bytes=10_000, seconds=0.25)  # 2,000 in a twentieth of a second
    with lane._changed:
        assert lane._leading() == (2, True)


def test_a_full_buffer_drops_and_never_blocks(store: DictionaryStore) -> None:
    saver = BlockSaver("w", buffer_bytes=3 * LAYOUT.object_bytes)
    writer = Writer(saver)
    store.may_reply.clear()
    taken = [writer.save(store.server.address, ids(1, number), 0) for number in range(10)]
    assert taken == [True] * 3 + [False] * 7
    assert saver.stats().dropped_objects == 7
    assert saver.stats().pending_bytes == 3 * LAYOUT.object_bytes
    store.may_reply.set()
    assert saver.flush(soon())
    # The later layers of what was dropped are of no use.
    for number in range(10):
        writer.save(store.server.address, ids(1, number), 1)
        assert saver.flush(soon())
    assert {block_id for block_id, _ in store.objects} == set(ids(3))
    writer.check()
    saver.close(soon())


def test_what_waits_for_a_store_that_comes_back_is_saved(folder: Path) -> None:
    saver = BlockSaver("w")
    writer = Writer(saver)
    address = f"unix:{folder}/late"
    for layer in range(3):
        assert writer.save(address, ids(2), layer)
    assert not saver.flush(Deadline.after(0.1))
    store = DictionaryStore(address)
    assert saver.flush(soon())
    assert len(store.objects) == 6
    writer.check()
    saver.close(soon())
    store.server.stop(5)


def test_a_block_begun_before_the_store_died_is_not_continued(folder: Path) -> None:
    saver = BlockSaver("w")
    writer = Writer(saver)
    address = f"unix:{folder}/data"
    first = DictionaryStore(address)
    writer.save(address, ids(1), 0)
    assert saver.flush(soon())
    assert first.server.stop(5)
    second = DictionaryStore(address)
    for layer in (1, 2):
        writer.save(address, ids(1), layer)
    writer.save(address, ids(1, 1), 0)
    assert saver.flush(soon())
    assert set(second.objects) == {(ids(1, 1)[0], 0)}
    writer.check()
    saver.close(soon())
    second.server.stop(5)


def test_a_store_that_stays_away_costs_the_hold_time(folder: Path) -> None:
    saver = BlockSaver("w", hold_s=0.3)
    writer = Writer(saver)
    started = time.monotonic()
    for number in range(20):
        writer.save(f"unix:{folder}/none", ids(1, number), 0)
    assert saver.flush(soon())
    assert time.monotonic() - started > 0.25
    assert saver.stats().dropped_objects == 20
    writer.check()
    saver.close(soon())


def test_a_store_that_is_away_holds_up_no_other(store: DictionaryStore, folder: Path) -> None:
    saver = BlockSaver("w", hold_s=5)
    writer = Writer(saver)
    writer.save(f"unix:{folder}/none", ids(1), 0)
    writer.save(store.server.address, ids(1), 0)
    deadline = soon()
    while not store.puts:
        deadline.check()
        time.sleep(0.005)
    saver.close(Deadline.after(0.1))
    writer.check()


def test_a_refusal_drops_the_blocks(store: DictionaryStore) -> None:
    saver = BlockSaver("w")
    writer = Writer(saver)
    store.refusal = CapacityExhausted("the disk is full")
    for layer in range(3):
        writer.save(store.server.address, ids(2), layer)
        assert saver.flush(soon())
    assert saver.stats().dropped_objects == 2
    assert saver.stats().unwanted_objects == 4
    store.refusal = None
    for layer in range(3):
        writer.save(store.server.address, ids(2), layer)
    assert saver.flush(soon())
    assert len(store.objects) == 6
    writer.check()
    saver.close(soon())


def test_close_drops_the_rest_and_leaves_no_thread(store: DictionaryStore) -> None:
    saver = BlockSaver("closing")
    writer = Writer(saver)
    store.may_reply.clear()
    for number in range(5):
        writer.save(store.server.address, ids(1, number), 0)
    saver.close(Deadline.after(0.1))
    writer.check()
    assert saver.stats().pending_bytes == 0
    assert not writer.save(store.server.address, ids(1), 0)
    writer.check()
    assert not [thread for thread in threading.enumerate() if thread.name == "save-closing"]


def test_progress_sends_a_layer_only_after_the_one_before() -> None:
    progress = Progress(begun_max=3)
    a, b, c, d = ids(4)
    assert progress.runs(MODEL, 0, [a, b]) == [range(2)]
    assert progress.runs(MODEL, 1, [a, b]) == []
    progress.sent(MODEL, 0, 3, [a, b, c])
    assert progress.runs(MODEL, 1, [a, d, b, c]) == [range(1), range(2, 4)]
    assert progress.runs(b"other", 1, [a]) == []
    progress.sent(MODEL, 1, 3, [b])
    assert progress.runs(MODEL, 1, [a, b, c]) == [range(1), range(2, 3)]
    assert progress.runs(MODEL, 2, [a, b, c]) == [range(1, 2)]
    progress.sent(MODEL, 0, 3, [d])  # a, untouched for longest, is forgotten
    assert progress.runs(MODEL, 1, [a, c, d]) == [range(1, 3)]
    progress.sent(MODEL, 2, 3, [b])
    assert progress.runs(MODEL, 2, [b]) == []
    progress.unwanted(MODEL, [c])
    assert progress.runs(MODEL, 1, [c, d]) == [range(1, 2)]
    progress.lost()
    assert progress.runs(MODEL, 1, [c, d]) == []


def test_what_waits_can_be_moved_out_of_its_owners_memory(store: DictionaryStore) -> None:
    saver = BlockSaver("writer-1")
    store.may_reply.clear()
    memory = [bytearray(content(block_id, layer)) for layer in range(3) for block_id in ids(1)]
    done: list[int] = []
    for layer in range(3):
        saver.save(
            address=store.server.address, model=MODEL, layers=3, tenant="t", parent=b"", first_index=0,
            block_ids=ids(1), layer=layer, payload=[memory[layer]], done=partial(done.append, layer),
        )  # fmt: skip
        while not store.waiting:
            time.sleep(0.001)  # until the first is on its way: it alone keeps its memory
    assert saver.detach()
    assert done == [1, 2]
    assert not saver.detach()
    memory[1][:] = memory[2][:] = bytes(len(memory[1]))
    store.may_reply.set()
    assert saver.flush(soon())
    assert sorted(done) == [0, 1, 2]
    assert store.objects == {(ids(1)[0], layer): content(ids(1)[0], layer) for layer in range(3)}
    saver.close(soon())
