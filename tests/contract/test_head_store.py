"""What head groups read from stores and write there, where a store or a part stands still."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcommons.blockstore.loader import CorruptObject
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.errors import Unavailable
from kvcommons.holder.copying import BlockSave
from kvcommons.holder.head_store import WholeStore
from kvcommons.rblock.heads import divided
from kvcommons.transport.deadline import Deadline
from tests.contract.holder_cases import FINGERPRINT, LAYOUT, Tokens, embedded, group_of, soon
from tests.contract.kvstore_process import KvstoreProcess
from tests.machine import scaled
from tests.waiting import eventually

IDS = [bytes([number]) * 32 for number in range(1, 6)]
MADE = Tokens(20, 3)


@pytest.fixture
def silent() -> Iterator[str]:
    """A store's address where nobody ever answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(32)
        yield f"tcp:127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
async def store() -> AsyncIterator[WholeStore]:
    saver, corrupt = BlockSaver("debtor", hold_s=20), list[CorruptObject]()
    store = WholeStore(model=FINGERPRINT, layout=LAYOUT, condemn=corrupt.append, saver=saver)
    yield store
    await asyncio.to_thread(store.close, Deadline.after(1))
    await asyncio.to_thread(saver.close, Deadline.after(1))


def nothing(layer: int, first: int, objects: Sequence[Any]) -> None:
    raise AssertionError("nothing came")


def filled(layer: int, objects: Sequence[Any], deadline: Deadline) -> None:
    for into, made in zip(objects, MADE.objects(0, len(objects) * LAYOUT.block_tokens), strict=True):
        into[:] = made


async def save(store: WholeStore, address: str, read: Any = filled, timeout_s: float = 5.0) -> None:
    blocks = BlockSave(store=address, tenant="t", parent=b"", block_ids=IDS, first_block=0, first_index=0)
    await store.save(blocks, read, timeout_s=timeout_s)


async def test_loads_from_a_store_that_stands_still_hold_up_nothing_else(
    silent: str, store: WholeStore
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    loads = [asyncio.create_task(store.load(silent, IDS, nothing, soon())) for _ in range(6)]
    await asyncio.sleep(0.1)
    await asyncio.wait_for(asyncio.to_thread(lambda: None), 10)
    await asyncio.wait_for(save(store, silent), 10)
    for load in loads:
        load.cancel()
    assert all(
        isinstance(one, asyncio.CancelledError)
        for one in await asyncio.gather(*loads, return_exceptions=True)
    )
    # Those that were cancelled make room.
    assert await asyncio.wait_for(store.load(silent, IDS, nothing, Deadline.after(0.1)), 10) == 0


async def test_a_save_has_its_time_from_its_turn_on(silent: str, store: WholeStore) -> None:
    go, begun, left = threading.Event(), [], []

    def slow(layer: int, objects: Sequence[Any], deadline: Deadline) -> None:
        begun.append(layer)
        assert go.wait(scaled(20))

    def quick(layer: int, objects: Sequence[Any], deadline: Deadline) -> None:
        left.append(deadline.left())

    first = [asyncio.create_task(save(store, silent, slow)) for _ in range(2)]
    await eventually(lambda: len(begun) == len(first), "nobody else has a turn")
    last = asyncio.create_task(save(store, silent, quick, timeout_s=scaled(0.5)))
    await asyncio.sleep(0)  # it waits for its turn
    await asyncio.sleep(scaled(0.6))
    go.set()
    await asyncio.gather(*first, last)
    assert left[0] > 0


async def test_it_closes_while_a_part_stands_still(
    socket_folder: Path, tmp_path: Path, store: WholeStore
) -> None:
    kvstore = KvstoreProcess(socket_folder, tmp_path / "data").wait_ready()
    writing, go, ended = threading.Event(), threading.Event(), threading.Event()

    def stuck(layer: int, first: int, objects: Sequence[Any]) -> None:
        writing.set()
        try:
            assert go.wait(20)
        finally:
            ended.set()

    try:
        await save(store, kvstore.data_address)
        load = asyncio.create_task(store.load(kvstore.data_address, IDS, stuck, soon()))
        while not writing.is_set():
            if load.done():  # the save had not arrived
                load = asyncio.create_task(store.load(kvstore.data_address, IDS, stuck, soon()))
            await asyncio.sleep(0.02)
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
        await asyncio.to_thread(store.close, Deadline.after(0.1))
        assert not ended.is_set()
        with pytest.raises(Unavailable):
            await save(store, kvstore.data_address)
    finally:
        go.set()
        kvstore.kill()
    await eventually(ended.is_set)


async def test_blocks_come_from_a_store_and_go_there(
    socket_folder: Path, tmp_path: Path, store: WholeStore
) -> None:
    sockets = socket_folder / "store"
    sockets.mkdir()
    kvstore = KvstoreProcess(sockets, tmp_path / "data").wait_ready()
    address = kvstore.data_address
    try:
        async with AsyncExitStack() as stack:
            parts = [
                await stack.enter_async_context(embedded(socket_folder, part=part)) for part in divided(2)
            ]
            group = await stack.enter_async_context(group_of(parts, store=store))
            whole = await stack.enter_async_context(embedded(socket_folder))
            alone = await stack.enter_async_context(whole.debtor())
            ref = await group.reserve("first", 5, first_position=0, timeout_s=scaled(5))
            for layer in range(LAYOUT.layers):
                group.write_blocks(ref, layer, 0, MADE.objects(0, 20), soon())
            blocks = BlockSave(
                store=address, tenant="t", parent=b"", block_ids=IDS[:4], first_block=0, first_index=0
            )
            await group.save(ref, blocks, timeout_s=scaled(5))
            await group.release([ref], timeout_s=scaled(5))  # saves wait in a buffer of their own
            until = Deadline.after(20)
            target = await alone.reserve("second", 3, first_position=0, timeout_s=scaled(5))
            while await alone.load(target, address, IDS[:3], first_block=0, timeout_s=scaled(10)) < 3:
                until.check("the save to arrive")
                await asyncio.sleep(0.05)
            again = await group.reserve("third", 4, first_position=0, timeout_s=scaled(5))
            assert await group.load(again, address, IDS[1:], first_block=1, timeout_s=scaled(10)) == 3
            for layer in range(LAYOUT.layers):
                into = [bytearray(LAYOUT.object_bytes) for _ in range(3)]
                alone.read_blocks(target, layer, 0, into, soon())
                assert into == MADE.objects(0, 12)
                group.read_blocks(again, layer, 1, into, soon())
                assert into == MADE.objects(4, 16)
    finally:
        kvstore.kill()
