"""Leases, late writes, kills and drains: memory that is lent comes back, and what is freed is not touched."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcommons.errors import CapacityExhausted, DeadlineExceeded, StaleEpoch, Unavailable
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport.base import Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import pack
from tests.contract.holder_cases import (
    BLOCKS,
    LAYOUT,
    PoolProcess,
    Tokens,
    begin_attend,
    embedded,
    pools,
    soon,
)
from tests.machine import scaled
from tests.pausing import pause
from tests.waiting import eventually

LEASE_S = scaled(2.0)


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    """A pool of its own for each test: they kill it."""
    with pools(None) as (pool,):
        yield pool


async def test_leases_are_renewed_while_the_debtor_lives_and_reclaimed_after(socket_folder: Path) -> None:
    async with embedded(socket_folder) as served:
        holder = served.holder
        lost: list[SegmentRef] = []
        async with served.debtor(lease_s=LEASE_S, lost=lost) as client:
            ref = await client.reserve("kept", 3, first_position=0, timeout_s=scaled(5))
            dead = RemoteHolder(
                served.control,
                served.data,
                owner="dead",
                model=served.model,
                lost=lost.extend,
                lease_s=LEASE_S,
            )
            orphan = await dead.reserve("orphan", 5, first_position=0, timeout_s=scaled(5))
            assert holder.allocator.in_use == 8
            await dead.close()
            await eventually(lambda: holder.allocator.in_use == 3)
            await asyncio.sleep(1.5 * LEASE_S)
            assert (holder.allocator.in_use, lost, client.borrowed) == (3, [], [ref])
            with pytest.raises(StaleEpoch):
                client.read_blocks(orphan, 0, 0, [bytearray(LAYOUT.object_bytes)], soon())
        assert holder.allocator.in_use == 0


async def test_leases_outlast_a_holder_that_is_held_up(socket_folder: Path) -> None:
    """Its clock goes on meanwhile, and the sweep comes before the renewals that it has not read."""
    async with embedded(socket_folder) as served, served.debtor(lease_s=LEASE_S) as client:
        holder = served.holder
        await client.reserve("s", 3, first_position=0, timeout_s=scaled(5))
        (segment,) = holder.segments
        lent_until_s = segment.expires_s or 0.0
        time.sleep(1.5 * LEASE_S)
        await eventually(lambda: (segment.expires_s or 0.0) > lent_until_s or not holder.segments)
        assert holder.allocator.in_use == 3


async def test_a_debtor_learns_what_it_has_lost(socket_folder: Path) -> None:
    lost: list[SegmentRef] = []
    async with embedded(socket_folder) as served, served.debtor(lease_s=LEASE_S, lost=lost) as client:
        gone = await client.reserve("a", 1, first_position=0, timeout_s=scaled(5))
        kept = await client.reserve("b", 1, first_position=0, timeout_s=scaled(5))
        served.holder.release([gone])
        await eventually(lambda: lost)
        assert (lost, client.borrowed) == ([gone], [kept])


@pytest.mark.parametrize("dies", [False, True])
async def test_a_write_that_is_under_way_keeps_its_blocks_from_others(
    socket_folder: Path, dies: bool
) -> None:
    """A sender stalls in the middle of a payload; its segment is released; nobody gets the blocks until it is
    over, or the sender is gone."""
    async with embedded(socket_folder) as served, served.debtor() as client:
        holder = served.holder
        ref = await client.reserve("s", 2, first_position=0, timeout_s=scaled(5))
        write = pb.WriteBlocks(handle=ref.handle, epoch=ref.epoch, blocks=2)
        head = pb.DataRequest(deadline_ms=20_000, write_blocks=write).SerializeToString()
        raw = socket.create_connection(("127.0.0.1", int(served.data.rpartition(":")[2])))
        size = 2 * LAYOUT.object_bytes
        raw.sendall(pack(len(head), size, Limits()) + head + bytes(100))
        await eventually(lambda: any(segment.pins for segment, _ in holder.held()))
        await client.release([ref], timeout_s=scaled(5))
        with pytest.raises(CapacityExhausted):
            await client.reserve("other", BLOCKS - 1, first_position=0, timeout_s=scaled(5))
        with pytest.raises(StaleEpoch):
            client.write_blocks(ref, 0, 0, Tokens(8, 0).objects(0, 8), soon())
        if dies:
            raw.close()
        else:
            raw.sendall(bytes(size - 100))
        await eventually(lambda: holder.allocator.in_use == 0)
        raw.close()


async def test_a_killed_pool_is_noticed_and_its_next_life_refuses_the_old_handles(pool: PoolProcess) -> None:
    served = await pool.ready()
    lost: list[SegmentRef] = []
    async with served.debtor(lease_s=LEASE_S, lost=lost) as client:
        ref = await client.reserve("s", 2, first_position=0, timeout_s=scaled(5))
        part = PlanRow.of(ref, position=9, length=0)
        begin_attend(client, 0, [part], torch.zeros(1, 4, 16), [], soon()).finish()[0]
        pause(pool.process.pid)
        started = Deadline.after(0.3)
        pending = begin_attend(client, 0, [part], torch.zeros(1, 4, 16), [], started)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(pending.finish)
        pending = begin_attend(client, 0, [part], torch.zeros(1, 4, 16), [], soon())
        pool.kill()
        with pytest.raises(Unavailable):
            await asyncio.to_thread(pending.finish)
        with pytest.raises(Unavailable):
            begin_attend(client, 0, [part], torch.zeros(1, 4, 16), [], soon()).finish()
        await eventually(lambda: lost == [ref])
        heir = PoolProcess(pool.folder)
        try:
            await heir.ready()
            with pytest.raises(StaleEpoch, match="another life"):
                begin_attend(client, 0, [part], torch.zeros(1, 4, 16), [], soon()).finish()[0]
            again = await client.reserve("s", 2, first_position=0, timeout_s=scaled(10))
            assert again.epoch > ref.epoch
            reply = await client.inspect(timeout_s=scaled(5))
            assert (reply.free_blocks, len(reply.segments)) == (BLOCKS - 2, 1)
        finally:
            heir.kill()


async def test_a_pool_that_is_stopped_waits_for_what_is_lent(pool: PoolProcess) -> None:
    served = await pool.ready()
    async with served.debtor() as client:
        ref = await client.reserve("s", 2, first_position=0, timeout_s=scaled(5))
        pool.terminate()

        async def refused() -> bool:
            try:
                other = await client.reserve("late", 1, first_position=0, timeout_s=scaled(5))
            except CapacityExhausted:
                return True
            await client.release([other], timeout_s=scaled(5))
            return False

        deadline = soon()
        while not await refused():
            deadline.check()
            await asyncio.sleep(0.02)
        client.write_blocks(ref, 0, 0, Tokens(8, 0).objects(0, 8), soon())
        assert pool.process.poll() is None
        await client.release([ref], timeout_s=scaled(5))
        assert await pool.exit_code() == 0
    assert not Path(served.data.removeprefix("unix:")).exists()
