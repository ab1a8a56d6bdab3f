"""Which session records are the stack's: of several kvstores, only those that keep them in one place serve.

That place is chosen once and kept in etcd, so that a kvstore with a folder of its own never stands in for one
that is away: its sessions would look empty. Any replica of the ledger may choose; of two that do so at once,
one wins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from services.ledger.etcd import Etcd, Listing, Record
from services.ledger.keeping import keep
from services.ledger.registry import Registry

log = logging.getLogger(__name__)

ROUND_S = 0.2
DATABASE = "database "  # begins the name of a place that is one


def next_place(stored: str, present: Collection[str], lost: Collection[str]) -> str:
    """Where the records are, from where they were and from where those kvstores have theirs that are there.

    A folder stays for as long as nobody says that it is lost. A database was named by an operator: it follows
    on whatever no kvstore has any more.
    """
    if stored in present:
        return stored
    databases = [place for place in present if place.startswith(DATABASE)]
    free = not stored or stored in lost
    return min(databases or (present if free else ()), default=stored)


class PlaceChoice:
    """Which place follows on which, from who is there. Who is heard once is there for as long as its lease:
    one forged heartbeat, while the kvstore of a folder restarts, makes no place the stack's."""

    def __init__(self, lost: Collection[str], *, lease_s: float) -> None:
        """`lost`: places that an operator has given up."""
        self._lost = frozenset(lost)
        self._stands_s = 2 * lease_s
        self._since: dict[str, float] = {}  # when places came that have been there since

    def next(self, stored: str, present: Collection[str], now: float) -> str:
        """Called again and again. `now`: seconds of a monotonic clock."""
        self._since = {place: self._since.get(place, now) for place in present}
        if stored and stored not in present:
            present = {place for place, since in self._since.items() if now - since >= self._stands_s}
        return next_place(stored, present, self._lost)


class RecordsKeeper:
    """`connected` says whether the registry is current; `changed` is called when another place counts.

    A connection of its own, so that neither this nor the registry waits for the other.
    """

    def __init__(
        self,
        etcd: Etcd,
        registry: Registry,
        *,
        prefix: str,
        choice: PlaceChoice,
        connected: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self._etcd = etcd
        self._registry = registry
        self._key = f"{prefix.rstrip('/')}/v1/records".encode()
        self._choice = choice
        self._connected = connected
        self._changed = changed
        self._revision = 0  # of what is stored; 0: nothing is
        self.place = ""  # empty: none is known

    async def run(self) -> None:
        """Until cancelled."""
        await keep(
            self._etcd,
            self._key,
            listed=self._listed,
            changed=self._take,
            write=self._choose,
            away=lambda error: log.debug("the place of the records stays as it is: %s", error.message),
        )

    def _listed(self, listing: Listing) -> None:
        self._revision = 0
        for record in listing.records:
            self._take(record)

    async def _choose(self) -> None:
        while True:
            if self._connected():
                instances = self._registry.view()
                present = {one.records for one in instances if one.service == "kvstore" and one.records}
                stored = self.place if self._revision else ""
                place = self._choice.next(stored, present, time.monotonic())
                if place != stored:
                    await self._swap(place)
            await asyncio.sleep(ROUND_S)

    async def _swap(self, place: str) -> None:
        before = self.place  # the watch may tell of the swap first
        revision = await self._etcd.swap(self._key, place.encode(), self._revision)
        if revision is not None:  # else another replica was faster: the watch tells what it chose
            log.info("session records have a place", extra={"place": place, "before": before or "none"})
            self._take(Record(key=self._key, value=place.encode(), revision=revision))

    def _take(self, record: Record) -> None:
        if record.key != self._key or record.revision <= self._revision:
            return
        self._revision = record.revision if record.value is not None else 0
        self.place = (record.value or b"").decode(errors="replace")
        self._changed()
