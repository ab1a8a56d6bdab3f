from __future__ import annotations

from kvcommons.pb import common_pb2 as pb
from services.decode.arrival.start_barrier import PushFrom, StartBarrier, StartGeneration

FIRST = pb.SampledToken(token=7, position=40)
OTHER = pb.SampledToken(token=8, position=40)


def test_begins_when_all_is_here_and_prefill_has_delivered() -> None:
    assert StartBarrier(push_from_block=2, fetching=False).started(FIRST, 2) == StartGeneration(first=FIRST)


def test_waits_for_the_fetch_whichever_ends_first() -> None:
    barrier = StartBarrier(push_from_block=4, fetching=True)
    assert barrier.started(FIRST, 4) is None
    assert barrier.fetched(4) == StartGeneration(first=FIRST)
    barrier = StartBarrier(push_from_block=4, fetching=True)
    assert barrier.fetched(4) is None
    assert barrier.started(FIRST, 4) == StartGeneration(first=FIRST)


def test_a_short_fetch_asks_for_more_and_waits_for_a_prefill_that_pushed_it() -> None:
    barrier = StartBarrier(push_from_block=4, fetching=True)
    assert barrier.fetched(1) == PushFrom(push_from_block=1)
    # The first job's word comes late: its blocks from 4 on are here, those from 1 on are not.
    assert barrier.started(FIRST, 4) is None
    assert barrier.started(OTHER, 1) == StartGeneration(first=FIRST)


def test_a_short_fetch_does_not_matter_where_prefill_pushed_all() -> None:
    barrier = StartBarrier(push_from_block=4, fetching=True)
    assert barrier.started(FIRST, 0) is None
    assert barrier.fetched(0) == StartGeneration(first=FIRST)


def test_begins_once() -> None:
    barrier = StartBarrier(push_from_block=0, fetching=False)
    assert barrier.started(FIRST, 0) == StartGeneration(first=FIRST)
    assert barrier.started(FIRST, 0) is None


def test_a_prefill_that_waits_for_the_fetch_need_not_be_asked() -> None:
    barrier = StartBarrier(push_from_block=4, fetching=True)
    barrier.awaited()
    assert barrier.fetched(1) is None
    assert barrier.started(FIRST, 1) == StartGeneration(first=FIRST)
