"""Settles debts while this replica leads: ends what earlier leaders left, plans, and drives sagas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvcommons.errors import Unavailable
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.debtors import Debtors
from services.ledger.debts import DebtLedger
from services.ledger.etcd import Etcd, Listing
from services.ledger.saga import AskDebtors, Settlement, Steps, WriteSettlement, busy, settle, take_over
from services.ledger.settlement_plan import MemoryState, Recall, plan
from services.ledger.settlement_records import decode, encode
from services.ledger.settlement_reports import SettlementReports

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # before a step is asked for again
SETTLEMENTS_MAX = 16  # at once


@dataclass(slots=True)
class SettlementCounts:
    """Of settlements that this replica drove to their end."""

    ended: int = 0
    blocks: int = 0


class Settler:
    """On a connection of its own. `term` is this replica's as leader; `instances` the registry's."""

    def __init__(
        self,
        etcd: Etcd,
        ledger: DebtLedger,
        debtors: Debtors,
        counts: SettlementCounts,
        reports: SettlementReports,
        *,
        prefix: str,
        term: Callable[[], int | None],
        instances: Callable[[], Mapping[str, pb.Instance]],
        threshold_blocks: int,
        round_blocks: int,
        every_s: float,
    ) -> None:
        """`threshold_blocks`: the least that are worth a settlement; `round_blocks`: that each participant
        sets aside; `every_s`: between two looks at the debts."""
        self._etcd = etcd
        self._ledger = ledger
        self._debtors = debtors
        self._counts = counts
        self._reports = reports
        self._prefix = f"{prefix.rstrip('/')}/v1/settlements/".encode()
        self._term = term
        self._instances = instances
        self._threshold_blocks = threshold_blocks
        self._round_blocks = round_blocks
        self._every_s = every_s
        self._driven: dict[str, Settlement] = {}
        self._resting: dict[str, float] = {}  # by instance: until when heartbeats may not tell the outcome
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0

    async def run(self) -> None:
        """Until cancelled: what is under way then is ended by the next leader, or by its participants."""
        connected = False
        try:
            while True:
                await asyncio.sleep(self._every_s)
                term = self._term()
                if term is None:
                    continue
                try:
                    if not connected:
                        await self._etcd.reconnect()
                        connected = True
                    self._look(term, await self._etcd.list(self._prefix))
                    addresses = {one.control_address for one in self._instances().values()}
                    await self._debtors.forget_all_but(addresses)
                except Unavailable as error:
                    log.debug("nothing is settled: %s", error.message)
                    connected = False
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._debtors.close()
            await self._etcd.close()

    def _look(self, term: int, listing: Listing) -> None:
        found: list[Settlement] = []
        for record in listing.records:
            settlement = decode(record.value or b"")
            if settlement is None:
                log.error("etcd holds a record that is no settlement", extra={"key": repr(record.key)})
                continue
            found.append(settlement)
            # An earlier leader's, or one that this replica could not write on for a while.
            if settlement.id not in self._driven:
                log.info("takes a settlement over", extra={"settlement": settlement.id})
                self._start(take_over(settlement, term), settlement, record.revision, term)
        now = time.monotonic()
        self._resting = {name: until for name, until in self._resting.items() if until > now}
        occupied = busy(found) | busy(self._driven.values()) | self._resting.keys()
        instances = self._instances()
        rooms = {name: MemoryState.of(one.load) for name, one in instances.items()}
        debts = self._ledger.debts(instances.keys())
        for one in plan(debts, rooms, threshold=self._threshold_blocks, busy=occupied):
            if len(self._tasks) >= SETTLEMENTS_MAX:
                break
            if isinstance(one, Recall):
                self._rest({one.debtor, one.creditor})
                self._spawn(self._debtors.call_back(one.debtor, one.creditor, one.blocks))
                continue
            self._count += 1
            settlement = one.settlement(f"{term}-{self._count}", term, self._round_blocks)
            self._start(settle(settlement), settlement, 0, term)

    def _start(self, steps: Steps, settlement: Settlement, revision: int, term: int) -> None:
        self._driven[settlement.id] = settlement
        self._spawn(self._drive(steps, settlement, revision, term))

    async def _drive(self, steps: Steps, settlement: Settlement, revision: int, term: int) -> None:
        """Carries out what a saga yields."""
        value: object = None
        try:
            while True:
                try:
                    effect = steps.send(value)
                except StopIteration as stop:
                    self._ended(stop.value)
                    return
                if isinstance(effect, WriteSettlement):
                    written = await self._write(settlement.id, effect.settlement, revision, term)
                    value = written is not None
                    revision = written or revision
                    if written is not None and effect.settlement is not None:
                        self._reports.wrote(effect.settlement)
                elif isinstance(effect, AskDebtors):
                    value = await self._debtors.ask(effect.requests)
                else:
                    value = None
                    await asyncio.sleep(PAUSE_S)
        finally:
            self._rest(settlement.participants)
            self._reports.left(settlement.id)
            self._driven.pop(settlement.id, None)

    async def _write(self, name: str, settlement: Settlement | None, revision: int, term: int) -> int | None:
        """The new revision, also where the first answer was lost; None: another leader has written, or this
        replica does not lead any more."""
        key = self._prefix + name.encode()
        value = encode(settlement) if settlement is not None else None
        while self._term() == term:
            try:
                if value is None:
                    written = await self._etcd.delete(key, revision)
                else:
                    written = await self._etcd.swap(key, value, revision)
                if written is not None:
                    return written
                records = (await self._etcd.list(key)).records
            except Unavailable as error:
                log.debug("a settlement waits for etcd: %s", error.message)
                await asyncio.sleep(PAUSE_S)
                continue
            record = next((one for one in records if one.key == key), None)
            if (record.value if record is not None else None) == value:
                return record.revision if record is not None else revision
            return None
        return None

    def _ended(self, settlement: Settlement | None) -> None:
        if settlement is None:
            return
        blocks = sum(leg.settled_blocks for leg in settlement.legs)
        self._counts.ended += 1
        self._counts.blocks += blocks
        log.info(
            "a settlement has ended",
            extra={
                "settlement": settlement.id,
                "instances": ", ".join(leg.debtor for leg in settlement.legs),
                "rounds": settlement.round,
                "blocks": blocks,
            },
        )

    def _rest(self, names: frozenset[str] | set[str]) -> None:
        until = time.monotonic() + 2 * self._every_s
        self._resting.update(dict.fromkeys(names, until))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
