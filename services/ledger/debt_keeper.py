"""Keeps debts and etcd in step: lists and watches, and writes what was heard, by compare-and-swap."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from google.protobuf.message import DecodeError

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.debts import CompareAndSwap, DebtLedger
from services.ledger.etcd import Etcd, Listing, Record
from services.ledger.keeping import keep

log = logging.getLogger(__name__)

ROUND_S = 0.3


class DebtKeeper:
    """On a connection of its own. `living` gives the registry's instances, None while they are not known for
    certain; `leads` says whether this replica may write off debts."""

    def __init__(
        self,
        etcd: Etcd,
        ledger: DebtLedger,
        *,
        prefix: str,
        living: Callable[[], Collection[str] | None],
        leads: Callable[[], bool],
    ) -> None:
        self._etcd = etcd
        self._ledger = ledger
        self._prefix = f"{prefix.rstrip('/')}/v1/debts/".encode()
        self._living = living
        self._leads = leads

    async def run(self) -> None:
        """Until cancelled."""
        await keep(
            self._etcd,
            self._prefix,
            listed=self._listed,
            changed=lambda record: self._ledger.stored(
                self._creditor(record), record.revision, _loans(record)
            ),
            write=self._write_always,
            away=lambda error: log.debug("the debts in etcd stay as they are: %s", error.message),
        )

    def _listed(self, listing: Listing) -> None:
        records = {
            self._creditor(record): (record.revision, loans)
            for record in listing.records
            if (loans := _loans(record)) is not None
        }
        self._ledger.listed(listing.revision, records)

    async def _write_always(self) -> None:
        while True:
            due = self._ledger.writes()
            living = self._living()
            if living is not None and self._leads():
                due += self._ledger.write_offs(living, time.monotonic())
            for swap in due:
                await self._write(swap)
            await asyncio.sleep(ROUND_S)

    async def _write(self, swap: CompareAndSwap) -> None:
        key = self._prefix + swap.creditor.encode()
        if swap.loans is None:
            revision = await self._etcd.delete(key, swap.revision)
            if revision is not None:
                log.info("wrote off the debts to an instance that is gone", extra={"peer": swap.creditor})
        else:
            value = pb.Loans(creditor=swap.creditor, blocks=swap.loans).SerializeToString(deterministic=True)
            revision = await self._etcd.swap(key, value, swap.revision)
        if revision is not None:  # else another replica was faster: the watch tells what it wrote
            self._ledger.stored(swap.creditor, revision, swap.loans)

    def _creditor(self, record: Record) -> str:
        return record.key.removeprefix(self._prefix).decode(errors="replace")


def _loans(record: Record) -> dict[str, int] | None:
    """None: deleted, or no record of loans."""
    if record.value is None:
        return None
    try:
        return dict(pb.Loans.FromString(record.value).blocks)
    except DecodeError:
        log.error("etcd holds a record that is none of loans", extra={"key": repr(record.key)})
        return None
