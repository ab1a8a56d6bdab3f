from __future__ import annotations

from services.ledger.leadership import Campaign, Leadership, Renew


def test_a_leader_stops_before_its_lease_can_have_run_out() -> None:
    leadership = Leadership(lease_s=8.0)
    assert leadership.term(0.0) is None
    assert isinstance(leadership.next(0.0), Campaign)
    leadership.won(7, 10.0)
    assert leadership.term(15.9) == 7
    assert isinstance(leadership.next(15.9), Renew)
    leadership.renewed(15.0)
    assert leadership.term(20.9) == 7
    assert leadership.term(21.0) is None
    assert isinstance(leadership.next(21.0), Campaign)
    assert leadership.term(20.0) is None  # it stays so, whatever comes late
    leadership.renewed(20.9)
    assert leadership.term(21.0) is None


def test_a_lost_lease_ends_the_term() -> None:
    leadership = Leadership(lease_s=8.0)
    leadership.won(7, 10.0)
    leadership.lost()
    assert leadership.term(10.0) is None
    leadership.won(9, 11.0)
    assert leadership.term(11.0) == 9


def test_answers_out_of_order_do_not_shorten_it() -> None:
    leadership = Leadership(lease_s=8.0)
    leadership.won(7, 10.0)
    leadership.renewed(14.0)
    leadership.renewed(12.0)
    assert leadership.term(19.9) == 7
