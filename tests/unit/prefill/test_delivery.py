from __future__ import annotations

from kvcommons.errors import KVCommonsError, Unavailable
from kvcommons.prefill.push import Delivery
from kvcommons.transport.deadline import Deadline


def make() -> tuple[Delivery, list[KVCommonsError | None]]:
    return Delivery(Deadline.after(1), ""), []


def test_is_done_when_it_is_sealed_and_nothing_is_under_way() -> None:
    delivery, heard = make()
    delivery.begin()
    delivery.begin()
    delivery.end()
    delivery.seal(heard.append)
    assert heard == []
    delivery.end()
    assert heard == [None]


def test_is_done_at_once_where_nothing_is_pushed() -> None:
    delivery, heard = make()
    delivery.seal(heard.append)
    assert heard == [None]


def test_the_first_failure_is_the_one_that_is_reported() -> None:
    delivery, heard = make()
    first = Unavailable("first")
    for failure in (None, first, Unavailable("second")):
        delivery.begin()
        delivery.end(failure)
    delivery.seal(heard.append)
    assert heard == [first]
    assert delivery.failure is first


def test_an_abandoned_one_sends_no_more() -> None:
    delivery, _ = make()
    reason = Unavailable("cancelled")
    delivery.abandon(reason)
    assert delivery.failure is reason
