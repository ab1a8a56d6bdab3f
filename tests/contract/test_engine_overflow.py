"""Sequences that do not fit at decode lie on attention pools too, and give the tokens of transformers."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted, DataLoss
from kvcommons.pb import kvstore_pb2, prefill_pb2
from kvcommons.rblock.identity import IdentityChain
from tests.contract.engine_stack import BLOCK, Stack, ready, settings
from tests.contract.engine_turns import SALT, Turn, prompt, started_in_order, turn
from tests.machine import scaled
from tests.pausing import pause
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


@pytest.mark.parametrize("engines", ["llama", "qwen3", "qwen2-sliding"], indirect=True)
async def test_a_prompt_larger_than_decode_lies_on_two_pools_and_at_home(engines: Stack) -> None:
    await engines.lenders(8, 8)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 6 * BLOCK})
    tokens, expected = engines.reference.prompt(260, 64)
    made = await turn(prefill, decode, engines.model, tokens, 64).run()
    assert made.tokens == expected
    assert made.reserved is not None
    placements = [(place.first_block, place.blocks) for place in made.reserved.placements]
    assert placements == [(12, 5), (0, 8), (8, 4)]
    await engines.idle("decode", "pool-0", "pool-1")


@pytest.mark.usefixtures("unhurried")
async def test_a_sequence_grows_elsewhere_when_decode_is_full(engines: Stack) -> None:
    """Its tail goes out, token by token; it comes home for the blocks that fit again."""
    await engines.lenders(20)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="overflow", borrow_blocks=2, engine={"capacity_tokens": 8 * BLOCK}
    )
    cases = [engines.reference.prompt(length, 120, 100 * length) for length in (50, 30)]
    turns = [turn(prefill, decode, engines.model, tokens, 120) for tokens, _ in cases]
    running = asyncio.gather(*(one.run() for one in turns))
    borrowed = 0
    while not running.done():
        seen = await engines.inspect("pool-0")
        borrowed = max(borrowed, sum(segment.blocks for segment in seen.segments))
        await asyncio.sleep(0.005)
    await running
    assert [one.tokens for one in turns] == [expected for _, expected in cases]
    assert borrowed >= 10
    for one in turns:  # each tells who lends to it, when that changes
        assert all(before != after for before, after in itertools.pairwise(one.borrowed))
    reported = [holders for one in turns for holders in one.borrowed]
    pools = {address for holders in reported for address in holders}
    assert len(pools) == 1
    assert "pool-0" in pools.pop()
    assert max(sum(holders.values()) for holders in reported) >= 5
    await engines.idle("decode", "pool-0")


async def test_nobody_lends(engines: Stack) -> None:
    """A prompt is refused at once; of sequences that grow, the youngest gives way and the oldest ends
    well."""
    await engines.lenders(2)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 8 * BLOCK})
    with pytest.raises(CapacityExhausted, match="nobody lends"):
        await turn(prefill, decode, engines.model, prompt(260), 5).run()
    tokens, expected = engines.reference.prompt(50, 75)
    old = turn(prefill, decode, engines.model, tokens, 75)
    young = turn(prefill, decode, engines.model, prompt(50, seed=8), 300)
    running = asyncio.create_task(old.run())
    await ready(lambda: _has_tokens(old.tokens))
    with pytest.raises(CapacityExhausted):
        await young.run()
    await running
    assert old.tokens == expected
    if young.tokens:  # else the old one had grown so far that there was no room to begin
        engines.reference.assert_greedy(prompt(50, seed=8), young.tokens)
    await engines.idle("decode", "pool-0")


async def test_one_that_waits_for_its_prompt_gives_way_to_an_older_one(engines: Stack) -> None:
    held = HeldPrefill(await engines.prefill())
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 8 * BLOCK})
    tokens, expected = engines.reference.prompt(50, 75)
    old = turn(held, decode, engines.model, tokens, 75)
    (running,) = await started_in_order([old])
    # Both prompts fit, into 7 blocks of 8; to end, the older one needs all 8.
    unprefilled = turn(None, decode, engines.model, prompt(40, seed=8), 5).request
    events = aiter(decode.Generate(unprefilled, timeout=scaled(30)))
    assert (await anext(events)).WhichOneof("event") == "reserved"
    held.released.set()
    with pytest.raises(CapacityExhausted, match=r"older sequences|nobody lends"):
        await anext(events)
    await running
    assert old.tokens == expected
    await engines.idle("decode")


class HeldPrefill:
    """A prefill service that computes nothing until it is `released`."""

    def __init__(self, prefill: Any) -> None:
        self._prefill = prefill
        self.released = asyncio.Event()

    async def Compute(self, request: prefill_pb2.PrefillRequest, timeout: float) -> AsyncIterator[Any]:
        await self.released.wait()
        async for event in self._prefill.Compute(request, timeout=timeout):
            yield event


async def _has_tokens(tokens: list[int]) -> None:
    if not tokens:
        raise CapacityExhausted("not yet")


ROOM = 40 * BLOCK  # 28 blocks for both to grow, and 12 of the 19 of a prompt of 300


async def beside(
    engines: Stack, decode: Any
) -> tuple[Turn, Turn, list[int], asyncio.Task[Any], asyncio.Task[Any]]:
    """Two running turns, one all at home, one that lies on the pool too; and what the first one's tokens are.
    With a `capacity_tokens` of `ROOM` both have room to grow at home, however late this returns.
    """

    async def has_room() -> bool:
        return (await engines.inspect("decode")).free_blocks >= 15

    prefill = await engines.prefill()
    # Holds what is room later while one of them is placed.
    ballast = decode.Generate(turn(None, decode, engines.model, prompt(440), 5).request, timeout=scaled(30))
    holding = asyncio.create_task(anext(aiter(ballast)))
    await holding
    tokens, expected = engines.reference.prompt(40, 200)
    home = turn(prefill, decode, engines.model, tokens, 200)
    away = turn(prefill, decode, engines.model, prompt(300, seed=4), 200)
    elsewhere = asyncio.create_task(away.run())
    await ready(lambda: _has_tokens(away.tokens[1:]))
    ballast.cancel()
    await eventually(has_room, "what the ballast held is free")
    at_home = asyncio.create_task(home.run())
    await ready(lambda: _has_tokens(home.tokens))
    return home, away, expected, at_home, elsewhere


async def test_a_holder_is_killed_and_only_its_sequence_ends(engines: Stack) -> None:
    (pool,) = await engines.lenders(30, process=True)
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": ROOM})
    home, away, expected, at_home, elsewhere = await beside(engines, decode)
    pool.kill()
    with pytest.raises(DataLoss, match="compute it again"):
        await asyncio.wait_for(elsewhere, scaled(20))
    # What is resumed elsewhere begins with what was sent.
    engines.reference.assert_greedy(prompt(300, seed=4), away.tokens)
    await at_home
    assert home.tokens == expected
    await engines.idle("decode")


async def test_a_paused_holder_costs_its_deadline_once(engines: Stack) -> None:
    (pool,) = await engines.lenders(30, process=True)
    # Blocks that it is asked for while it stands still are lent when it goes on, and are nobody's: they are
    # free when their lease ends, which is sooner than `idle` gives up.
    decode = await engines.decode(
        placement="overflow",
        attend_deadline_s=3.0,
        lease_ms=int(1000 * scaled(6)),
        engine={"capacity_tokens": ROOM},
    )
    home, _, expected, at_home, elsewhere = await beside(engines, decode)
    pause(pool.pid)
    with pytest.raises(DataLoss):
        await asyncio.wait_for(elsewhere, scaled(20))
    await at_home
    assert home.tokens == expected
    pool.send_signal(signal.SIGCONT)
    # The lease is not renewed any more: the pool has its blocks back, whether it heard of the end or not.
    await engines.idle("decode", "pool-0")


async def test_history_of_a_borrowed_part_is_loaded_and_saved_by_its_holder(engines: Stack) -> None:
    store = await engines.kvstore()
    await engines.lenders(20)
    tokens, expected = engines.reference.prompt(200, 80)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 4 * BLOCK})
    made = turn(prefill, decode, engines.model, tokens, 40, history=engines.history(0))
    assert (await made.run()).tokens == expected[:40]
    known = tokens + expected[:40]
    ids = IdentityChain(SALT, engines.model, BLOCK).extend(known[:-1])
    await ready(lambda: _stored(store, engines.model, ids))
    await engines.stop("prefill")
    prefill = await engines.prefill("p2")
    decode = await engines.decode("d2", placement="overflow", engine={"capacity_tokens": 4 * BLOCK})
    again = turn(prefill, decode, engines.model, known, 40, history=engines.history(len(ids)))
    assert (await again.run()).tokens == expected[40:]
    assert again.reserved is not None
    assert again.reserved.push_from_block == len(ids)
    assert not again.missing
    await engines.idle("decode", "d2", "pool-0")


async def _stored(store: object, model: bytes, ids: list[bytes]) -> None:
    reply = await store.Match(kvstore_pb2.MatchRequest(model=model, block_ids=ids), timeout=scaled(5))  # type: ignore[attr-defined]
    if len(reply.tiers) < len(ids):
        raise DataLoss(f"{len(reply.tiers)} of {len(ids)} blocks are stored")


async def test_an_unknown_policy_ends_the_process_with_a_reason(engines: Stack) -> None:
    from kvcommons.config import DataPlane
    from kvcommons.errors import InvalidInput
    from services.decode.config import DecodeConfig
    from services.decode.service import serve

    config = DecodeConfig(
        node=engines.node("decode"),
        data_plane=DataPlane(data_listen=engines.data("decode")),
        engine=settings(engines.folder),
        ledger=engines.ledger,
        placement="nearest",
    )
    engines.launch("decode", "decode", serve, config)
    with pytest.raises(InvalidInput, match="not one of local, overflow, offload, grow, auto"):
        await engines.tasks.pop("decode")
