from __future__ import annotations

from dataclasses import replace

from services.ledger.saga import Leg, Settlement, Step
from services.ledger.settlement_reports import ENDED_MAX, SHOWN_S, SettlementReports


def settlement(name: str) -> Settlement:
    legs = (Leg(debtor="a", creditor="b", left_blocks=4), Leg(debtor="b", creditor="a", left_blocks=4))
    return Settlement(id=name, term=1, legs=legs, round_blocks=2)


class Reports(SettlementReports):
    def __init__(self) -> None:
        self.now_s = 100.0
        super().__init__(lambda: self.now_s)

    def reported(self) -> list[tuple[str, int, bool, int, int]]:
        return [
            (one.settlement.id, one.settlement.step, one.ended, one.begun_ms, one.ended_ms)
            for one in self.messages()
        ]


def test_each_step_is_told_and_the_end_for_a_while() -> None:
    reports = Reports()
    reports.left("never written")
    reports.wrote(settlement("s"))
    reports.now_s += 1
    reports.wrote(replace(settlement("s"), step=Step.COPY, round=1))
    assert reports.reported() == [("s", Step.COPY, False, 1000, 0)]
    reports.left("s")
    reports.now_s += SHOWN_S - 1
    assert reports.reported() == [("s", Step.COPY, True, 60_000, 59_000)]
    reports.left("s")  # a second time says nothing new
    assert reports.reported() == [("s", Step.COPY, True, 60_000, 59_000)]
    reports.now_s += 2
    assert reports.reported() == []


def test_one_that_comes_back_begins_anew() -> None:
    reports = Reports()
    reports.wrote(settlement("s"))
    reports.left("s")
    reports.now_s += 3
    reports.wrote(replace(settlement("s"), step=Step.END))
    assert reports.reported() == [("s", Step.END, False, 0, 0)]


def test_so_many_that_have_ended_are_kept_and_all_that_are_under_way() -> None:
    reports = Reports()
    reports.wrote(settlement("running"))
    for number in range(2 * ENDED_MAX):
        reports.wrote(settlement(f"s{number}"))
        reports.left(f"s{number}")
    names = [name for name, *_ in reports.reported()]
    assert names == ["running", *(f"s{number}" for number in range(ENDED_MAX, 2 * ENDED_MAX))]
