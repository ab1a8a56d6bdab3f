"""Decode in pipeline stages whose sequences lie on other holders, too (SPP and KVP together: Mnemosyne,
section 4.5): its tokens are those of transformers, whatever becomes of a holder or a stage, and nobody keeps
a block."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
import torch

from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import CapacityExhausted, DataLoss, KVCommonsError, Unavailable
from kvcommons.pb import common_pb2
from tests.contract.engine_stack import BLOCK, Stack, no_iterations, prefill_idle, ready, settings, slow
from tests.contract.engine_turns import (
    Turn,
    assert_exact,
    prompt,
    started_in_order,
    turn,
    whole_beside_a_kill,
)
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_truncation import Session, stays_in_use
from tests.contract.truncation_reference import TruncatedReference
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

POOLS = ("pool-0", "pool-1", "pool-2")
GROW: dict[str, Any] = {"placement": "grow", "borrow_blocks": 1}
OFFLOAD: dict[str, Any] = {"placement": "offload", "borrow_blocks": 2}


async def lent(engines: Stack, *pools: str) -> int:
    """Segments there."""
    return sum([len((await engines.inspect(name)).segments) for name in pools])


@pytest.mark.parametrize(
    ("engines", "stages", "share"),
    [
        ("llama", 2, 9),
        ("qwen2-sliding", 3, 5),
        ("qwen3", 2, 1),
        slow("llama", 3, 1),
        slow("qwen2-sliding", 2, 40),
    ],
    indirect=["engines"],
)
async def test_a_sequence_over_one_to_seventeen_holders(engines: Stack, stages: int, share: int) -> None:
    """`grow`: 17 blocks of prompt, `share` on each holder, and a new one as it decodes. Logits are compared
    as logarithms of probabilities."""
    await engines.lenders(24, 24, 24)
    prefill = await engines.prefill()
    decode = await engines.staged_decode(stages, holder_tokens=share * BLOCK, **GROW)
    tokens, expected = engines.reference.prompt(260, 40)
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)
    one = await turn(prefill, decode, engines.model, tokens, 40, sampling=sampling).run()
    assert_exact(engines.reference, one, tokens, expected)
    assert one.borrowed or share == 40
    await engines.idle("decode", *POOLS)
    await prefill_idle(prefill)


@pytest.mark.parametrize(
    ("engines", "placed"),
    [("llama", OFFLOAD), ("mistral-sliding", {"placement": "overflow"})],
    indirect=["engines"],
)
async def test_several_sequences_here_and_elsewhere_generate_the_reference(
    engines: Stack, placed: dict[str, Any]
) -> None:
    """More than there are stages, from a prefill in stages: each of its stages writes its layers to holders,
    too. With `overflow` those that do not fit here go on elsewhere."""
    await engines.lenders(40, 40)
    prefill = await engines.staged(2)
    decode = await engines.staged_decode(2, engine={"capacity_tokens": 20 * BLOCK}, **placed)
    known = [engines.reference.prompt(length, 60) for length in (140, 33, 16, 100, 1)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in known]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in known]
    assert any(one.borrowed for one in turns)
    await engines.idle("decode", *POOLS[:2])
    await prefill_idle(prefill)


@pytest.mark.parametrize("placed", [OFFLOAD, {**GROW, "holder_tokens": 3 * BLOCK}], ids=["offload", "grow"])
async def test_what_lies_elsewhere_is_saved_and_loaded(engines: Stack, placed: dict[str, Any]) -> None:
    """All layers of it, by its holders: a decode of one process goes on from it, and so do stages, whose
    holders load it."""
    await engines.lenders(24, 24, 24)
    store, prefill = await engines.kvstore(), await engines.prefill()
    decode = await engines.staged_decode(2, "d1", **placed)
    tokens, expected = engines.reference.prompt(75, 96)
    first = await turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0)).run()
    assert first.tokens == expected[:32]
    full, known = (75 + 32 - 1) // BLOCK, tokens + expected[:32]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    await engines.idle("d1", *POOLS)

    staged = await engines.staged_decode(3, "d2", **placed)
    second = turn(prefill, staged, engines.model, known, 32, history=engines.history(full))
    assert (await second.run()).tokens == expected[32:64]
    assert second.reserved is not None
    assert second.reserved.push_from_block == full
    await engines.idle("d2", *POOLS)
    full, known = (75 + 64 - 1) // BLOCK, tokens + expected[:64]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    whole = await engines.decode("d3")
    third = turn(prefill, whole, engines.model, known, 32, history=engines.history(full))
    assert (await third.run()).tokens == expected[64:]
    assert not third.missing
    await engines.idle("d3")


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_a_head_group_attends_for_stages(engines: Stack) -> None:
    await engines.lenders(40, 40, heads=[("group", "0/2"), ("group", "1/2")])
    store, prefill = await engines.kvstore(), await engines.prefill()
    decode = await engines.staged_decode(2, **OFFLOAD)
    known = [engines.reference.prompt(length, 40) for length in (140, 33, 16)]
    turns = [
        turn(prefill, decode, engines.model, tokens, 40, history=engines.history(0)) for tokens, _ in known
    ]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in known]
    assert all(one.borrowed for one in turns)
    tokens, expected = known[0]
    full = (140 + 40 - 1) // BLOCK
    assert await stored(engines, store, (tokens + expected)[: full * BLOCK]) == full
    await engines.idle("decode", *POOLS[:2])


GROUPS = [("a", "0/2"), ("a", "1/2"), ("b", "0/2"), ("b", "1/2")]
PARTS = tuple(f"pool-{number}" for number in range(4))


@pytest.mark.parametrize(
    ("engines", "stages", "tensor", "placed"),
    [
        ("llama", 1, 2, OFFLOAD),
        ("qwen2-sliding", 2, 2, {**GROW, "holder_tokens": 5 * BLOCK}),
        ("llama-tied-biased", 2, 2, {"placement": "overflow", "engine": {"capacity_tokens": 12 * BLOCK}}),
        slow("mistral-sliding", 3, 2, OFFLOAD),
    ],
    indirect=["engines"],
)
async def test_ranks_attend_at_the_parts_of_head_groups(
    engines: Stack, stages: int, tensor: int, placed: dict[str, Any]
) -> None:
    """Each at those that have its heads: all three dimensions together, where there are stages, too. Prefill
    has both as well. What was generated is saved."""
    await engines.lenders(24, 24, 24, 24, heads=GROUPS)
    store, prefill = await engines.kvstore(), await engines.staged(2, tensor=2)
    decode = await engines.staged_decode(stages, tensor=tensor, **placed)
    known = [engines.reference.prompt(length, 40) for length in (140, 33, 16, 75)]
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)
    turns = [
        turn(prefill, decode, engines.model, tokens, 40, sampling=sampling, history=engines.history(0))
        for tokens, _ in known
    ]
    await asyncio.gather(*(one.run() for one in turns))
    for one, (tokens, expected) in zip(turns, known, strict=True):
        assert_exact(engines.reference, one, tokens, expected)
    assert any(one.borrowed for one in turns)
    await engines.idle("decode", *PARTS)
    tokens, expected = known[0]
    full = (140 + 40 - 1) // BLOCK
    assert await stored(engines, store, (tokens + expected)[: full * BLOCK]) == full
    whole = await engines.decode("whole")
    rest = turn(prefill, whole, engines.model, tokens + expected[:36], 4, history=engines.history(full))
    assert (await rest.run()).tokens == expected[36:]
    await engines.idle("whole")
    await prefill_idle(prefill)


async def test_ranks_find_nobody_where_pools_have_all_heads(engines: Stack) -> None:
    await engines.lenders(40)
    prefill = await engines.prefill()
    small = {"placement": "overflow", "engine": {"capacity_tokens": 12 * BLOCK}}
    decode = await engines.staged_decode(1, tensor=2, **small)
    with pytest.raises(CapacityExhausted, match=r"nobody lends them.* 2 ranks attend at head groups only"):
        await turn(prefill, decode, engines.model, prompt(250, 2), 2).run()
    await engines.idle("decode", "pool-0")


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_one_rank_loses_is_no_token(
    engines: Stack, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its tenth token, by one of two ranks of the second of two stages; another sequence goes on."""
    await engines.lenders(40, 40, heads=GROUPS[:2])
    prefill, decode = await engines.prefill(), await engines.staged_decode(2, tensor=2, **OFFLOAD)
    (kept, expected), (tokens, answer) = (engines.reference.prompt(length, 40) for length in (60, 75))
    close = TokenRows.close

    def closing(rows: TokenRows) -> None:
        close(rows)
        model = rows._core.model
        if model.rank.number == rank and not model.first:
            for row, sequence in enumerate(rows.batch.sequences):
                if list(sequence.tokens[:75]) == tokens and len(sequence.tokens) == 85:
                    rows.lost[row] = DataLoss("as if its holder had lost it")

    monkeypatch.setattr(TokenRows, "close", closing)
    one, other = (turn(prefill, decode, engines.model, some, 40) for some in (kept, tokens))
    made = await asyncio.gather(one.run(), other.run(), return_exceptions=True)
    assert one.tokens == expected
    assert isinstance(made[1], DataLoss)
    assert ("another rank" in str(made[1])) == bool(rank)
    assert other.tokens == answer[:10]
    await engines.idle("decode", *PARTS[:2])


