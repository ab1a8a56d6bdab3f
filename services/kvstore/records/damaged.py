"""Session records that cannot be read: each costs its own session, and no other one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcommons.errors import DataLoss
from services.kvstore.turn_lease import names_in

log = logging.getLogger(__name__)

KEPT_MAX = 10_000


class DamagedRecords:
    """Which records lists and sweeps pass over, by their sessions' keys.

    They stay where they are, so that whoever looks into it finds the bytes: only their session's deletion
    takes them away. Each is named once in the log.
    """

    def __init__(self, counted: Callable[[int], None] = lambda count: None) -> None:
        """`counted` hears how many are known, whenever that changes."""
        self._keys: set[bytes] = set()
        self._counted = counted

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def found(self, key: bytes, error: DataLoss) -> None:
        if key in self._keys or len(self._keys) >= KEPT_MAX:
            return
        self._keys.add(key)
        self._counted(len(self._keys))
        log.error("a session's record is passed over: %s", error.message, extra={"session": _name_of(key)})

    def removed(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.discard(key)
            self._counted(len(self._keys))


def _name_of(key: bytes) -> str:
    """For people: the key itself may be what is damaged."""
    try:
        return "/".join(names_in(key))
    except UnicodeDecodeError:
        return key.hex()
