"""Prompts beyond the memory of a prefill in stages, or ranks: each stage attends over its layers where they
lie (SPP and KVP together: Mnemosyne, section 4.5). Tokens are those of transformers, and nobody keeps a
block."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

import pytest
import torch

from kvcommons.errors import CapacityExhausted, KVCommonsError, Unavailable
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from kvcommons.prefill import joining
from kvcommons.prefill.spread import SpreadRows
from kvcommons.stages.group import StageGroup
from kvcommons.stages.iteration import StageIteration
from tests.contract.engine_stack import BLOCK, Stack, prefill_idle, ready, settings, slow
from tests.contract.engine_turns import Turn, prompt, turn, whole_beside_a_kill
from tests.contract.test_engine_spread import ANSWER, FULL, LARGE, PROMPT, SMALL, first_turn
from tests.contract.test_engine_stages import under_way
from tests.contract.test_stages_borrowing import lent

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

OFFLOAD: dict[str, Any] = {"placement": "offload", "borrow_blocks": 2}
POOLS = ("pool-0", "pool-1", "pool-2")
GROUPS = [("a", "0/2"), ("a", "1/2"), ("b", "0/2"), ("b", "1/2")]
PARTS = tuple(f"pool-{number}" for number in range(4))


GREEDY = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)


async def two_turns(engines: Stack, store: BlocksStub, prefill: Any, *decodes: tuple[str, Any]) -> Turn:
    """The second one, which finds the history of the first where that left it: at the same decode, or in the
    store."""
    (name, decode), (other, last) = decodes[0], decodes[-1]
    known, following = await first_turn(engines, store, prefill, decode)
    second = turn(prefill, last, engines.model, known, ANSWER, history=engines.history(FULL), sampling=GREEDY)
    assert (await second.run()).tokens == following
    logprobs = engines.reference.logprobs(known, following)
    assert [token.logprob for token in second.sampled] == pytest.approx(logprobs, abs=1e-4)
    await engines.idle(name, other)
    await prefill_idle(prefill)
    return second


@pytest.mark.parametrize(
    ("engines", "stages"),
    [("llama", 2), ("qwen2-sliding", 3), slow("qwen3", 3)],
    indirect=["engines"],
)
async def test_both_turns_over_the_memory_of_decode(engines: Stack, stages: int) -> None:
    await engines.lenders()
    store, prefill = await engines.kvstore(), await engines.staged(stages, engine=SMALL)
    decode = await engines.decode(engine=LARGE)
    second = await two_turns(engines, store, prefill, ("decode", decode))
    assert second.first is not None
    assert second.first.cached_tokens == FULL * BLOCK


@pytest.mark.parametrize(
    ("engines", "stages", "kind"),
    [
        ("llama", 2, {"engine": SMALL, "placement": "overflow"}),
        ("qwen3", 3, {"engine": LARGE, "placement": "grow", "holder_tokens": 5 * BLOCK, "borrow_blocks": 1}),
        slow("mistral-sliding", 3, {"engine": SMALL, "placement": "overflow"}),
    ],
    indirect=["engines"],
)
async def test_a_second_turn_over_other_holders(engines: Stack, stages: int, kind: dict[str, Any]) -> None:
    """Which fetch its history from the store. With `grow` they join while the prompt is computed."""
    await engines.lenders(24, 24, 24)
    store, prefill = await engines.kvstore(), await engines.staged(stages, engine=SMALL)
    decodes = [(name, await engines.decode(name, **kind)) for name in ("d1", "d2")]
    second = await two_turns(engines, store, prefill, *decodes)
    assert second.reserved is not None
    assert len(second.reserved.placements) > 1 or second.borrowed
    await engines.idle(*POOLS)


@pytest.mark.parametrize(
    ("engines", "stages", "tensor", "memory"),
    [("qwen2-sliding", 2, 1, SMALL), ("qwen2-sliding", 2, 1, LARGE), ("llama", 2, 2, LARGE)],
    indirect=["engines"],
    ids=["spread", "whole", "ranks"],
)
async def test_holders_join_while_stages_compute(
    engines: Stack, stages: int, tensor: int, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process asks for places, and all others hear where their layers and heads go: also of those
    that come after the ranks beside the first have begun to compute."""
    share, ask = StageGroup._share, joining.ask_places

    def sharing(group: StageGroup, iteration: StageIteration, hidden: torch.Tensor) -> None:
        share(group, iteration, hidden)
        time.sleep(0.1)

    def asking(*first: Any, **of: Any) -> Any:
        time.sleep(0.05)
        return ask(*first, **of)

    monkeypatch.setattr(StageGroup, "_share", sharing)
    monkeypatch.setattr(joining, "ask_places", asking)
    await engines.lenders(6, 6, 6)
    prefill = await engines.staged(stages, tensor=tensor, engine=memory)
    grow: dict[str, Any] = {"placement": "grow", "holder_tokens": 5 * BLOCK, "borrow_blocks": 1}
    decode = await engines.decode(engine=SMALL, **grow)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    one = await turn(prefill, decode, engines.model, tokens, ANSWER, sampling=GREEDY).run()
    assert one.tokens == expected
    logprobs = engines.reference.logprobs(tokens, expected)
    assert [token.logprob for token in one.sampled] == pytest.approx(logprobs, abs=1e-4)
    assert one.reserved is not None
    assert sum(place.blocks for place in one.reserved.placements) < PROMPT // BLOCK
    await engines.idle("decode", *POOLS)
    await prefill_idle(prefill)


