"""What this replica tells of the settlements that it drives, to whoever watches the commons. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.saga import Settlement
from services.ledger.settlement_records import message_of

SHOWN_S = 60.0  # after its end: most settlements take less time than there is between two looks
ENDED_MAX = 32


@dataclass(slots=True)
class _Report:
    settlement: Settlement
    begun_s: float
    ended_s: float | None = None


class SettlementReports:
    """The settlements under way here, and the last `ENDED_MAX` of the last `SHOWN_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, _Report] = {}  # by the settlement's id, in the order in which they began

    def wrote(self, settlement: Settlement) -> None:
        """Its next step, of which etcd has the record now."""
        known = self._reports.get(settlement.id)
        if known is None or known.ended_s is not None:
            self._reports.pop(settlement.id, None)
            self._reports[settlement.id] = _Report(settlement, self._clock())
        else:
            known.settlement = settlement

    def left(self, settlement_id: str) -> None:
        """This replica does nothing more for it: it has ended, or another leader goes on with it. One that
        was never written is none."""
        report = self._reports.get(settlement_id)
        if report is not None and report.ended_s is None:
            report.ended_s = self._clock()
        self._forget()

    def messages(self) -> list[pb.SettlementReport]:
        """Oldest first."""
        self._forget()
        now_s = self._clock()
        return [
            pb.SettlementReport(
                settlement=message_of(report.settlement),
                begun_ms=_milliseconds(now_s - report.begun_s),
                ended=report.ended_s is not None,
                ended_ms=_milliseconds(now_s - report.ended_s) if report.ended_s is not None else 0,
            )
            for report in self._reports.values()
        ]

    def _forget(self) -> None:
        now_s = self._clock()
        ended = [name for name, one in self._reports.items() if one.ended_s is not None]
        over = len(ended) - ENDED_MAX
        for at, name in enumerate(ended):
            ended_s = self._reports[name].ended_s
            if at < over or (ended_s is not None and now_s - ended_s > SHOWN_S):
                del self._reports[name]


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)
