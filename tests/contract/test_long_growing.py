"""Prompts of 16K tokens of the 7M model in chunks of any size, in stages and ranks, and over holders that
join while they are computed: tokens and log-probabilities are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcommons.engine.chunk_budget import ChunkBudget
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from tests.contract.engine_stack import BLOCK, Stack, prefill_idle, ready, scale_calls, settings
from tests.contract.engine_turns import Turn, turn
from tests.contract.test_engine_growing import lent, until_lent
from tests.contract.test_engine_reuse import stored
from tests.long_prompt import LongPrompt, long_prompt
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(900)]

ANSWER = 6
CAPACITY = 17_000
HALF = 8000 // BLOCK  # of the prompt's blocks
# So many stages of so many ranks, and who of them, or of their holders, is killed.
VICTIMS = [
    (2, 1, "nobody"), (4, 1, "nobody"), (2, 2, "nobody"), (4, 1, "stage"), (2, 2, "stage"), (1, 2, "rank"),
    (2, 2, "rank"), (2, 1, "holder"), (2, 2, "holder"),
]  # fmt: skip
SAMPLING = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> LongPrompt:
    return long_prompt(tmp_path_factory.mktemp("7m"), ANSWER)


@pytest.fixture
async def stack(
    long: LongPrompt, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    scale_calls(monkeypatch)
    nobody: Any = None
    made = Stack(socket_folder, long.folder, nobody)
    yield made
    await made.close()


def asked(stack: Stack, long: LongPrompt, prefill: Any, decode: Any, **changes: Any) -> Turn:
    changes = {"sampling": SAMPLING, "start_wait_ms": 300_000} | changes
    one = turn(prefill, decode, stack.model, long.tokens, ANSWER, **changes)
    one.call_s = 300.0
    return one


def assert_exact(one: Turn, long: LongPrompt) -> None:
    assert one.tokens == long.answer
    assert [token.logprob for token in one.sampled] == pytest.approx(long.logprobs, abs=1e-3)


@pytest.mark.parametrize("chunk_tokens", [32, 4096])
async def test_in_chunks_of_one_size(stack: Stack, long: LongPrompt, chunk_tokens: int) -> None:
    await stack.lenders()
    prefill = await stack.prefill(engine={"capacity_tokens": CAPACITY}, chunk_tokens=chunk_tokens)
    decode = await stack.decode(engine={"capacity_tokens": CAPACITY})
    one = asked(stack, long, prefill, decode)
    await one.run()
    assert_exact(one, long)
    await stack.idle("decode")
    await prefill_idle(prefill)


@pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
async def test_in_chunks_that_keep_others_objective(
    stack: Stack, long: LongPrompt, monkeypatch: pytest.MonkeyPatch, stages: int, tensor: int
) -> None:
    """Decode computes the prompt beside a sequence that generates, in chunks that its objective leaves."""
    chunks: list[int] = []
    add = ChunkBudget.add

    def noted(budget: ChunkBudget, chunk: IterationWork) -> None:
        chunks.append(int(chunk.rows))
        add(budget, chunk)

    monkeypatch.setattr(ChunkBudget, "add", noted)
    await stack.lenders()
    decode = await stack.staged_decode(
        stages, tensor=tensor, engine={"capacity_tokens": 2 * CAPACITY}, max_local_prefill_tokens=CAPACITY,
        chunk_tokens=4096, tbt_objective_s=0.1,
    )  # fmt: skip
    beside = turn(None, decode, stack.model, long.tokens[-64:], 4000)
    beside.call_s = 300.0
    talking = asyncio.create_task(beside.run())
    await eventually(lambda: bool(beside.tokens))
    chunks.clear()
    one = asked(stack, long, None, decode)
    await one.run()
    talking.cancel()
    await asyncio.gather(talking, return_exceptions=True)
    assert_exact(one, long)
    assert one.reserved is not None
    assert one.reserved.computes
    assert 1 < len(beside.tokens) < 4000
    assert sum(chunks) == len(long.tokens)
    assert len(set(chunks)) > 2, "as the context grows, less is left of the objective"
    await stack.idle("decode")


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [((1, 2), (1, 1)), ((4, 1), (2, 1)), ((1, 2), (1, 2)), ((2, 2), (2, 2))],
    ids=lambda shape: f"{shape[0]}x{shape[1]}",
)
async def test_in_stages_and_ranks(
    stack: Stack, long: LongPrompt, prefills: tuple[int, int], decodes: tuple[int, int]
) -> None:
    """So many stages of so many ranks each: of prefill, and of decode."""
    await stack.lenders()
    engine: dict[str, Any] = {"capacity_tokens": CAPACITY}
    prefill = await stack.staged(prefills[0], tensor=prefills[1], engine=engine, chunk_tokens=512)
    decode = await stack.staged_decode(decodes[0], tensor=decodes[1], engine=engine)
    one = asked(stack, long, prefill, decode)
    await one.run()
    assert_exact(one, long)
    await stack.idle("decode")
    await prefill_idle(prefill)


@pytest.mark.parametrize("holders", [1, 2, 4])
async def test_over_one_to_four_holders_that_join(stack: Stack, long: LongPrompt, holders: int) -> None:
    share = -(-CAPACITY // holders)
    pools = [f"pool-{number}" for number in range(holders - 1)]
    await stack.lenders(*[share // BLOCK + 1 for _ in pools])
    prefill = await stack.prefill(engine={"capacity_tokens": 2048}, chunk_tokens=512)
    decode = await stack.decode(
        placement="grow", holder_tokens=share, engine={"capacity_tokens": CAPACITY}, attend_deadline_s=20.0
    )
    one = asked(stack, long, prefill, decode)
    running = asyncio.create_task(one.run())
    joined: list[int] = []
    while one.first is None and not running.done():
        joined.append(sum([len((await stack.inspect(name)).segments) for name in pools]))
        await asyncio.sleep(0.05)
    await running
    assert_exact(one, long)
    assert joined == sorted(joined)
    assert set(joined) == set(range(holders)), "they joined one after another"
    await stack.idle("decode", *pools)
    await prefill_idle(prefill)


async def half_stored(stack: Stack, long: LongPrompt, store: BlocksStub, prefill: Any, decode: Any) -> None:
    """The prompt's first half is computed, and saved."""
    tokens = long.tokens[: HALF * BLOCK]
    half = turn(prefill, decode, stack.model, tokens, 1, history=stack.history(0))
    half.call_s = 300.0
    await half.run()
    assert await stored(stack, store, tokens) == HALF