async def test_spread_prompts_take_turns_with_others(engines: Stack) -> None:
    """Two of them, and two whose blocks are all here, are in the stages at once."""
    await engines.lenders(40, 40)
    prefill = await engines.staged(2, engine=SMALL)
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 30 * BLOCK})
    known = [engines.reference.prompt(length, 8) for length in (230, 33, 300, 70)]
    turns = [turn(prefill, decode, engines.model, tokens, 8) for tokens, _ in known]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in known]
    await engines.idle("decode", *POOLS[:2])
    await prefill_idle(prefill)


@pytest.mark.parametrize(
    ("engines", "stages", "parts"),
    [("llama", 1, 2), ("qwen2-sliding", 2, 2), slow("llama", 3, 2)],
    indirect=["engines"],
)
async def test_ranks_attend_at_the_parts_of_head_groups(engines: Stack, stages: int, parts: int) -> None:
    """All three dimensions in prefill: each of two ranks at those that have its heads."""
    await engines.lenders(40, 40, 40, 40, heads=GROUPS[:4])
    store, prefill = await engines.kvstore(), await engines.staged(stages, tensor=2, engine=SMALL)
    decode = await engines.decode(**OFFLOAD)
    second = await two_turns(engines, store, prefill, ("decode", decode))
    assert second.reserved is not None
    assert all(len(place.parts) == parts for place in second.reserved.placements if place.blocks)
    await engines.idle(*PARTS)


async def test_ranks_refuse_a_prompt_whose_holders_have_all_heads(engines: Stack) -> None:
    await engines.lenders()
    prefill, decode = await engines.staged(1, tensor=2, engine=SMALL), await engines.decode(engine=LARGE)
    with pytest.raises(CapacityExhausted, match="needs 16 blocks and this prefill instance has 6"):
        await turn(prefill, decode, engines.model, prompt(PROMPT, 2), 2).run()
    await engines.idle("decode")
    await prefill_idle(prefill)


async def test_a_prompt_whose_decode_has_stages_needs_room_for_all_of_it(engines: Stack) -> None:
    """They do not attend for prefill: it says what that lacks, and nothing stays held."""
    await engines.lenders()
    prefill, decode = await engines.prefill(engine=SMALL), await engines.staged_decode(2, engine=LARGE)
    lacks = "needs 16 blocks and this prefill instance has 6: raise its capacity_tokens"
    with pytest.raises(CapacityExhausted, match=lacks):
        await turn(prefill, decode, engines.model, prompt(PROMPT, 2), 2).run()
    await engines.idle("decode")
    await prefill_idle(prefill)
    tokens, expected = engines.reference.prompt(5 * BLOCK, 4)
    shorter = turn(prefill, decode, engines.model, tokens, 4)
    assert (await shorter.run()).tokens == expected
    await engines.idle("decode")


