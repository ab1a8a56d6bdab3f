from __future__ import annotations

from kvcommons.pb import common_pb2 as pb
from services.decode.gate import Go, Missing, StartGate

FIRST = pb.SampledToken(token=7, position=40)
OTHER = pb.SampledToken(token=8, position=40)


def test_begins_when_all_is_here_and_prefill_has_delivered() -> None:
    assert StartGate(push_from_block=2, fetching=False).started(FIRST, 2) == Go(first=FIRST)


def test_waits_for_the_fetch_whichever_ends_first() -> None:
    gate = StartGate(push_from_block=4, fetching=True)
    assert gate.started(FIRST, 4) is None
    assert gate.fetched(4) == Go(first=FIRST)
    gate = StartGate(push_from_block=4, fetching=True)
    assert gate.fetched(4) is None
    assert gate.started(FIRST, 4) == Go(first=FIRST)


def test_a_short_fetch_asks_for_more_and_waits_for_a_prefill_that_pushed_it() -> None:
    gate = StartGate(push_from_block=4, fetching=True)
    assert gate.fetched(1) == Missing(push_from_block=1)
    # The first job's word comes late: its blocks from 4 on are here, those from 1 on are not.
    assert gate.started(FIRST, 4) is None
    assert gate.started(OTHER, 1) == Go(first=FIRST)


def test_a_short_fetch_does_not_matter_where_prefill_pushed_all() -> None:
    gate = StartGate(push_from_block=4, fetching=True)
    assert gate.started(FIRST, 0) is None
    assert gate.fetched(0) == Go(first=FIRST)


def test_begins_once() -> None:
    gate = StartGate(push_from_block=0, fetching=False)
    assert gate.started(FIRST, 0) == Go(first=FIRST)
    assert gate.started(FIRST, 0) is None


def test_a_prefill_that_waits_for_the_fetch_need_not_be_asked() -> None:
    gate = StartGate(push_from_block=4, fetching=True)
    gate.awaited()
    assert gate.fetched(1) is None
    assert gate.started(FIRST, 1) == Go(first=FIRST)
