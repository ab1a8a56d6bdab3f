"""Where the session records of this stack lie, as a ledger said last: so that a kvstore which is started
again while no ledger answers still knows whether they are its own.

<data>/records.place   the place, as it stands in the registry
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvcommons.files import write_whole

log = logging.getLogger(__name__)


class RecordsPlace:
    """Empty where no ledger has ever said it to this kvstore."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is a file that cannot be read."""
        self._path = path
        self.known = path.read_text().strip() if path.exists() else ""

    def note(self, place: str) -> None:
        """Durable when it returns, but for a disk that refuses (full, gone): then it is tried again with the
        next one."""
        if place in ("", self.known):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, f"{place}\n".encode(), mode=0o600)
        except OSError as error:
            log.warning("the place of the session records cannot be kept in %s: %s", self._path, error)
        else:
            self.known = place