@pytest.mark.parametrize("token", [100, PROMPT - 1], ids=["a chunk in the middle", "the last chunk"])
@pytest.mark.parametrize(("stages", "tensor"), [(3, 1), (2, 2)], ids=["3 stages", "2 x 2"])
@pytest.mark.parametrize("member", ["first", "next", "last"])
async def test_what_one_process_cannot_attend_over_ends_its_prompt_only(
    engines: Stack, stages: int, tensor: int, member: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job says so, others go on, and the stages stay together."""
    placed = {"engine": LARGE} if tensor == 1 else OFFLOAD
    await engines.lenders(*(() if tensor == 1 else (40, 40)), heads=GROUPS[:2])
    prefill, decode = (
        await engines.staged(stages, tensor=tensor, engine=SMALL),
        await engines.decode(**placed),
    )
    tokens, expected = engines.reference.prompt(PROMPT, 4)
    kept, answer = engines.reference.prompt(60, 4)
    over, write = False, SpreadRows.write

    def writing(rows: SpreadRows, layer: int, state: State) -> None:
        model, layers = rows._core.model, rows._core.layers
        first, last = not layers.start, layers.stop == model.spec.layers
        here = {"first": first, "last": last, "next": first if tensor > 1 else not (first or last)}[member]
        here &= model.rank.number == (0 if member == "first" else tensor - 1)
        if here and not over and token in rows.positions:
            raise Unavailable("as if a holder were gone")
        write(rows, layer, state)

    monkeypatch.setattr(SpreadRows, "write", writing)
    one, other = (turn(prefill, decode, engines.model, some, 4) for some in (tokens, kept))
    made = await asyncio.gather(one.run(), other.run(), return_exceptions=True)
    assert other.tokens == answer
    assert isinstance(made[0], Unavailable)
    assert "as if" in str(made[0]) or "another rank" in str(made[0])
    assert not one.tokens
    over = True
    again = turn(prefill, decode, engines.model, tokens, 4)
    assert (await again.run()).tokens == expected
    assert again.first is not None
    await engines.idle("decode")
    await prefill_idle(prefill)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("victim", ["stage", "holder"])
async def test_a_process_is_killed_in_the_middle(engines: Stack, victim: str) -> None:
    """The prompt ends with an error that says so; nobody keeps a block of it, and the next one is exact."""
    pools = await engines.lenders(40, 40, process=True)
    prefill = await engines.staged(2, process=True, engine=SMALL)
    decode = await engines.decode(lease_ms=2000, **OFFLOAD)
    tokens, expected = engines.reference.prompt(480, 8)
    one = turn(prefill, decode, engines.model, tokens, 8)
    running = asyncio.create_task(one.run())
    await under_way(prefill)
    holders = [name for name in POOLS[:2] if await lent(engines, name)]
    child = engines.children[-1] if victim == "stage" else pools[POOLS.index(holders[0])]
    child.kill()
    child.wait()
    with pytest.raises(KVCommonsError):
        await running
    alive = [name for name in POOLS[:2] if victim == "stage" or name != holders[0]]
    await engines.idle("decode", *alive)
    await prefill_idle(prefill)
    if victim == "stage":
        engines.stage(1, 2, process=True, engine=SMALL)
        await engines.together(prefill)
    again = turn(prefill, decode, engines.model, tokens, 8)
    assert (await again.run()).tokens == expected
    await engines.idle("decode", *alive)
    await prefill_idle(prefill)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("stages", "tensor", "placed"),
    [
        (2, 1, OFFLOAD),
        (3, 1, {"placement": "grow", "holder_tokens": 8 * BLOCK, "borrow_blocks": 1, "engine": LARGE}),
        (2, 2, OFFLOAD),
    ],
    ids=["2x1 offload", "3x1 grow", "2x2 offload"],
)
async def test_kills_under_load(engines: Stack, stages: int, tensor: int, placed: dict[str, Any]) -> None:
    """Thirty times a stage, a rank or a holder is killed at some moment while spread prompts, and one that is
    not, are computed: each has the reference's tokens, or a clear error, and all blocks come back."""
    draw = random.Random(11)
    parts = GROUPS[:2] if tensor > 1 else ()
    pools = dict(zip(POOLS, await engines.lenders(90, 90, process=True, heads=parts), strict=False))
    prefill = await engines.staged(stages, tensor=tensor, process=True, engine=SMALL)
    members = dict(zip(range(1, stages * tensor), engines.children[2:], strict=True))
    decode = await engines.decode(lease_ms=2000, **placed)
    known = [engines.reference.prompt(length, 8) for length in (480, 300, 200, 33)]

    def turns() -> list[Turn]:
        return [turn(prefill, decode, engines.model, tokens, 8) for tokens, _ in known]

    began_s = asyncio.get_running_loop().time()
    await asyncio.gather(*(one.run() for one in turns()))
    calm_s = asyncio.get_running_loop().time() - began_s
    exact = refused = 0
    for _ in range(30):
        made = turns()
        victim = draw.choice([*pools, *members])
        child = pools[victim] if isinstance(victim, str) else members[victim]
        whole = await whole_beside_a_kill(made, [expected for _, expected in known], child, draw, calm_s)
        exact, refused = exact + whole, refused + len(made) - whole
        await engines.idle("decode", *(name for name in pools if name != victim))
        await prefill_idle(prefill)
        if isinstance(victim, str):
            engine = settings(engines.folder, capacity_tokens=90 * BLOCK)
            part = dict(zip(POOLS, parts, strict=False)).get(victim, (None, None))
            pools[victim] = engines.pool_process(victim, engine, *part)
            await ready(partial(engines.inspect, victim))
        else:
            stage, rank = divmod(victim, tensor)
            engines.stage(stage, stages, rank=rank, tensor=tensor, process=True, engine=SMALL)
            members[victim] = engines.children[-1]
        await engines.together(prefill)
    assert exact
    assert refused
    made = turns()
    await asyncio.gather(*(one.run() for one in made))
    assert [one.tokens for one in made] == [expected for _, expected in known]
    await engines.idle("decode", *pools)
    await prefill_idle(prefill)
