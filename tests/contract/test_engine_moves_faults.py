"""Creditors that die, hang or are slow while KV moves away from them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted, DataLoss, DeadlineExceeded, KVCommonsError
from kvcommons.holder.copying import read_blocks
from kvcommons.pb import holder_pb2, ledger_pb2
from kvcommons.pb.ledger_pb2_grpc import LedgerStub
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, ready
from tests.contract.engine_turns import turn
from tests.contract.test_engine_moves import ballast, debtor, lent, room, running
from tests.machine import scaled
from tests.pausing import pause

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("none_comes_home_by_itself")]
pytest_plugins = ("tests.contract.engine_fixtures",)

MOVED = 4
ROUND: dict[str, Any] = {"settlement": "s", "term": 1, "lease_ms": scaled(20_000), "round": 1}


class Interruption:
    """Something happens between two layers of the next copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strike: Callable[[], object] | None = None
        self._layers = 0
        monkeypatch.setattr("kvcommons.holder.client.read_blocks", self._interrupted)

    def _interrupted(self, *arguments: Any) -> None:
        self._layers += 1
        if self._layers == 2 and self.strike is not None:
            self.strike()
        read_blocks(*arguments)


async def frozen(
    engines: Stack, **changes: Any
) -> tuple[subprocess.Popen[bytes], asyncio.Task[Any], list[int]]:
    """A pool, a running sequence that lies there too, and its expected tokens; a settlement has frozen some
    of its blocks, and blocks here wait for them."""
    (pool,) = await engines.lenders(24, process=True)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="overflow", engine={"capacity_tokens": 40 * BLOCK}, lend_share=0.0, **changes
    )
    holding = await ballast(engines, decode, 30 * BLOCK - 8)
    tokens, expected = engines.reference.prompt(260, 140)
    task = await running(turn(prefill, decode, engines.model, tokens, 140))
    holding.cancel()
    await ready(lambda: room(engines, "decode", 14))
    stub = debtor(engines)
    known = {name: value for name, value in ROUND.items() if name != "round"}
    await stub.Prepare(holder_pb2.PrepareRequest(blocks=MOVED, **known), timeout=scaled(5))
    freeze = holder_pb2.FreezeDebtRequest(creditor="pool-0", blocks=MOVED, **ROUND)
    assert (await stub.FreezeDebt(freeze, timeout=scaled(5))).blocks == MOVED
    return pool, task, expected


async def ended(engines: Stack) -> None:
    """The leader gives up; nothing is left of it."""
    await debtor(engines).End(holder_pb2.EndRequest(settlement="s", term=1), timeout=scaled(30))
    await engines.idle("decode")
    assert (await engines.inspect("decode")).pledged_blocks == 0


@pytest.mark.usefixtures("unhurried")
async def test_a_creditor_dies_in_the_middle_of_copy_home(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruption = Interruption(monkeypatch)
    pool, task, _ = await frozen(engines)
    interruption.strike = pool.kill
    request = holder_pb2.RoundRequest(**ROUND)
    with contextlib.suppress(KVCommonsError):
        reply = await debtor(engines).CopyHome(request, timeout=scaled(30))
        assert reply.ended_blocks == MOVED  # its sequence was over by then
    with pytest.raises(DataLoss, match="compute it again"):
        await task
    await ended(engines)


async def test_a_creditor_that_hangs_for_a_moment_is_copied_from_all_the_same(
    engines: Stack, monkeypatch: pytest.MonkeyPatch, unhurried: SlowIterations
) -> None:
    interruption = Interruption(monkeypatch)
    pool, task, expected = await frozen(engines, attend_deadline_s=20.0)
    before, loop = await lent(engines, "pool-0"), asyncio.get_running_loop()

    def hang() -> None:
        pause(pool.pid)
        loop.call_soon_threadsafe(loop.call_later, 0.7, pool.send_signal, signal.SIGCONT)

    interruption.strike = hang
    request = holder_pb2.RoundRequest(**ROUND)
    began_s = time.monotonic()
    assert (await debtor(engines).CopyHome(request, timeout=scaled(30))).blocks == MOVED
    assert time.monotonic() - began_s > 0.6
    assert not task.done()
    for step in ("SwitchHome", "ReleaseDebt"):
        assert (await getattr(debtor(engines), step)(request, timeout=scaled(20))).blocks == MOVED
    assert await lent(engines, "pool-0") <= before - MOVED + 8  # it may have grown there
    unhurried.over()
    assert (await task).tokens == expected
    await ended(engines)
    await engines.idle("pool-0")


@pytest.mark.usefixtures("unhurried")
async def test_a_creditor_that_hangs_for_longer_than_its_leases_costs_its_sequence_and_nothing_else(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruption = Interruption(monkeypatch)
    pool, task, _ = await frozen(engines, attend_deadline_s=2.0, lease_ms=3000)
    interruption.strike = lambda: pause(pool.pid)
    request = holder_pb2.RoundRequest(**ROUND)
    with pytest.raises(DeadlineExceeded):
        await debtor(engines).CopyHome(request, timeout=scaled(4))
    with pytest.raises(DataLoss):
        await task
    pool.send_signal(signal.SIGCONT)
    with contextlib.suppress(KVCommonsError):  # the copy ends, well or not; there is nothing to switch
        await debtor(engines).CopyHome(request, timeout=scaled(30))
        assert (await debtor(engines).SwitchHome(request, timeout=scaled(20))).blocks == 0
    await ended(engines)
    await engines.idle("pool-0")


# ---- slow


@contextlib.asynccontextmanager
async def slowed(pool: subprocess.Popen[bytes]) -> AsyncIterator[None]:
    """It runs for a fraction of the time, as on a machine that is somebody else's."""

    async def hold_up() -> None:
        while True:
            pool.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
            pool.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(hold_up())
    try:
        yield
    finally:
        task.cancel()
        pool.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
async def test_kv_leaves_a_creditor_that_is_slow(engines: Stack) -> None:
    pools = await engines.lenders(24, 24, 24, process=True)
    names = [f"pool-{number}" for number in range(len(pools))]
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="overflow", engine={"capacity_tokens": 10 * BLOCK}, attend_deadline_s=20.0
    )
    tasks, expected = [], []
    for number in range(2):
        tokens, following = engines.reference.prompt(260, 240, 1 + 100 * number)
        tasks.append(await running(turn(prefill, decode, engines.model, tokens, 240)))
        expected.append(following)
    before = {name: await lent(engines, name) for name in names}
    slow = max(names, key=lambda name: before[name])
    assert sum(blocks > 0 for blocks in before.values()) >= 2  # it has a peer
    async with slowed(pools[names.index(slow)]):

        async def left() -> None:
            if await lent(engines, slow) > 2:  # but for what it grows from
                raise CapacityExhausted("not yet")

        await ready(left)
        assert not all(task.done() for task in tasks)
        request = ledger_pb2.CandidatesRequest(debtor="x", host="here", model=engines.model, blocks=1)
        named = await LedgerStub(engines.channel("ledger")).Candidates(request, timeout=scaled(5))
        assert slow not in [one.id for one in named.creditors]
    assert [(await task).tokens for task in tasks] == expected
    await engines.idle("decode", *names)
