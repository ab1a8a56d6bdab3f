"""The tokens of many sequences in one call of a real decode instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvcommons.errors import Conflict, InvalidInput, KVCommonsError
from kvcommons.pb import common_pb2, decode_pb2, prefill_pb2
from services.router.fleet.listening import Heard, Listening
from tests.contract.engine_stack import Stack
from tests.contract.engine_turns import compute, prompt, turn
from tests.machine import scaled

pytest_plugins = ("tests.contract.engine_fixtures",)

NEW = 40


class Generated:
    """One sequence as a router drives it: where its tokens came."""

    def __init__(self, engines: Stack, prefill: Any, decode: Any, seed: int) -> None:
        self.prompt = prompt(60, seed)
        self.request = turn(prefill, decode, engines.model, self.prompt, NEW, request_id=f"r{seed}").request
        self.by_position: dict[int, int] = {}
        self.in_own_call = 0
        self.lost: list[KVCommonsError] = []
        self._prefill, self._decode, self._address = prefill, decode, engines.address("decode")

    @property
    def tokens(self) -> list[int]:
        return [self.by_position[at] for at in sorted(self.by_position)]

    def came(self, tokens: Sequence[common_pb2.SampledToken]) -> None:
        for token in tokens:
            assert self.by_position.setdefault(token.position, token.token) == token.token

    async def run(self, listening: Listening) -> None:
        with listening.hear(
            self._decode,
            self._address,
            self.request.job.request_id,
            until_s=time.monotonic() + scaled(60),
            came=self.came,
            lost=self.lost.append,
        ) as heard:
            self.request.listener = heard.listener
            await self._generate(heard)

    async def _generate(self, heard: Heard) -> None:
        async for event in self._decode.Generate(self.request, timeout=scaled(60)):
            match event.WhichOneof("event"):
                case "reserved":
                    await compute(self._prefill, _prefill_request(self.request.job, event.reserved))
                case "tokens":
                    self.in_own_call += len(event.tokens.tokens)
                    heard.take(event.tokens.tokens)
                case "finished":
                    await heard.all(event.finished.tokens, timeout_s=scaled(10))
                    assert event.finished.tokens == NEW


def _prefill_request(job: common_pb2.Job, reserved: decode_pb2.Reserved) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        job=job, targets=reserved.placements, push_from_block=reserved.push_from_block
    )


async def test_sequences_are_heard_together(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    listening = Listening(time.monotonic)
    generated = [Generated(engines, prefill, decode, seed) for seed in range(1, 5)]
    await asyncio.gather(*(one.run(listening) for one in generated))
    for one in generated:
        assert len(one.tokens) == NEW
        engines.reference.assert_greedy(one.prompt, one.tokens)
        assert 1 <= one.in_own_call < NEW / 2, "the first ones, and what they were waited for with"
        assert not one.lost
    await listening.close()
    await engines.idle("decode")


async def test_sequences_go_on_where_nobody_listens(engines: Stack) -> None:
    """A listener that has gone, or never came: all later tokens come in the sequence's own call."""
    prefill, decode = await engines.prefill(), await engines.decode()
    one = turn(prefill, decode, engines.model, prompt(60), NEW)
    one.request.listener = "nobody"
    await one.run()
    engines.reference.assert_greedy(one.prompt.tolist(), one.tokens)
    assert one.finished is not None
    assert one.finished.tokens == len(one.tokens) == NEW
    await engines.idle("decode")


async def test_an_open_call_holds_nobody_up_who_is_stopped(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    listening = Listening(time.monotonic)
    await Generated(engines, prefill, decode, 1).run(listening)
    began_s = time.monotonic()
    await engines.stop("decode")
    assert time.monotonic() - began_s < engines.node("decode").drain_s / 4, "it does not wait to be cancelled"
    await listening.close()


async def test_who_listens_has_a_name_of_its_own(engines: Stack) -> None:
    decode = await engines.decode()

    async def refused(name: str) -> None:
        async for _ in decode.Listen(decode_pb2.ListenRequest(listener=name), timeout=scaled(5)):
            pass

    with pytest.raises(InvalidInput, match="listener must be set"):
        await refused("")
    first = decode.Listen(decode_pb2.ListenRequest(listener="r"), timeout=scaled(20))
    following = asyncio.ensure_future(anext(aiter(first)))
    await asyncio.sleep(0.1)
    with pytest.raises(Conflict, match="somebody has this name"):
        await refused("r")
    following.cancel()
    first.cancel()
