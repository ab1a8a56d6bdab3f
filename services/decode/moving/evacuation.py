"""Evacuates KV from slow holders: home as far as there is room, otherwise to other holders."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Gauge

from kvcommons.engine.core import Core
from kvcommons.errors import KVCommonsError
from kvcommons.holder.head_group import Creditor
from services.decode.borrowing.loans import Loans
from services.decode.moving.mover import SPARE_SHARE, Mover
from services.decode.periodic import PeriodicTask

log = logging.getLogger(__name__)

LOOK_S = 1.0
BLOCKS = 16  # moved at once, of each holder: copying competes with attention for the link


class Evacuation:
    """Finds slow creditors, reports them to the ledger, and moves the KV there to other places. The block
    that a sequence grows in stays until the sequence grows elsewhere."""

    def __init__(self, core: Core, mover: Mover, loans: Loans, registry: CollectorRegistry) -> None:
        self._spare = max(2, int(core.allocator.total * SPARE_SHARE))
        self._mover = mover
        self._loans = loans
        self._slow = Gauge(
            "kvcommons_slow_creditors", "Holders of this instance's KV that answer far too late.",
            registry=registry,
        )  # fmt: skip
        self.task = PeriodicTask("evacuation", LOOK_S, self._look)

    async def _look(self) -> None:
        slow = await self._loans.look_for_slow()
        self._slow.set(len(slow))
        for holder in slow:
            try:
                await self._mover.to_the_end(self._drain(holder))
            except KVCommonsError as error:
                log.info("blocks stay at a slow holder: %s", error.message)

    async def _drain(self, holder: Creditor) -> None:
        home = await self._mover.bring_home(BLOCKS, holder=holder, spare=self._spare)
        if home < BLOCKS:
            await self._mover.send_away(BLOCKS - home, holder)