async def assert_goes_on(stack: Stack, long: LongPrompt, prefill: Any, decode: Any) -> None:
    """Behind the half that is stored, of which nothing is computed again."""
    one = asked(stack, long, prefill, decode, history=stack.history(HALF))
    await one.run()
    assert_exact(one, long)
    assert one.first is not None
    assert one.first.cached_tokens == HALF * BLOCK


@pytest.mark.parametrize(
    ("prefills", "memory", "decodes"),
    [
        ((1, 1), 2048, (1, 1)),
        ((2, 1), 2048, (1, 1)),
        ((2, 1), CAPACITY, (1, 1)),
        ((2, 2), CAPACITY, (1, 1)),
        ((4, 1), CAPACITY, (2, 1)),
        ((1, 2), CAPACITY, (1, 2)),
        ((2, 2), CAPACITY, (2, 2)),
    ],
    ids=str,
)
async def test_with_history_from_the_store(
    stack: Stack, long: LongPrompt, prefills: tuple[int, int], memory: int, decodes: tuple[int, int]
) -> None:
    """Half of it is fetched to the first two holders, the others join behind them, or to the stages and ranks
    that generate; those of prefill that have room for all of it load what they need of it themselves."""
    stages, tensor = prefills
    pools = ("pool-0", "pool-1", "pool-2")
    await stack.lenders(*[300 for _ in pools])
    store = await stack.kvstore()
    whole: dict[str, Any] = {"engine": {"capacity_tokens": CAPACITY}, "chunk_tokens": 512}
    prefill = await stack.staged(stages, tensor=tensor, **whole)
    grow: dict[str, Any] = {
        "placement": "grow", "holder_tokens": 4096, "engine": {"capacity_tokens": CAPACITY},
        "attend_deadline_s": 20.0, "fetch_deadline_s": 60.0,
    }  # fmt: skip
    decode = await stack.decode(**grow)
    await half_stored(stack, long, store, prefill, decode)
    part: dict[str, Any] = {"engine": {"capacity_tokens": memory}, "chunk_tokens": 512}
    if stages * tensor > 1:
        other = await stack.staged(stages, "other", tensor=tensor, loads="always", **part)
    else:
        other = await stack.prefill("other", **part)
    if decodes == (1, 1):
        fresh = await stack.decode("fresh", **grow)
    else:
        fresh = await stack.staged_decode(
            decodes[0], "fresh", tensor=decodes[1], **grow | {"placement": "local"}
        )
    await assert_goes_on(stack, long, other, fresh)
    await stack.idle("fresh", *pools)


