"""Which replica of the ledger leads: it settles debts and writes off the dead. No I/O.

etcd has no election of its own: a key that is created only if it is absent, under a lease that its creator
renews, is one. The revision at which it was created is the leader's term, which grows from leader to leader.
A leader that cannot renew stops before its lease can have run out; should it not notice (it was paused), its
writes fail, because the next one has written, and participants refuse its earlier term.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Create the key under a new lease, if it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Keep the lease alive."""


class Leadership:
    """Times are seconds of one monotonic clock."""

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._term = 0
        self._renewed_at = 0.0

    def term(self, now: float) -> int | None:
        """Of this replica as leader; None while it does not lead, for all that is certain."""
        # A quarter less than the lease: clocks may run at different rates, and etcd counts from the arrival.
        if self._term and now < self._renewed_at + 0.75 * self._lease_s:
            return self._term
        return None

    def next(self, now: float) -> Campaign | Renew:
        """What to ask etcd now; about three times in a lease is enough."""
        if self._term and self.term(now) is None:
            self._term = 0  # the lease may have run out: another may lead
        return Renew() if self._term else Campaign()

    def won(self, term: int, asked_at: float) -> None:
        """The key was created, at revision `term`; `asked_at`: when the lease was asked for."""
        self._term, self._renewed_at = term, asked_at

    def renewed(self, asked_at: float) -> None:
        if self._term:
            self._renewed_at = max(self._renewed_at, asked_at)

    def lost(self) -> None:
        """The lease is not known any more, or somebody else's key is there."""
        self._term = 0
