"""Prompts that decode computes itself: the tokens that prefill's would have given, whatever runs beside
them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from kvcommons.engine.chunk_budget import ChunkBudget
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2, holder_pb2, holder_pb2_grpc, prefill_pb2_grpc
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, ready
from tests.contract.engine_turns import Turn, prompt, started_in_order, turn
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

ALL = 512  # tokens: every prompt of these tests


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups of rows each iteration had."""
    seen: list[int] = []
    run = Iteration.run

    def counted(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        seen.append(len(self.groups))
        return run(self, *between_layers)

    monkeypatch.setattr(Iteration, "run", counted)
    return seen


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_a_prompt_is_computed_where_it_generates(engines: Stack) -> None:
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    tokens, expected = engines.reference.prompt(75, 40)
    cold = await turn(None, decode, engines.model, tokens, 40).run()
    assert cold.tokens == expected
    assert cold.reserved is not None
    assert cold.reserved.computes
    assert cold.first is not None
    assert (cold.first.cached_tokens, cold.first.token.position) == (0, 75)
    assert cold.first.compute_us > 0
    warm = await turn(None, decode, engines.model, [*tokens, *expected], 1).run()
    assert warm.first is not None
    assert warm.first.cached_tokens == warm.first.device_tokens == (75 + 39) // BLOCK * BLOCK
    await engines.idle("decode")


async def test_prompts_and_tokens_share_iterations(engines: Stack, groups: list[int]) -> None:
    """A sequence generates while prompts of several chunks are computed beside it."""
    decode = await engines.decode(max_local_prefill_tokens=ALL, chunk_tokens=32)
    made = [engines.reference.prompt(length, 60, 50 * n + 1) for n, length in enumerate((20, 150, 90, 7))]
    turns = [turn(None, decode, engines.model, tokens, 60) for tokens, _ in made]
    first = asyncio.create_task(turns[0].run())
    await ready(lambda: _generates(turns[0]))
    groups.clear()
    await asyncio.gather(first, *(one.run() for one in turns[1:]))
    assert [one.tokens for one in turns] == [following for _, following in made]
    assert max(groups) > 1, "no iteration had a chunk and a token"
    await engines.idle("decode")


async def _generates(one: Turn) -> None:
    if len(one.tokens) < 3:
        raise KVCommonsError("not yet")


async def test_history_in_the_store_is_loaded_beside_others(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadOrCompute, "patience_s", lambda *_, **__: scaled(20.0))
    await engines.kvstore()
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    tokens, expected = engines.reference.prompt(200, 20)
    saving = turn(None, decode, engines.model, tokens, 20, history=engines.history(0))
    assert (await saving.run()).tokens == expected
    await engines.stop("decode")
    again = await engines.decode(max_local_prefill_tokens=ALL)
    other, others = engines.reference.prompt(30, 120, 300)
    beside = turn(None, again, engines.model, other, 120)
    generating = asyncio.create_task(beside.run())
    await ready(lambda: _generates(beside))

    async def matched() -> Turn:
        found = turn(None, again, engines.model, tokens, 20, history=engines.history(12), request_id="again")
        return await found.run()

    restored = await matched()
    await generating
    assert (restored.tokens, beside.tokens) == (expected, others)
    assert restored.first is not None
    assert (restored.first.cached_tokens, restored.first.device_tokens) == (12 * BLOCK, 0)
    await engines.idle("decode")


async def test_choices_of_one_prompt_compute_it_once(engines: Stack) -> None:
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    tokens, expected = engines.reference.prompt(200, 10)
    turns = [turn(None, decode, engines.model, tokens, 10, request_id=f"r{n}") for n in range(3)]
    tasks = await started_in_order(turns)
    await asyncio.gather(*tasks)
    assert [one.tokens for one in turns] == [expected] * 3
    cached = sorted(one.first.device_tokens for one in turns if one.first is not None)
    assert cached == [0, 192, 192]
    await engines.idle("decode")


async def test_what_is_too_long_goes_to_prefill(engines: Stack) -> None:
    prefill = await engines.prefill()
    decode = await engines.decode(max_local_prefill_tokens=64)
    tokens, expected = engines.reference.prompt(65, 10)
    long = await turn(prefill, decode, engines.model, tokens, 10).run()
    assert long.tokens == expected
    assert long.reserved is not None
    assert not long.reserved.computes
    tail = await turn(None, decode, engines.model, [*tokens, *expected], 1).run()
    assert tail.reserved is not None
    assert tail.reserved.computes, "what has to be computed counts"


async def test_a_prompt_that_is_refused_goes_to_prefill(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No instance computes more prompts at once than it takes: the others fall back."""
    monkeypatch.setattr("services.decode.service.LOCAL_PROMPTS_MAX", 0)
    prefill = await engines.prefill()
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    tokens, expected = engines.reference.prompt(75, 10)
    one = await turn(prefill, decode, engines.model, tokens, 10).run()
    assert one.tokens == expected
    assert one.missing == [0]
    await engines.idle("decode")


async def test_a_cancelled_prompt_gives_its_blocks_back(engines: Stack) -> None:
    decode = await engines.decode(max_local_prefill_tokens=ALL, chunk_tokens=16)
    calls = [
        decode.Generate(turn(None, decode, engines.model, prompt(480, seed), 5).request, timeout=scaled(20))
        for seed in range(2)
    ]
    for call in calls:
        assert (await call.read()).reserved.computes
    for call in calls:
        call.cancel()
    await engines.idle("decode")


async def test_a_prompt_has_a_deadline(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowIterations(monkeypatch, 0.2)
    decode = await engines.decode(max_local_prefill_tokens=ALL, chunk_tokens=16)
    with pytest.raises(KVCommonsError, match="not computed within its deadline"):
        await turn(None, decode, engines.model, prompt(480), 5, start_wait_ms=300).run()
    await engines.idle("decode")


async def test_chunks_are_short_for_those_it_lends_to(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where none of its own sequences generates: half of its objective is theirs."""
    objectives: set[float] = set()

    def noting(*known: Any, objective_s: float, **settings: Any) -> ChunkBudget:
        objectives.add(objective_s)
        return ChunkBudget(*known, objective_s=objective_s, **settings)

    monkeypatch.setattr("kvcommons.engine.prompts.ChunkBudget", noting)
    decode = await engines.decode(max_local_prefill_tokens=ALL, tbt_objective_s=0.5)
    holder = holder_pb2_grpc.HolderStub(engines.channel("decode"))
    await turn(None, decode, engines.model, prompt(75), 1).run()
    assert objectives == {math.inf}, "nobody waits for it"
    wanted = holder_pb2.ReserveRequest(
        owner="debtor", sequence="s", model=engines.model, blocks=1, lease_ms=60_000
    )
    lent = await holder.Reserve(wanted, timeout=scaled(5))
    segment = holder_pb2.SegmentRef(handle=lent.handle, epoch=lent.epoch)
    objectives.clear()
    await turn(None, decode, engines.model, prompt(75, 2), 1).run()
    assert objectives == {0.25}
    await holder.Release(holder_pb2.ReleaseRequest(segments=[segment]), timeout=scaled(5))
    objectives.clear()
    await turn(None, decode, engines.model, prompt(75, 3), 1).run()
    assert objectives == {math.inf}
    await engines.idle("decode")


async def test_one_process_has_both_roles(engines: Stack) -> None:
    """It computes its own prompts, and as prefill those of another instance."""
    both = await engines.decode("both", colocated=True, chunk_tokens=32)
    alone = await engines.decode("alone")
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    tokens, expected = engines.reference.prompt(75, 30)
    other, others = engines.reference.prompt(90, 30, 200)
    own = turn(prefill, both, engines.model, tokens, 30)
    theirs = turn(prefill, alone, engines.model, other, 30)
    await asyncio.gather(own.run(), theirs.run())
    assert (own.tokens, theirs.tokens) == (expected, others)
    assert own.reserved is not None
    assert theirs.reserved is not None
    assert (own.reserved.computes, theirs.reserved.computes) == (True, False)
    await engines.idle("both", "alone")


@pytest.mark.parametrize("left", ["own", "theirs"])
async def test_each_role_drains_what_it_has(engines: Stack, unhurried: SlowIterations, left: str) -> None:
    """However much longer the other one takes; neither takes anything new."""
    both = await engines.decode("both", colocated=True, chunk_tokens=32)
    alone = await engines.decode("alone")
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    new = 60 if left == "own" else 5
    tokens, expected = engines.reference.prompt(20, new)
    other, others = engines.reference.prompt(75 if left == "own" else 450, 10, 200)
    own = turn(prefill, both, engines.model, tokens, new)
    theirs = turn(prefill, alone, engines.model, other, 10)
    tasks = await started_in_order([own, theirs])
    await eventually(lambda: len(own.tokens) > 1)
    engines.processes["both"].stop.set()
    await asyncio.sleep(0)
    for refused in (
        turn(prefill, both, engines.model, tokens, 5),
        turn(prefill, alone, engines.model, tokens, 5),
    ):
        with pytest.raises(KVCommonsError):
            await refused.run()
    await asyncio.gather(*tasks)
    assert (own.tokens, theirs.tokens) == (expected, others)
    await asyncio.wait_for(engines.tasks["both"], scaled(15))
    await engines.idle("alone")


async def test_an_objective_that_no_token_keeps_is_warned_of(
    engines: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """It bounds the chunks beside tokens, of which the least there are then; so decode starts."""
    decode = await engines.decode(
        engine={"calibrate_s": 0.2}, tbt_objective_s=1e-9, max_local_prefill_tokens=ALL, chunk_tokens=256
    )
    said = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert [one for one in said if "tbt_objective_s = " in one and "is less than a token takes here" in one]
    tokens, expected = engines.reference.prompt(75, 20)
    made = turn(None, decode, engines.model, tokens, 20)
    assert (await made.run()).tokens == expected
    await engines.idle("decode")
