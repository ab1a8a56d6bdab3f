"""The global debt ledger (Infinite-LLM, section 4.4): who has lent how much to whom. No I/O.

The creditors' block tables are what counts; they tell of them with each heartbeat. A replica that hears
something other than etcd holds writes it there, by compare-and-swap on the revision that it knows, so that of
two that write at once one wins and the other looks again. What the ledger holds is loose while blocks come
and go, and right at rest. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

WRITE_OFF_S = 5.0  # after a creditor has left the registry: one that was paused may come back


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndSwap:
    """Write these loans of a creditor if its record was last changed at `revision` (0: there is none);
    None: delete the record."""

    creditor: str
    loans: Mapping[str, int] | None
    revision: int


@dataclass(slots=True)
class _Record:
    loans: dict[str, int]
    revision: int


@dataclass(slots=True)
class _Reported:
    """By a heartbeat here, and not in etcd yet."""

    loans: dict[str, int]


@dataclass(slots=True)
class DebtLedger:
    """The debts, as one replica of the ledger keeps them."""

    _records: dict[str, _Record] = field(default_factory=dict)
    _deleted_at: dict[str, int] = field(default_factory=dict)  # revisions
    _reported: dict[str, _Reported] = field(default_factory=dict)
    _gone_since: dict[str, float] = field(default_factory=dict)

    def heartbeat(self, creditor: str, loans: Mapping[str, int]) -> None:
        """A heartbeat that came in here."""
        now = {debtor: blocks for debtor, blocks in loans.items() if blocks}
        record = self._records.get(creditor)
        if now != (record.loans if record is not None else {}):
            self._reported[creditor] = _Reported(now)
        else:
            self._reported.pop(creditor, None)

    def listed(self, revision: int, records: Mapping[str, tuple[int, Mapping[str, int]]]) -> None:
        """All that etcd held at `revision`: by creditor the record's revision and its loans."""
        newer = {name: one for name, one in self._records.items() if one.revision > revision}
        self._records = {
            name: _Record(dict(loans), at)
            for name, (at, loans) in records.items()
            if self._deleted_at.get(name, 0) <= revision
        } | newer
        self._deleted_at = {name: at for name, at in self._deleted_at.items() if at > revision}

    def stored(self, creditor: str, revision: int, loans: Mapping[str, int] | None) -> None:
        """etcd has this record: a watch reported it, or this replica wrote it. None: deleted."""
        known = self._records.get(creditor)
        if revision <= max(known.revision if known else 0, self._deleted_at.get(creditor, 0)):
            return
        if loans is None:
            self._records.pop(creditor, None)
            self._deleted_at[creditor] = revision
        else:
            self._records[creditor] = _Record(dict(loans), revision)
        reported = self._reported.get(creditor)
        if reported is not None and reported.loans == (loans or {}):
            del self._reported[creditor]

    def writes(self) -> list[CompareAndSwap]:
        """The writes that etcd still needs; each is returned until etcd holds it."""
        due = []
        for creditor, reported in self._reported.items():
            record = self._records.get(creditor)
            revision = record.revision if record is not None else 0
            due.append(CompareAndSwap(creditor=creditor, loans=reported.loans, revision=revision))
        return due

    def write_offs(self, living: Collection[str], now: float) -> list[CompareAndSwap]:
        """Records of creditors that have been gone for a while; the leader's to delete. What the dead owe is
        written off by their creditors, when leases run out."""
        for name in (*self._records, *self._reported):
            if name in living:
                self._gone_since.pop(name, None)
            else:
                self._gone_since.setdefault(name, now)
        over = [name for name, since in self._gone_since.items() if now - since >= WRITE_OFF_S]
        for name in over:
            self._reported.pop(name, None)
        self._gone_since = {
            name: since
            for name, since in self._gone_since.items()
            if name in self._records or name in self._reported
        }
        return [
            CompareAndSwap(creditor=name, loans=None, revision=self._records[name].revision)
            for name in over
            if name in self._records
        ]

    def debts(self, living: Collection[str]) -> dict[str, dict[str, int]]:
        """The debt graph: debtor to creditor to blocks, of the living, with what was heard here last."""
        owed: dict[str, dict[str, int]] = {}
        for creditor in self._records.keys() | self._reported.keys():
            if creditor in living:
                for debtor, blocks in self.loans(creditor).items():
                    if debtor in living:
                        owed.setdefault(debtor, {})[creditor] = blocks
        return owed

    def loans(self, creditor: str) -> Mapping[str, int]:
        """By debtor."""
        known = self._reported.get(creditor) or self._records.get(creditor)
        return known.loans if known is not None else {}
