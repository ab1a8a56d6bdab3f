"""Elects this replica leader through etcd, if nobody else is: see `Leadership`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from kvcommons.errors import Unavailable
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.etcd import Etcd
from services.ledger.leadership import Campaign, Leadership

log = logging.getLogger(__name__)

ROUNDS_PER_LEASE = 4


class Election:
    """On a connection of its own: a renewal waits for nothing else."""

    def __init__(self, etcd: Etcd, *, prefix: str, instance_id: str, lease_s: int) -> None:
        self._etcd = etcd
        self._key = f"{prefix.rstrip('/')}/v1/leader".encode()
        self._value = pb.Leader(instance=instance_id).SerializeToString()
        self._lease_s = lease_s
        self._lease_id = 0
        self._leadership = Leadership(lease_s=lease_s)
        self._leaving = False

    def term(self) -> int | None:
        """Of this replica as leader; None while it does not lead, for all that is certain."""
        return self._leadership.term(time.monotonic())

    async def run(self) -> None:
        """Until cancelled."""
        connected = False
        try:
            while not self._leaving:
                try:
                    if not connected:
                        await self._etcd.reconnect()
                        connected = True
                    await self._round()
                except Unavailable as error:
                    log.debug("no election: %s", error.message)
                    connected = False
                await asyncio.sleep(self._lease_s / ROUNDS_PER_LEASE)
        finally:
            await self._etcd.close()

    async def leave(self) -> None:
        """For good, so that another replica leads at once."""
        self._leaving = True
        if self.term() is not None:
            self._leadership.lost()
            try:
                await self._etcd.revoke(self._lease_id)
            except Unavailable as error:
                log.info("another replica leads when the lease has run out: %s", error.message)

    async def _round(self) -> None:
        asked_at = time.monotonic()
        match self._leadership.next(asked_at):
            case Campaign():
                if (await self._etcd.list(self._key)).records:
                    return  # somebody leads
                # A lease of its own each time: one that has run out unnoticed may not come to life again.
                self._lease_id = secrets.randbits(62) + 1
                term = await self._etcd.create(
                    self._key, self._value, lease_id=self._lease_id, lease_s=self._lease_s
                )
                if term is None:
                    await self._etcd.revoke(self._lease_id)
                else:
                    log.info("leads the ledgers", extra={"term": term})
                    self._leadership.won(term, asked_at)
            case _:
                if await self._etcd.keep_alive(self._lease_id):
                    self._leadership.renewed(asked_at)
                else:
                    log.info("does not lead the ledgers any more")
                    self._leadership.lost()