@pytest.mark.parametrize("placed", [OFFLOAD, {**GROW, "holder_tokens": 3 * BLOCK}], ids=["offload", "grow"])
async def test_truncated_sessions_go_on(engines: Stack, placed: dict[str, Any]) -> None:
    """Each stage turns the queries of the head that lies elsewhere."""
    await engines.lenders(40, 40, 40)
    store, prefill = await engines.kvstore(), await engines.prefill(loads="always")
    pairs = [(prefill, await engines.staged_decode(stages, f"d{stages}", **placed)) for stages in (2, 3)]
    await stays_in_use(Session(engines, TruncatedReference(engines.folder)), 2, store, pairs)
    await engines.idle("d2", "d3", *POOLS)


@pytest.mark.parametrize("placed", [OFFLOAD, {"placement": "local"}], ids=["offload", "local"])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_what_a_stage_loses_is_no_token_and_is_not_saved(
    engines: Stack, number: int, placed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sequences one is lost at one of three stages, by the token that fills a block: it says so, after
    the tokens before it, and the other one goes on. What the stages behind make of it is not saved: when the
    same tokens come again, the store has what belongs to them."""
    await engines.lenders(40, 40)
    store, prefill = await engines.kvstore(), await engines.prefill()
    decode = await engines.staged_decode(3, **placed)
    (kept, expected), (tokens, answer) = (engines.reference.prompt(length, 40) for length in (60, 75))
    attend, close, over = TokenRows.attend, TokenRows.close, False

    def lost_row(rows: TokenRows) -> int | None:
        for row, sequence in enumerate(rows.batch.sequences):
            hit = list(sequence.tokens[:75]) == tokens and len(sequence.tokens) == 80 and not over
            if hit and rows._core.layers.start == number:
                return row
        return None

    def attending(rows: TokenRows, *arguments: Any, **named: Any) -> torch.Tensor:
        attention, row = attend(rows, *arguments, **named), lost_row(rows)
        if row is not None:
            attention[row] = 0
        return attention

    def closing(rows: TokenRows) -> None:
        close(rows)
        if (row := lost_row(rows)) is not None:
            rows.lost[row] = DataLoss("as if its holder had lost it")

    monkeypatch.setattr(TokenRows, "attend", attending)
    monkeypatch.setattr(TokenRows, "close", closing)
    monkeypatch.setattr(TokenRows, "paged", lambda rows: None)
    one = turn(prefill, decode, engines.model, kept, 40, history=engines.history(0))
    other = turn(prefill, decode, engines.model, tokens, 40, history=engines.history(0))
    made = await asyncio.gather(one.run(), other.run(), return_exceptions=True)
    assert one.tokens == expected
    assert isinstance(made[1], DataLoss)
    assert "as if its holder" in str(made[1])
    assert other.tokens == answer[:5]
    await engines.idle("decode", *POOLS[:2])
    assert await stored(engines, store, (tokens + answer)[: 5 * BLOCK]) == 4

    over = True
    again = turn(prefill, decode, engines.model, tokens, 20, history=engines.history(0))
    assert (await again.run()).tokens == answer[:20]
    assert await stored(engines, store, (tokens + answer)[: 5 * BLOCK]) == 5
    fresh = await engines.decode("fresh")
    rest = turn(prefill, fresh, engines.model, tokens + answer[:20], 20, history=engines.history(5))
    assert (await rest.run()).tokens == answer[20:]
    await engines.idle("decode", "fresh", *POOLS[:2])


@pytest.mark.usefixtures("unhurried")
async def test_a_holder_is_killed_and_only_its_sequences_end(engines: Stack) -> None:
    pools = await engines.lenders(40, 40, process=True)
    prefill, decode = await engines.prefill(), await engines.staged_decode(2, **OFFLOAD)
    known = [engines.reference.prompt(length, 60) for length in (75, 33, 60, 20)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in known]
    with no_iterations():
        running = await started_in_order(turns)  # so that both pools have some
    assert all([await lent(engines, name) for name in POOLS[:2]])
    await eventually(lambda: all(len(one.tokens) > 5 for one in turns))
    pools[0].kill()
    pools[0].wait()
    made = await asyncio.gather(*running, return_exceptions=True)
    failed = [isinstance(result, BaseException) for result in made]
    assert any(failed)
    assert not all(failed)
    for one, result, (_, expected) in zip(turns, made, known, strict=True):
        assert one.tokens == expected[: len(one.tokens)]
        if isinstance(result, BaseException):
            assert isinstance(result, DataLoss | Unavailable), result
            assert "holder" in str(result)
        else:
            assert one.tokens == expected
    await engines.idle("decode", "pool-1")
    again = turn(prefill, decode, engines.model, known[0][0], 60)
    assert (await again.run()).tokens == known[0][1]
    await engines.idle("decode", "pool-1")


@pytest.mark.usefixtures("unhurried")
async def test_a_stage_is_killed_and_holders_have_their_blocks_back(engines: Stack) -> None:
    await engines.lenders(40, 40)
    prefill = await engines.prefill()
    decode = await engines.staged_decode(2, process=True, **OFFLOAD)
    known = [engines.reference.prompt(length, 60) for length in (75, 33)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in known]
    running = [asyncio.create_task(one.run()) for one in turns]
    await eventually(lambda: all(len(one.tokens) > 5 for one in turns))
    engines.children[-1].kill()
    engines.children[-1].wait()
    for task in running:
        with pytest.raises(Unavailable, match="stage"):
            await task
    await engines.idle("decode", *POOLS[:2])
    engines.decode_stage(1, 2, process=True, **OFFLOAD)
    await engines.decode_together(decode)
    for one, (tokens, expected) in zip(turns, known, strict=True):
        heard = len(one.tokens)
        assert one.tokens == expected[:heard]
        again = turn(
            prefill, decode, engines.model, tokens + one.tokens, 60 - heard, prompt_tokens=len(tokens)
        )
        assert (await again.run()).tokens == expected[heard:]
    await engines.idle("decode", *POOLS[:2])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("shape", "placed"),
    [((2, 1), OFFLOAD), ((2, 1), {**GROW, "holder_tokens": 3 * BLOCK}), ((1, 2), OFFLOAD), ((2, 2), OFFLOAD)],
    ids=["offload", "grow", "ranks", "all"],
)
async def test_kills_under_load(engines: Stack, shape: tuple[int, int], placed: dict[str, Any]) -> None:
    """Thirty times a stage, a rank or a holder is killed at some moment while sequences arrive and generate:
    each has the reference's tokens up to a clear error, or all of them, and all blocks come back."""
    draw, (stages, tensor) = random.Random(7), shape
    parts = GROUPS[:2] if tensor > 1 else ()
    pools = dict(zip(POOLS, await engines.lenders(60, 60, process=True, heads=parts), strict=False))
    prefill = await engines.prefill()
    decode = await engines.staged_decode(stages, tensor=tensor, process=True, **placed)
    members = dict(zip(range(1, stages * tensor), engines.children[2:], strict=True))
    known = [engines.reference.prompt(length, 60) for length in (200, 120, 75, 33)]

    def turns() -> list[Turn]:
        return [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in known]

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
            engine = settings(engines.folder, capacity_tokens=60 * BLOCK)
            part = dict(zip(POOLS, parts, strict=False)).get(victim, (None, None))
            pools[victim] = engines.pool_process(victim, engine, *part)
            await ready(partial(engines.inspect, victim))
        else:
            stage, rank = divmod(victim, tensor)
            engines.decode_stage(stage, stages, rank=rank, tensor=tensor, process=True, **placed)
            members[victim] = engines.children[-1]
        await engines.decode_together(decode)
    assert exact
    assert refused
    made = turns()
    await asyncio.gather(*(one.run() for one in made))
    assert [one.tokens for one in made] == [expected for _, expected in known]
    await engines.idle("decode", *pools)


async def test_a_short_prompt_says_what_it_lacks(engines: Stack) -> None:
    await engines.lenders(2)
    prefill, decode = await engines.prefill(), await engines.staged_decode(2, **OFFLOAD)
    with pytest.raises(KVCommonsError, match="nobody lends"):
        await turn(prefill, decode, engines.model, prompt(60, 2), 2).run()
    await engines.idle("decode", "pool-0")
