"""Loading runs of blocks, with stores that are short of them, wrong, slow or gone."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest

from kvcommons.blockstore.loader import BlockLoader, CorruptObject
from kvcommons.errors import DataLoss, DeadlineExceeded, NotFound, Unavailable
from kvcommons.transport.deadline import Deadline
from tests.unit.blockstore.dictionary_store import LAYOUT, MODEL, DictionaryStore, content, ids
from tests.waiting import wait_until


def soon() -> Deadline:
    return Deadline.after(10)


class Memory:
    """Where a load goes: an object each for layers and blocks."""

    def __init__(self, blocks: int) -> None:
        self.objects = [[bytearray(LAYOUT.object_bytes) for _ in range(blocks)] for _ in range(LAYOUT.layers)]

    def __call__(self, layer: int, first: int, count: int) -> AbstractContextManager[list[bytearray]]:
        return nullcontext(self.objects[layer][first : first + count])


@pytest.fixture
def store() -> Iterator[DictionaryStore]:
    folder = tempfile.mkdtemp(prefix="kvc-")
    store = DictionaryStore(f"unix:{folder}/data")
    yield store
    store.may_reply.set()
    store.server.stop(5)
    shutil.rmtree(folder)


@pytest.fixture
def corrupt() -> list[CorruptObject]:
    return []


@pytest.fixture
def loader(corrupt: list[CorruptObject]) -> Iterator[BlockLoader]:
    loader = BlockLoader(corrupt.append, loads_max=2)
    yield loader
    loader.close()


def test_all_layers_of_all_blocks_arrive(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(5))
    memory = Memory(5)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(5), memory, soon())
    assert [load.wait(layer, soon()) for layer in range(3)] == [5, 5, 5]
    assert memory.objects == [[content(block_id, layer) for block_id in ids(5)] for layer in range(3)]
    assert load.wait_all(soon()) == 5
    assert load.failure is None


def test_a_layer_is_there_while_later_ones_are_not(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(2))
    store.may_reply.clear()
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(2), Memory(2), soon())
    assert load.wait(0, soon()) == 2
    with pytest.raises(DeadlineExceeded, match="layer 1"):
        load.wait(1, Deadline.after(0.05))
    store.may_reply.set()
    assert load.wait(2, soon()) == 2


def test_a_run_ends_where_a_layer_is_missing_and_stays_short(
    store: DictionaryStore, loader: BlockLoader
) -> None:
    store.fill(ids(5))
    del store.objects[ids(5)[3], 1]
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(5), Memory(5), soon())
    assert [load.wait(layer, soon()) for layer in range(3)] == [5, 3, 3]


@pytest.mark.parametrize("ahead", [None, 1])
def test_what_the_store_has_no_room_for_at_once_comes_in_pieces(
    store: DictionaryStore, loader: BlockLoader, ahead: int | None
) -> None:
    store.fill(ids(5))
    store.capacity = 2
    memory = Memory(5)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(5), memory, soon(), ahead=ahead)
    assert load.wait(0, soon()) == 5
    load.release()
    assert [load.wait(layer, soon()) for layer in range(3)] == [5, 5, 5]
    assert memory.objects == [[content(block_id, layer) for block_id in ids(5)] for layer in range(3)]
    assert store.asked == [5] * (1 if ahead is None else 2)


@pytest.mark.parametrize(
    ("block", "layer", "there"),
    [(0, 0, [0, 0, 0]), (2, 0, [2, 2, 2]), (3, 0, [3, 3, 3]), (1, 2, [2, 2, 1]), (3, 1, [4, 3, 3])],
)
def test_a_run_in_pieces_ends_where_a_layer_is_missing(
    store: DictionaryStore, loader: BlockLoader, block: int, layer: int, there: list[int]
) -> None:
    store.fill(ids(6))
    store.capacity = 2
    del store.objects[ids(6)[block], layer]
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(6), Memory(6), soon())
    assert load.wait_all(soon()) == there[-1]
    for number, expected in enumerate(there):
        assert load.wait(number, soon()) == expected
    assert load.failure is None


def test_a_store_that_has_no_room_at_all_is_not_asked_again(
    store: DictionaryStore, loader: BlockLoader
) -> None:
    store.fill(ids(3))
    store.capacity = 0
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(3), Memory(3), soon())
    assert load.wait_all(soon()) == 0
    assert store.asked == [3]


def test_a_load_in_pieces_can_be_narrowed(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(6))
    store.capacity = 2
    store.may_reply.clear()
    memory = Memory(6)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(6), memory, soon())
    wait_until(lambda: bool(store.asked), "it asks for the first piece")
    load.narrow(3)
    store.may_reply.set()
    assert load.wait_all(soon()) == 3
    assert memory.objects[2][3:] == [bytearray(LAYOUT.object_bytes)] * 3


def test_a_corrupt_object_ends_the_run_and_is_condemned(
    store: DictionaryStore, loader: BlockLoader, corrupt: list[CorruptObject]
) -> None:
    store.fill(ids(5))
    broken = bytearray(store.objects[ids(5)[2], 1])
    broken[100] ^= 1
    store.objects[ids(5)[2], 1] = bytes(broken)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(5), Memory(5), soon())
    assert [load.wait(layer, soon()) for layer in range(3)] == [5, 2, 2]
    assert corrupt == [
        CorruptObject(address=store.server.address, model=MODEL, block_id=ids(5)[2], layer=1, generation=7)
    ]


def test_another_blocks_bytes_are_corrupt(
    store: DictionaryStore, loader: BlockLoader, corrupt: list[CorruptObject]
) -> None:
    """Right bytes with a right checksum, under a wrong identity."""
    store.fill(ids(2))
    for table in (store.objects, store.sums):
        table[ids(2)[0], 0] = table[ids(2)[1], 0]  # type: ignore[index]
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(2), Memory(2), soon())
    assert load.wait_all(soon()) == 0
    assert [(found.block_id, found.layer) for found in corrupt] == [(ids(2)[0], 0)]


def test_objects_of_another_size_are_data_loss(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(1))
    store.objects[ids(1)[0], 0] = b"short"
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), soon())
    assert load.wait(0, soon()) == 0
    assert isinstance(load.failure, DataLoss)


def test_a_stores_error_and_an_absent_store_give_nothing(store: DictionaryStore, loader: BlockLoader) -> None:
    store.refusal = NotFound("no such model")
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), soon())
    assert load.wait_all(soon()) == 0
    assert isinstance(load.failure, NotFound)
    load = loader.load("unix:/nowhere/at/all", MODEL, LAYOUT, ids(1), Memory(1), soon())
    assert load.wait_all(soon()) == 0
    assert isinstance(load.failure, Unavailable)


def test_a_store_that_stops_leaves_the_layers_that_came(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(2))
    store.may_reply.clear()
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(2), Memory(2), soon())
    assert load.wait(0, soon()) == 2
    threading.Timer(0.05, store.server.stop, [0.1]).start()
    assert load.wait(1, soon()) == 0
    assert load.wait(0, soon()) == 2


def test_a_slow_store_costs_the_loads_deadline(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(2))
    store.may_reply.clear()
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(2), Memory(2), Deadline.after(0.2))
    assert load.wait_all(soon()) == 0
    assert isinstance(load.failure, DeadlineExceeded)


def test_after_cancel_nothing_is_written(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(2))
    store.may_reply.clear()
    memory = Memory(2)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(2), memory, soon())
    assert load.wait(0, soon()) == 2
    load.cancel()
    assert load.ended
    store.may_reply.set()
    other = loader.load(store.server.address, MODEL, LAYOUT, ids(2), Memory(2), soon())
    assert other.wait_all(soon()) == 2
    assert memory.objects[1] == [bytes(LAYOUT.object_bytes)] * 2
    assert load.wait(1, soon()) == 0


def test_loads_in_the_queue_can_be_cancelled_and_close_ends_all(store: DictionaryStore) -> None:
    store.fill(ids(1))
    store.may_reply.clear()
    loader = BlockLoader(lambda _: None, loads_max=1, name="load-test")
    loads = [loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), soon()) for _ in range(4)]
    assert loads[0].wait(0, soon()) == 1
    loads[2].cancel()
    loader.close()
    assert [load.wait_all(soon()) for load in loads] == [0] * 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load-test")]
    with pytest.raises(Unavailable, match="closed"):
        loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), soon())


def test_layers_after_those_ahead_come_when_it_is_released(
    store: DictionaryStore, loader: BlockLoader
) -> None:
    store.fill(ids(3))
    memory = Memory(3)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(3), memory, soon(), ahead=1)
    assert load.wait(0, soon()) == 3
    with pytest.raises(DeadlineExceeded):
        load.wait(1, Deadline.after(0.05))
    assert memory.objects[1] == [bytes(LAYOUT.object_bytes)] * 3
    load.release()
    assert load.wait_all(soon()) == 3
    assert load.held_s > 0
    assert memory.objects == [[content(block_id, layer) for block_id in ids(3)] for layer in range(3)]


def test_with_none_ahead_nothing_is_asked_for_before_the_release(
    store: DictionaryStore, loader: BlockLoader
) -> None:
    store.fill(ids(1))
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), soon(), ahead=0)
    with pytest.raises(DeadlineExceeded):
        load.wait(0, Deadline.after(0.05))
    load.release()
    assert load.wait_all(soon()) == 1


def test_a_held_load_ends_by_its_deadline_and_by_cancel(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(1))
    late = loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), Deadline.after(0.05), ahead=1)
    assert late.wait_all(soon()) == 0
    assert isinstance(late.failure, DeadlineExceeded)
    cancelled = loader.load(store.server.address, MODEL, LAYOUT, ids(1), Memory(1), soon(), ahead=1)
    assert cancelled.wait(0, soon()) == 1
    cancelled.cancel()
    assert cancelled.wait_all(soon()) == 0


def test_a_narrowed_load_goes_on_with_fewer_blocks(store: DictionaryStore, loader: BlockLoader) -> None:
    store.fill(ids(4))
    store.may_reply.clear()
    memory = Memory(4)
    load = loader.load(store.server.address, MODEL, LAYOUT, ids(4), memory, soon())
    assert load.wait(0, soon()) == 4
    load.narrow(2)
    store.may_reply.set()
    assert load.wait_all(soon()) == 2
    assert load.failure is None
    kept = [content(block_id, 2) for block_id in ids(2)]
    assert memory.objects[2] == kept + [bytes(LAYOUT.object_bytes)] * 2
