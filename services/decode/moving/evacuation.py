"""KV leaves holders that are slow: home as far as there is room, else to others."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Gauge

from kvcommons.engine.core import Core
from kvcommons.errors import KVCommonsError
from kvcommons.holder.creditor import Creditor
from services.decode.borrowing.loans import Lenders
from services.decode.moving.mover import SPARE_SHARE, Mover
from services.decode.periodic import PeriodicTask

log = logging.getLogger(__name__)

LOOK_S = 1.0
BLOCKS = 16  # at once, of each: what moves is in the way of partials


class Draining:
    """Looks for slow creditors, tells the ledger, and moves away what lies there; the block that a sequence
    grows from stays until it has grown elsewhere."""

    def __init__(self, core: Core, mover: Mover, lenders: Lenders, registry: CollectorRegistry) -> None:
        self._spare = max(2, int(core.allocator.total * SPARE_SHARE))
        self._mover = mover
        self._lenders = lenders
        self._slow = Gauge(
            "kvcommons_slow_creditors", "Holders of this instance's KV that answer far too late.",
            registry=registry,
        )  # fmt: skip
        self.task = PeriodicTask("draining", LOOK_S, self._look)

    async def _look(self) -> None:
        slow = await self._lenders.look_for_slow()
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
