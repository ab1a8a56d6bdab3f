from __future__ import annotations

import asyncio

import pytest

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.errors import DataLoss
from kvcommons.pb import common_pb2 as pb
from services.decode.batching.stream import EventStream


def sampled(*positions: int) -> list[pb.SampledToken]:
    return [pb.SampledToken(token=1, position=position) for position in positions]


async def test_tokens_that_pile_up_leave_in_one_message() -> None:
    stream = EventStream()
    stream.step(SequenceUpdate(key=1, tokens=sampled(5)))
    stream.step(SequenceUpdate(key=1, tokens=sampled(6, 7)))
    stream.step(SequenceUpdate(key=1, tokens=sampled(8), reason="stop", saved_blocks=2))
    events = [event async for event in stream.events()]
    assert [event.WhichOneof("event") for event in events] == ["tokens", "finished"]
    assert [token.position for token in events[0].tokens.tokens] == [5, 6, 7, 8]
    assert (events[1].finished.reason, events[1].finished.saved_blocks) == ("stop", 2)


async def test_only_the_last_word_on_who_lends_is_told_and_before_its_tokens() -> None:
    stream = EventStream()
    stream.step(SequenceUpdate(key=1, tokens=sampled(5), borrowed={"a": 1}))
    stream.step(SequenceUpdate(key=1, tokens=sampled(6), borrowed={"a": 1, "b": 2}))
    stream.step(SequenceUpdate(key=1, tokens=sampled(7)))
    stream.step(SequenceUpdate(key=1, tokens=sampled(8), reason="stop"))
    borrowed, tokens, finished = [event async for event in stream.events()]
    assert [(one.data_address, one.blocks) for one in borrowed.borrowed.holders] == [("a", 1), ("b", 2)]
    assert len(tokens.tokens.tokens) == 4
    assert finished.HasField("finished")


async def test_tokens_come_before_the_error_that_ends_them() -> None:
    stream = EventStream()
    events = stream.events()
    stream.missing(3)
    stream.step(SequenceUpdate(key=1, tokens=sampled(5), error=DataLoss("gone")))
    assert stream.ended
    assert (await anext(events)).missing.push_from_block == 3
    assert (await anext(events)).tokens.tokens[0].position == 5
    with pytest.raises(DataLoss, match="gone"):
        await anext(events)


async def test_waits_for_news() -> None:
    stream = EventStream()
    following = asyncio.ensure_future(anext(stream.events()))
    await asyncio.sleep(0)
    assert not following.done()
    stream.step(SequenceUpdate(key=1, tokens=sampled(5)))
    assert (await following).tokens.tokens[0].position == 5