async def test_with_history_where_stages_of_ranks_attend_elsewhere(stack: Stack, long: LongPrompt) -> None:
    """All three together behind a history: half is fetched to two holders, each a head group of two pools,
    and each of the four that compute has an eighth of the prompt and attends over the rest there. Pools keep
    nothing of a sequence that has ended, so the history comes from the store."""
    heads = [(group, f"{part}/2") for group in "ab" for part in range(2)]
    pools = [f"pool-{number}" for number in range(4)]
    await stack.lenders(*[550] * len(pools), heads=heads)
    store = await stack.kvstore()
    offload: dict[str, Any] = {
        "placement": "offload", "borrow_blocks": 16, "engine": {"capacity_tokens": 2048},
        "attend_deadline_s": 20.0, "fetch_deadline_s": 60.0,
    }  # fmt: skip
    prefill = await stack.staged(2, tensor=2, engine={"capacity_tokens": 2048}, chunk_tokens=512)
    decode = await stack.decode(**offload)
    await half_stored(stack, long, store, prefill, decode)
    await stack.idle("decode", *pools)
    await assert_goes_on(stack, long, prefill, decode)
    await stack.idle("decode", *pools)
    await prefill_idle(prefill)


async def test_with_a_holder_that_is_killed_in_the_middle(stack: Stack, long: LongPrompt) -> None:
    killed, _ = await stack.lenders(600, 600, process=True)
    prefill = await stack.prefill(engine={"capacity_tokens": 2048}, chunk_tokens=512)
    decode = await stack.decode(
        placement="grow", holder_tokens=4096, engine={"capacity_tokens": CAPACITY}, lease_ms=2000,
        attend_deadline_s=20.0,
    )  # fmt: skip
    running = asyncio.create_task(asked(stack, long, prefill, decode).run())
    await until_lent(stack, 1, "pool-0")
    killed.kill()
    with pytest.raises(KVCommonsError):
        await running
    await stack.idle("decode", "pool-1")
    await prefill_idle(prefill)
    one = asked(stack, long, prefill, decode)
    await one.run()
    assert_exact(one, long)
    await stack.idle("decode", "pool-1")


@pytest.mark.parametrize("victim", ["nobody", "stage 1", "rank 1", "holder"])
async def test_two_stages_of_two_ranks_over_two_holders(stack: Stack, long: LongPrompt, victim: str) -> None:
    """All three together (section 4.5): four processes compute the prompt, a quarter of the model each, whose
    KV goes to two holders; one of them is killed, of the holders the one that joined first."""
    lenders = await stack.lenders(600, 600, process=True)
    shape: dict[str, Any] = {
        "tensor": 2, "process": True, "engine": {"capacity_tokens": CAPACITY}, "chunk_tokens": 512,
    }  # fmt: skip
    prefill = await stack.staged(2, **shape)
    members = {"rank 1": (0, 1), "stage 1": (1, 0)}
    decode = await stack.decode(
        placement="grow", holder_tokens=8192, engine={"capacity_tokens": CAPACITY}, lease_ms=2000,
        attend_deadline_s=20.0,
    )  # fmt: skip
    pools = ["pool-0", "pool-1"]
    if victim != "nobody":
        running = asyncio.create_task(asked(stack, long, prefill, decode).run())
        await until_lent(stack, 1, *pools)
        if victim == "holder":
            first, *_ = [name for name in pools if await lent(stack, name)]
            lenders[pools.index(first)].kill()
            pools.remove(first)
        else:
            number, rank = members[victim]
            stack.children[2 + 2 * number + rank - 1].kill()
        with pytest.raises(KVCommonsError):
            await running
        await stack.idle("decode", *pools)
        await prefill_idle(prefill)
        if victim in members:
            stack.stage(number, 2, rank=rank, **shape)
            await stack.together(prefill)
    one = asked(stack, long, prefill, decode)
    running = asyncio.create_task(one.run())
    await until_lent(stack, 1, *pools)
    await running
    assert_exact(one, long)
    await stack.idle("decode", *pools)
    await prefill_idle(prefill)


async def lends_again(stack: Stack, blocks: int, heads: Sequence[tuple[str, str]]) -> None:
    """The pool that was killed."""
    engine = settings(stack.folder, capacity_tokens=blocks * BLOCK)
    stack.pool_process("pool-1", engine, *(heads[1] if heads else ()))
    await ready(partial(stack.inspect, "pool-1"))


