"""In how many messages a holder is sent its share of a batch: the plug point of whoever divides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSize:
    """What a holder is asked for, in one layer: rows, bytes of the message and of its answer, and of the KV
    that is read for it."""

    rows: int
    asked_bytes: int
    answered_bytes: int
    read_bytes: int

    def beside(self, other: ExchangeSize | None) -> ExchangeSize:
        """Both in one."""
        if other is None:
            return self
        return ExchangeSize(
            rows=self.rows + other.rows,
            asked_bytes=self.asked_bytes + other.asked_bytes,
            answered_bytes=self.answered_bytes + other.answered_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
        )


class ShareDivision(Protocol):
    """Threads may share it."""

    def decide(self, exchange: ExchangeSize, *, busy: bool = False) -> int:
        """For an iteration whose largest exchange with a holder this is: how many messages each holder's
        share is sent in. `busy`: the iteration has attention of its own to compute meanwhile."""

    def observe(self, exchange: ExchangeSize, *, network_s: float, computed_s: float) -> None:
        """A share that was one message. The holder computed so long; there and back took `network_s`, what it
        had queued left out."""

    def took(self, exchange: ExchangeSize, number: int, seconds: float) -> None:
        """An exchange in so many messages, from asking to the last answer."""


class Undivided:
    """Each share is one message."""

    def decide(self, exchange: ExchangeSize, *, busy: bool = False) -> int:
        return 1

    def observe(self, exchange: ExchangeSize, *, network_s: float, computed_s: float) -> None:
        """It learns nothing."""

    def took(self, exchange: ExchangeSize, number: int, seconds: float) -> None:
        """Nor from this."""
