"""What is done to records now and then: expired sessions go, and those that are left are counted."""

from __future__ import annotations

import logging

from kvcommons.errors import KVCommonsError
from services.kvstore.records.interface import Records

log = logging.getLogger(__name__)


class Upkeep:
    """`sessions`: how many there were at the last `round`."""

    def __init__(self, records: Records, place: str) -> None:
        """`place`: where the records lie, for people."""
        self._records = records
        self._place = place
        self._reached = True
        self.sessions = 0

    async def round(self) -> bool:
        """Whether the records were within reach."""
        try:
            removed = await self._records.sweep()
            self.sessions = await self._records.count()
        except KVCommonsError as error:
            if self._reached:
                log.error("session records in the %s are out of reach: %s", self._place, error.message)
            self._reached = False
            return False
        if not self._reached:
            log.info("session records in the %s are within reach again", self._place)
        if removed:
            log.info("expired sessions removed", extra={"sessions": removed})
        self._reached = True
        return True