@pytest.mark.parametrize(("stages", "tensor", "victim"), VICTIMS)
async def test_a_prompt_beyond_the_memory_of_stages_of_ranks(
    stack: Stack, long: LongPrompt, stages: int, tensor: int, victim: str
) -> None:
    """All three together where a prompt is computed: prefill's processes have an eighth of it, and attend
    over the rest at two holders, each a head group of two pools where stages have two ranks. One is killed
    in the middle."""
    heads = [(group, f"{part}/2") for group in "ab" for part in range(2)] if tensor > 1 else []
    pools = [f"pool-{number}" for number in range(2 * tensor)]
    lenders = await stack.lenders(*[550] * len(pools), process=True, heads=heads)
    shape: dict[str, Any] = {
        "tensor": tensor, "process": True, "engine": {"capacity_tokens": 2048}, "chunk_tokens": 512,
    }  # fmt: skip
    prefill = await stack.staged(stages, **shape)
    decode = await stack.decode(
        placement="offload", borrow_blocks=16, engine={"capacity_tokens": 2048}, lease_ms=2000,
        attend_deadline_s=20.0,
    )  # fmt: skip
    one = asked(stack, long, prefill, decode)
    running = asyncio.create_task(one.run())
    if victim != "nobody":
        await eventually(lambda: one.reserved is not None)
        await asyncio.sleep(scaled(2))
        assert not running.done()
        number, rank = {"stage": (1, 0), "rank": (0, 1), "holder": (0, 0)}[victim]
        member = number * tensor + rank
        child = lenders[1] if victim == "holder" else stack.children[len(pools) + member - 1]
        child.kill()
        child.wait()
        with pytest.raises(KVCommonsError):
            await running
        await stack.idle("decode", *(name for name in pools if victim != "holder" or name != "pool-1"))
        await prefill_idle(prefill)
        if victim == "holder":
            await lends_again(stack, 550, heads)
        else:
            stack.stage(number, stages, rank=rank, **shape)
        await stack.together(prefill)
        one = asked(stack, long, prefill, decode)
        running = asyncio.create_task(one.run())
    await running
    assert_exact(one, long)
    assert one.reserved is not None
    assert sum(place.blocks > 0 for place in one.reserved.placements) == 2
    await stack.idle("decode", *pools)
    await prefill_idle(prefill)


@pytest.mark.parametrize(("stages", "tensor", "victim"), VICTIMS)
async def test_generation_in_stages_of_ranks_over_two_holders(
    stack: Stack, long: LongPrompt, stages: int, tensor: int, victim: str
) -> None:
    """All three together where sequences generate: beside the stages' own memory two holders, each a head
    group of two pools where stages have two ranks. One is killed in the middle of the answer, which is
    gone on with behind what was heard."""
    heads = [(group, f"{part}/2") for group in "ab" for part in range(2)] if tensor > 1 else []
    pools = [f"pool-{number}" for number in range(2 * tensor)]
    lenders = await stack.lenders(*[420] * len(pools), process=True, heads=heads)
    prefill = await stack.staged(2, tensor=tensor, engine={"capacity_tokens": CAPACITY}, chunk_tokens=512)
    shape: dict[str, Any] = {
        "placement": "grow", "holder_tokens": 6144, "engine": {"capacity_tokens": CAPACITY},
        "attend_deadline_s": 20.0, "lease_ms": 2000,
    }  # fmt: skip
    decode = await stack.staged_decode(stages, tensor=tensor, process=True, **shape)
    one = asked(stack, long, prefill, decode)
    running = asyncio.create_task(one.run())
    await until_lent(stack, len(pools), *pools)
    if victim == "nobody":
        await running
        assert_exact(one, long)
    else:
        await eventually(lambda: bool(one.tokens))
        number, rank = {"stage": (1, 0), "rank": (0, 1), "holder": (0, 0)}[victim]
        member = number * tensor + rank
        child = lenders[1] if victim == "holder" else stack.children[len(pools) + member - 1]
        child.kill()
        child.wait()
        with pytest.raises(KVCommonsError):
            await running
        heard = len(one.tokens)
        assert one.tokens == long.answer[:heard]
        alive = [name for name in pools if victim != "holder" or name != "pool-1"]
        await stack.idle("decode", *alive)
        if victim == "holder":
            await lends_again(stack, 420, heads)
        else:
            stack.decode_stage(number, stages, rank=rank, tensor=tensor, process=True, **shape)
            await stack.decode_together(decode)
        again = turn(
            prefill, decode, stack.model, long.tokens + one.tokens, len(long.answer) - heard,
            prompt_tokens=len(long.tokens),
        )  # fmt: skip
        assert (await again.run()).tokens == long.answer[heard:]
    await stack.idle("decode", *pools)
    await prefill_idle(prefill)
