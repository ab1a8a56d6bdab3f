"""Tokens of many sequences in one call, and of one sequence in two."""

from __future__ import annotations

import asyncio

import pytest

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.errors import Conflict, DataLoss, InvalidInput
from kvcommons.pb import common_pb2 as pb
from kvcommons.pb import decode_pb2
from services.decode.batching.listeners import TokenListener, TokenListeners
from services.decode.batching.stream import EventStream


def sampled(*positions: int) -> list[pb.SampledToken]:
    return [pb.SampledToken(token=1, position=position) for position in positions]


def update(*positions: int, reason: str = "") -> SequenceUpdate:
    return SequenceUpdate(key=1, tokens=sampled(*positions), reason=reason)


def positions(message: decode_pb2.IterationTokens) -> dict[str, list[int]]:
    return {one.request_id: [token.position for token in one.tokens] for one in message.sequences}


async def test_an_iteration_is_one_message() -> None:
    listener = TokenListener()
    messages = listener.messages()
    following = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    listener.tell("a", sampled(5))
    listener.tell("b", sampled(9))
    assert positions(await following) == {"a": [5], "b": [9]}
    listener.tell("a", sampled(6))
    listener.tell("a", sampled(7))
    assert positions(await anext(messages)) == {"a": [6, 7]}, "what piled up leaves at once"


async def test_what_was_told_before_the_end_still_comes() -> None:
    listener = TokenListener()
    listener.tell("a", sampled(5))
    listener.end()
    assert [positions(message) async for message in listener.messages()] == [{"a": [5]}]


async def test_a_listener_that_is_not_ended_waits() -> None:
    listener = TokenListener()
    listener.tell("a", [])
    following = asyncio.ensure_future(anext(listener.messages()))
    await asyncio.sleep(0.01)
    assert not following.done()
    following.cancel()


def test_a_name_is_one_call_s() -> None:
    listeners = TokenListeners()
    with pytest.raises(InvalidInput, match="listener must be set"), listeners.listening(""):
        pass
    with listeners.listening("r") as listener:
        assert listeners.find("r") is listener
        with pytest.raises(Conflict, match="somebody has this name"), listeners.listening("r"):
            pass
        assert listeners.find("r") is listener
    assert listeners.find("r") is None


async def test_none_is_left_to_wait_once_no_sequence_comes() -> None:
    listeners = TokenListeners()
    with listeners.listening("before") as before:
        listeners.end()
        assert [message async for message in before.messages()] == []
        assert listeners.find("before") is None
    with listeners.listening("after") as after:
        assert [message async for message in after.messages()] == []


async def test_first_tokens_come_behind_what_is_known_before_them() -> None:
    """So nobody hears a token of a sequence before its own call has said how it came to be."""
    listener = TokenListener()
    stream = EventStream("a", lambda: listener)
    events = stream.events()
    stream.step(update(5))
    assert (await anext(events)).tokens.tokens[0].position == 5
    stream.step(update(6))
    stream.step(update(7, 8, reason="stop"))
    finished = (await anext(events)).finished
    assert (finished.reason, finished.tokens) == ("stop", 4)
    assert positions(await anext(listener.messages())) == {"a": [6, 7, 8]}


async def test_tokens_wait_for_those_before_them_in_their_own_call() -> None:
    listener = TokenListener()
    stream = EventStream("a", lambda: listener)
    stream.step(update(5))
    stream.step(update(6, reason="length"))
    tokens, finished = [event async for event in stream.events()]
    assert [token.position for token in tokens.tokens.tokens] == [5, 6]
    assert finished.finished.tokens == 2


async def test_a_listener_that_has_gone_leaves_the_call() -> None:
    listeners = TokenListeners()
    stream = EventStream("a", lambda: listeners.find("r"))
    events = stream.events()
    with listeners.listening("r"):
        stream.step(update(5))
        await anext(events)
        stream.step(update(6))
    stream.step(update(7, reason="length"))
    assert (await anext(events)).tokens.tokens[0].position == 7
    assert (await anext(events)).finished.tokens == 3, "who asked sees that one is missing"


async def test_tokens_come_before_the_error_that_ends_them() -> None:
    listener = TokenListener()
    stream = EventStream("a", lambda: listener)
    events = stream.events()
    stream.step(update(5))
    await anext(events)
    stream.step(SequenceUpdate(key=1, tokens=sampled(6), error=DataLoss("gone")))
    assert (await anext(events)).tokens.tokens[0].position == 6
    with pytest.raises(DataLoss, match="gone"):
        await anext(events)
