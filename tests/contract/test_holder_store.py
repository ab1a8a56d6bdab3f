"""A holder's Load and Save, and the loader and saver under them, against a real kvstore process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.blockstore.loader import CorruptObject
from kvcommons.errors import InvalidInput, StaleEpoch
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.copying import BlockSave
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from tests.contract.holder_cases import FINGERPRINT, LAYOUT, Tokens, all_back, embedded, soon
from tests.contract.kvstore_process import KvstoreProcess
from tests.machine import scaled

IDS = [bytes([number]) * 32 for number in range(1, 6)]
TOKENS = len(IDS) * LAYOUT.block_tokens


@pytest.fixture
def store(socket_folder: Path, tmp_path: Path) -> Iterator[str]:
    """A kvstore's data address."""
    sockets = socket_folder / "store"
    sockets.mkdir()
    kvstore = KvstoreProcess(sockets, tmp_path / "data").wait_ready()
    yield kvstore.data_address
    kvstore.kill()


def objects(layer: int) -> list[memoryview]:
    return Tokens(TOKENS, seed=layer).objects(0, TOKENS)


async def stored(store: str, ids: list[bytes]) -> int:
    """How many leading blocks the store gives."""

    def ask() -> int:
        client = DataClient(store)
        request = pb.DataRequest(get_layers=pb.GetLayers(model=FINGERPRINT, block_ids=ids, layers=1))
        try:
            reply = client.call(request, deadline=soon())
        finally:
            client.close()
        return len(reply.got_layer.checksums)

    return await asyncio.to_thread(ask)


async def save(client: RemoteHolder, ref: SegmentRef, store: str, ids: list[bytes], *, first: int) -> None:
    parent = IDS[first - 1] if first else b""
    blocks = BlockSave(
        store=store, tenant="t", parent=parent, block_ids=ids, first_block=first, first_index=first
    )
    await client.save(ref, blocks, timeout_s=scaled(5))


async def test_what_one_holder_saves_another_segment_loads(socket_folder: Path, store: str) -> None:
    corrupt: list[CorruptObject] = []
    async with embedded(socket_folder, corrupt=corrupt) as served, served.debtor() as client:
        ref = await client.reserve("first", 5, first_position=0, timeout_s=scaled(5))
        for layer in range(LAYOUT.layers):
            client.write_blocks(ref, layer, 0, objects(layer), soon())
        await save(client, ref, store, IDS[:3], first=0)
        await save(client, ref, store, IDS[3:], first=3)
        # Released at once: what is being saved stays until it is there.
        await client.release([ref], timeout_s=scaled(5))
        await all_back(served)
        assert await stored(store, IDS) == 5

        again = await client.reserve("second", 4, first_position=0, timeout_s=scaled(5))
        loaded = await client.load(again, store, IDS[1:], first_block=0, timeout_s=scaled(10))
        assert loaded == 4
        for layer in range(LAYOUT.layers):
            into = [bytearray(LAYOUT.object_bytes) for _ in range(4)]
            client.read_blocks(again, layer, 0, into, soon())
            assert into == objects(layer)[1:]
        absent = [*IDS[:2], b"absent" + bytes(26), IDS[3]]
        assert await client.load(again, store, absent, first_block=0, timeout_s=scaled(10)) == 2
        assert corrupt == []


async def test_a_load_or_save_that_cannot_be_says_why(socket_folder: Path, store: str) -> None:
    async with embedded(socket_folder) as served, served.debtor() as client:
        ref = await client.reserve("s", 2, first_position=0, timeout_s=scaled(5))
        away = f"unix:{socket_folder}/nobody"
        assert await client.load(ref, away, IDS[:2], first_block=0, timeout_s=scaled(5)) == 0
        with pytest.raises(InvalidInput, match="reserve more"):
            await client.load(ref, away, IDS, first_block=0, timeout_s=scaled(5))
        with pytest.raises(InvalidInput, match="nothing to save"):
            await save(client, ref, away, [], first=0)
        # A store that stays away costs the hold time, then the blocks are free.
        await save(client, ref, away, IDS[:2], first=0)
        await client.release([ref], timeout_s=scaled(5))
        await all_back(served)
        with pytest.raises(StaleEpoch):
            await client.load(ref, away, IDS[:1], first_block=0, timeout_s=scaled(5))


async def test_a_load_ends_at_its_deadline(socket_folder: Path) -> None:
    """A store that accepts and never answers."""
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(f"{socket_folder}/silent")
    silent.listen()
    async with embedded(socket_folder) as served, served.debtor() as client:
        ref = await client.reserve("s", 2, first_position=0, timeout_s=scaled(5))
        started = Deadline.after(scaled(10))
        with pytest.raises(Exception, match=r"(?i)deadline"):
            await client.load(ref, f"unix:{socket_folder}/silent", IDS[:2], first_block=0, timeout_s=0.4)
        assert started.left() > scaled(8)
        await client.release([ref], timeout_s=scaled(5))
        await all_back(served)
    silent.close()
