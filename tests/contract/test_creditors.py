"""Creditors that are gone are forgotten, with all that was kept for them; none that anything lies on is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcommons.blockstore.loader import CorruptObject
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.head_store import WholeStore
from kvcommons.pb import ledger_pb2
from kvcommons.rblock.heads import divided
from kvcommons.transport.deadline import Deadline
from services.decode.borrowing.creditors import FORGET_S, QUIET_S, Creditors, Debtor
from tests.contract.holder_cases import BLOCK_TOKENS, FINGERPRINT, LAYOUT, embedded
from tests.machine import scaled
from tests.waiting import eventually


@dataclass
class Known:
    creditors: Creditors
    now_s: float = 1000.0
    used: set[Creditor] = field(default_factory=set)

    async def after(self, seconds: float) -> int:
        """How many parts are kept, once the rest is forgotten."""
        self.now_s += seconds
        await self.creditors.forget()
        return kept()


def kept() -> int:
    """Holders whose leases are renewed."""
    return sum(task.get_name() == "renew" for task in asyncio.all_tasks())


@asynccontextmanager
async def knowing() -> AsyncIterator[Known]:
    saver, corrupt = BlockSaver("debtor", hold_s=1), list[CorruptObject]()
    store = WholeStore(model=FINGERPRINT, layout=LAYOUT, condemn=corrupt.append, saver=saver)
    known: Known
    known = Known(
        Creditors(
            Debtor(instance_id="d", model=FINGERPRINT, block_tokens=BLOCK_TOKENS, store=store),
            lease_s=10.0,
            lost=lambda holder, refs: None,
            waited=lambda holder, seconds, answered: None,
            used=lambda: known.used,
            clock=lambda: known.now_s,
        )
    )
    try:
        yield known
    finally:
        await known.creditors.close()
        assert kept() == 0
        await asyncio.to_thread(store.close, Deadline.after(1))
        await asyncio.to_thread(saver.close, Deadline.after(1))


def pool(control: str, data: str = "tcp:127.0.0.1:9") -> ledger_pb2.Instance:
    return ledger_pb2.Instance(id=f"at {control}", control_address=control, data_address=data)


def group(*members: ledger_pb2.Instance) -> ledger_pb2.Instance:
    whole = ledger_pb2.Instance(members=members)
    whole.MergeFrom(members[0])
    return whole


async def test_parts_that_start_again_elsewhere_leave_nothing_behind() -> None:
    async with knowing() as known:
        first, counts = pool("tcp:127.0.0.1:2"), []
        for port in range(3, 9):
            known.creditors.of(group(first, pool(f"tcp:127.0.0.1:{port}")))
            counts.append(await known.after(QUIET_S))
        assert counts == [2] * 6
        assert known.creditors.find("at tcp:127.0.0.1:7") is None
        assert known.creditors.find("at tcp:127.0.0.1:8") is not None


async def test_one_that_nobody_names_is_forgotten_later() -> None:
    async with knowing() as known:
        one = pool("tcp:127.0.0.1:2")
        holder = known.creditors.of(one)
        known.creditors.of(pool("tcp:127.0.0.1:3"))
        assert await known.after(FORGET_S - 1) == 2
        assert known.creditors.of(one) is holder
        assert await known.after(1) == 1
        known.used = {holder}
        assert await known.after(FORGET_S) == 1
        known.used = set()
        assert await known.after(QUIET_S) == 0
        assert known.creditors.of(one) is not holder


async def test_one_where_something_lies_is_kept_until_it_was_given_back(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.borrowing.creditors.LOOK_S", 0.01)
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(embedded(socket_folder, part=part)) for part in divided(2)]
        known = await stack.enter_async_context(knowing())
        parts = [pool(one.control, one.data) for one in served]
        before = known.creditors.of(group(*parts))
        ref = await before.reserve("sequence", 2, first_position=0, timeout_s=scaled(5))
        now = known.creditors.of(group(parts[0], pool("tcp:127.0.0.1:3")))
        assert await known.after(2 * FORGET_S) == 2
        assert before.borrowed == [ref]
        await before.release([ref], timeout_s=scaled(5))
        assert await known.after(QUIET_S - 1) == 2  # a call may be under way
        known.now_s += 1
        await eventually(lambda: kept() == 0)
        assert known.creditors.of(group(parts[0], pool("tcp:127.0.0.1:3"))) is not now
