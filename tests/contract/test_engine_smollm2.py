"""A real chat model, SmolLM2-135M-Instruct, on every path of real instances: in float32 its tokens are those
of transformers. It has three KV heads of three query heads each, 30 layers, and a text that means something,
as none of the small random models of the other tests has."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2, holder_pb2, prefill_pb2_grpc
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from tests.contract.engine_drafts import MOST, counted, foreseen, outcome
from tests.contract.engine_stack import (
    BLOCK,
    SlowIterations,
    Stack,
    no_iterations,
    prefill_idle,
    ready,
    scale_calls,
)
from tests.contract.engine_turns import Reference, Turn, started_in_order, turn
from tests.contract.test_engine_heads import parts, pools
from tests.contract.test_engine_moves import (
    PAIR,
    ballast,
    debtor,
    lent,
    room,
    running,
    swap_in_rounds,
    two_that_owe_each_other,
)
from tests.contract.test_engine_pipelining import lanes
from tests.contract.test_engine_placement import most_segments
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_rotation import group, met, slices
from tests.contract.test_engine_truncation import Session, stays_in_use
from tests.contract.truncation_reference import TruncatedReference
from tests.exactness import assert_greedy, logits_of
from tests.machine import scaled
from tests.system.real_model import fetched_smollm2

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(300)]
pytest_plugins = ("tests.contract.engine_fixtures",)

TEXT = Path(__file__).parents[2] / "LICENSE"  # English, which no change of this project changes
ALL = 512  # tokens: every prompt of these tests
LENGTHS = (200, 75, 120)
ANSWER = 16
SMALL = {"capacity_tokens": 6 * BLOCK}
# Of log-probabilities, with sums in another order in each of 30 layers. What was seen is below 5e-5.
TOLERANCE = 2e-4
GREEDY = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)


class SmolLM2(Reference):
    """Paths that give the same answer ask transformers once."""

    def __init__(self) -> None:
        super().__init__(fetched_smollm2())
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def assert_greedy(self, tokens: Sequence[int], made: Sequence[int]) -> None:
        assert_greedy(made, self._logits_of(tokens, made))

    def logprobs(self, tokens: Sequence[int], made: Sequence[int]) -> list[float]:
        logprobs = self._logits_of(tokens, made).log_softmax(-1)
        return [float(row[token]) for row, token in zip(logprobs, made, strict=True)]

    def _logits_of(self, tokens: Sequence[int], made: Sequence[int]) -> Tensor:
        key = len(tokens), *tokens, *made
        if key not in self._logits:
            self._logits[key] = logits_of(self._model, tokens, made)
        return self._logits[key]


@cache
def english() -> list[int]:
    return Tokenizer.read(fetched_smollm2()).encode_text(TEXT.read_text())


def piece(length: int, seed: int) -> list[int]:
    """Of the text."""
    start = 61 * seed % (len(english()) - length)
    return english()[start : start + length]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return SmolLM2()


@pytest.fixture
async def engines(
    monkeypatch: pytest.MonkeyPatch, socket_folder: Path, reference: Reference
) -> AsyncIterator[Stack]:
    """An empty stack: a path starts in it what it needs."""
    scale_calls(monkeypatch)
    stack = Stack(socket_folder, fetched_smollm2(), reference)
    yield stack
    await stack.close()
    gc.collect()  # instances that a process outlives have their weights until then: up to 5 GB a path


def asked(
    engines: Stack, prefill: Any, decode: Any, number: int = 0, new: int = ANSWER, **changes: Any
) -> Turn:
    """Of each number another prompt."""
    tokens = piece(LENGTHS[number], 10 * number)
    return turn(prefill, decode, engines.model, tokens, new, sampling=GREEDY, **changes)


def going_on(engines: Stack, prefill: Any, decode: Any, before: Turn, **changes: Any) -> Turn:
    """The turn after this one: what was asked and answered is its prompt."""
    tokens = [*before.prompt, *before.tokens]
    return turn(prefill, decode, engines.model, tokens, ANSWER, sampling=GREEDY, **changes)


def assert_exact(engines: Stack, *turns: Turn) -> None:
    """All of an answer's tokens are those of transformers, and so are their log-probabilities."""
    for one in turns:
        tokens = list(one.prompt)
        assert len(tokens) + len(one.tokens) == one.request.job.max_position
        engines.reference.assert_greedy(tokens, one.tokens)
        expected = engines.reference.logprobs(tokens, one.tokens)
        assert [token.logprob for token in one.sampled] == pytest.approx(expected, abs=TOLERANCE)


async def alone_and_at_once(engines: Stack, prefill: Any, decode: Any) -> list[Turn]:
    """Three answers: the first alone, the others beside each other."""
    turns = [asked(engines, prefill, decode, number) for number in range(len(LENGTHS))]
    await turns[0].run()
    await asyncio.gather(*(one.run() for one in turns[1:]))
    assert_exact(engines, *turns)
    return turns


def computed_by_decode(*turns: Turn) -> list[bool]:
    return [one.reserved.computes for one in turns if one.reserved is not None]


def placed(one: Turn) -> list[int]:
    """Blocks of each holder of the prompt."""
    assert one.reserved is not None
    return [place.blocks for place in one.reserved.placements]


async def saved(engines: Stack, store: BlocksStub, prefill: Any, decode: Any, number: int = 0) -> Turn:
    """A first turn, once the store has all of its full blocks."""
    one = asked(engines, prefill, decode, number, history=engines.history(0))
    await one.run()
    assert_exact(engines, one)
    tokens = [*one.prompt, *one.tokens][: full_blocks(one) * BLOCK]
    assert await stored(engines, store, tokens) == full_blocks(one)
    return one


def full_blocks(one: Turn) -> int:
    """After its last token, which has no KV."""
    return (len(one.prompt) + len(one.tokens) - 1) // BLOCK


async def loaded(engines: Stack, prefill: Any, decode: Any, before: Turn) -> Turn:
    """The turn after this one, on instances that have all of its history from the store."""
    full = full_blocks(before)
    one = going_on(engines, prefill, decode, before, history=engines.history(full))
    await one.run()
    assert_exact(engines, one)
    assert one.first is not None
    assert (one.first.cached_tokens, one.first.device_tokens, one.missing) == (full * BLOCK, 0, [])
    return one


async def handed_over(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    turns = await alone_and_at_once(engines, prefill, decode)
    assert not any(computed_by_decode(*turns))
    await engines.idle("decode")


async def computed_where_it_generates(engines: Stack) -> None:
    decode = await engines.decode(max_local_prefill_tokens=ALL, chunk_tokens=32)
    turns = await alone_and_at_once(engines, None, decode)
    assert all(computed_by_decode(*turns))
    await engines.idle("decode")


async def one_process_with_both_roles(engines: Stack) -> None:
    """It computes its own prompts, and as prefill those of another instance."""
    both = await engines.decode("both", colocated=True, chunk_tokens=32)
    alone = await engines.decode("alone")
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    own, theirs = asked(engines, prefill, both), asked(engines, prefill, alone, 1)
    await asyncio.gather(own.run(), theirs.run())
    assert_exact(engines, own, theirs)
    assert computed_by_decode(own, theirs) == [True, False]
    await engines.idle("both", "alone")


async def history_in_memory_and_from_the_store(engines: Stack) -> None:
    """The second turn where the first one was, and on fresh instances."""
    store = await engines.kvstore()
    prefill, decode = await engines.prefill("p1"), await engines.decode("d1")
    first = await saved(engines, store, prefill, decode)
    second = going_on(engines, prefill, decode, first)
    await second.run()
    assert_exact(engines, second)
    assert second.first is not None
    assert second.first.cached_tokens
    prefill, decode = await engines.prefill("p2", loads="always"), await engines.decode("d2")
    again = await loaded(engines, prefill, decode, first)
    for one in (second, again):
        assert one.reserved is not None
        assert one.reserved.push_from_block == full_blocks(first)
    await engines.idle("d1", "d2")


async def overflow_to_pools_and_history_there(engines: Stack) -> None:
    """Pools save what was borrowed, and load it; three sequences share them and decode's six blocks."""
    store = await engines.kvstore()
    await engines.lenders(10, 10)
    settings: dict[str, Any] = {"placement": "overflow", "borrow_blocks": 1, "engine": SMALL}
    prefill, decode = await engines.prefill("p1"), await engines.decode("d1", **settings)
    turns = await alone_and_at_once(engines, prefill, decode)
    assert len(placed(turns[0])) > 1
    first = await saved(engines, store, prefill, decode)
    await engines.idle("d1", *pools(2))
    prefill, decode = await engines.prefill("p2", loads="always"), await engines.decode("d2", **settings)
    second = await loaded(engines, prefill, decode, first)
    assert len(placed(second)) > 1
    await engines.idle("d2", *pools(2))


async def all_kv_on_pools(engines: Stack) -> None:
    await engines.lenders(40, 40)
    prefill, decode = await engines.prefill(), await engines.decode(placement="offload", borrow_blocks=1)
    turns = [asked(engines, prefill, decode, number) for number in range(len(LENGTHS))]
    with no_iterations():
        tasks = await started_in_order(turns)
        seen = await engines.inspect("decode")
        assert seen.free_blocks == seen.total_blocks
    await asyncio.gather(*tasks)
    assert_exact(engines, *turns)
    await engines.idle("decode", *pools(2))


async def all_kv_on_pools_in_two_batches(engines: Stack) -> None:
    """Which take turns at the model and at the pools, and send a layer's rows in two messages."""
    await engines.lenders(40, 40)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", borrow_blocks=1, pipelining="on", mini_batches=2)
    await alone_and_at_once(engines, prefill, decode)
    assert lanes() == {"decode-lane-0", "decode-lane-1"}
    await engines.idle("decode", *pools(2))


async def a_kv_head_on_each_of_three_pools(engines: Stack) -> None:
    await engines.lenders(40, 40, 40, heads=parts("g", 3))
    prefill, decode = await engines.prefill(), await engines.decode(placement="offload", borrow_blocks=1)
    await alone_and_at_once(engines, prefill, decode)
    await engines.idle("decode", *pools(3))


async def spread_over_many_holders(engines: Stack) -> None:
    """Two blocks on each of them, and further ones join as the answer grows."""
    await engines.lenders(24, 24, 24)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="grow", holder_tokens=2 * BLOCK, borrow_blocks=1)
    one = asked(engines, prefill, decode)
    running = asyncio.create_task(one.run())
    most = await most_segments(engines, running)
    assert_exact(engines, one)
    assert len(most) >= 5
    assert max(most) <= 2
    await engines.idle("decode", *pools(3))


async def a_prompt_beyond_prefills_memory(engines: Stack) -> None:
    """Prefill holds a chunk at a time; what came before is attended over at decode and at the pools."""
    await engines.lenders(10, 10)
    prefill = await engines.prefill(engine=SMALL)
    decode = await engines.decode(placement="overflow", borrow_blocks=1, engine=SMALL)
    one = asked(engines, prefill, decode)
    await one.run()
    assert_exact(engines, one)
    assert len(placed(one)) > 1
    await engines.idle("decode", *pools(2))


async def prefill_and_decode_in_stages(engines: Stack) -> None:
    """One of them, then both; what stages saved other ones load, each its layers."""
    await engines.lenders()
    store = await engines.kvstore()
    whole, prefill = await engines.prefill("p1"), await engines.staged(2, "p2", loads="always")
    decode, staged = await engines.decode("d1"), await engines.staged_decode(2, "d2")
    await alone_and_at_once(engines, prefill, decode)
    await alone_and_at_once(engines, whole, staged)
    first = await saved(engines, store, prefill, staged)
    await engines.idle("d1", "d2")
    await prefill_idle(prefill)
    for name in ("p1", "d1"):
        await engines.stop(name)
    prefill, decode = await engines.staged(3, "p3", loads="always"), await engines.staged_decode(3, "d3")
    await loaded(engines, prefill, decode, first)
    await engines.idle("d3")
    await prefill_idle(prefill)


async def four_stages_of_thirty_layers(engines: Stack) -> None:
    """They do not divide evenly. Those of prefill are processes of their own but for the first; what all of
    them saved one with the whole model loads."""
    await engines.lenders()
    store = await engines.kvstore()
    prefill, decode = await engines.staged(4, "p1", process=True), await engines.staged_decode(4, "d1")
    assert len(engines.children) == 3
    await alone_and_at_once(engines, prefill, decode)
    first = await saved(engines, store, prefill, decode)
    await engines.idle("d1")
    await prefill_idle(prefill)
    prefill = await engines.prefill("p2", loads="always")
    decode = await engines.decode("d2", fetch_min_bytes=1 << 30)
    await loaded(engines, prefill, decode, first)
    await engines.idle("d2")


async def three_ranks(engines: Stack) -> None:
    """Each has a KV head, of prefill, of decode, and of both; what they saved one with the whole model
    loads."""
    await engines.lenders()
    store = await engines.kvstore()
    ranks, whole = await engines.staged(1, "p1", tensor=3), await engines.prefill("p0")
    decode, ranked = await engines.decode("d0"), await engines.staged_decode(1, "d1", tensor=3)
    await alone_and_at_once(engines, ranks, decode)
    await alone_and_at_once(engines, whole, ranked)
    first = await saved(engines, store, ranks, ranked)
    await engines.idle("d0", "d1")
    await prefill_idle(ranks)
    for name in ("p0", "d0"):
        await engines.stop(name)
    prefill = await engines.prefill("p2", loads="always")
    decode = await engines.decode("d2", fetch_min_bytes=1 << 30)
    await loaded(engines, prefill, decode, first)
    await engines.idle("d2")


async def two_stages_of_three_ranks(engines: Stack) -> None:
    await engines.lenders()
    prefill, decode = await engines.staged(2, tensor=3), await engines.staged_decode(2, tensor=3)
    await alone_and_at_once(engines, prefill, decode)
    await engines.idle("decode")
    await prefill_idle(prefill)


async def slices_of_each_others_batches(engines: Stack) -> None:
    await engines.lenders(60, 60)
    prefill, names = await engines.prefill(), ("decode-0", "decode-1")
    decodes = [await engines.decode(name, **group(engines, 2)) for name in names]
    for name in names:
        await met(engines, name, 1)
    turns = [asked(engines, prefill, decodes[number % 2], number) for number in range(len(LENGTHS))]
    await asyncio.gather(*(one.run() for one in turns))
    assert_exact(engines, *turns)
    assert all(slices(engines, name, "for_peers") for name in names)
    await engines.idle(*names, *pools(2))


async def several_answers_to_one_prompt(engines: Stack) -> None:
    """As many as `n` asks for: they compute their prompt once."""
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    turns = [asked(engines, None, decode, request_id=f"r{number}") for number in range(3)]
    await asyncio.gather(*await started_in_order(turns))
    assert_exact(engines, *turns)
    shared = LENGTHS[0] // BLOCK * BLOCK
    assert sorted(one.first.device_tokens for one in turns if one.first is not None) == [0, shared, shared]
    await engines.idle("decode")


@pytest.mark.parametrize(
    "path",
    [
        handed_over,
        computed_where_it_generates,
        one_process_with_both_roles,
        history_in_memory_and_from_the_store,
        overflow_to_pools_and_history_there,
        all_kv_on_pools,
        all_kv_on_pools_in_two_batches,
        a_kv_head_on_each_of_three_pools,
        spread_over_many_holders,
        a_prompt_beyond_prefills_memory,
        prefill_and_decode_in_stages,
        four_stages_of_thirty_layers,
        three_ranks,
        two_stages_of_three_ranks,
        slices_of_each_others_batches,
        several_answers_to_one_prompt,
    ],
    ids=lambda path: path.__name__,
)
async def test_tokens_are_those_of_transformers(
    engines: Stack, path: Callable[[Stack], Awaitable[None]]
) -> None:
    await path(engines)


@pytest.mark.usefixtures("all_drafts")
async def test_drafts_right_and_wrong_change_no_token(engines: Stack) -> None:
    prefill, plain = await engines.prefill(), await engines.decode("plain", max_draft_tokens=0)
    decode = await engines.decode(max_draft_tokens=MOST)
    without = await asked(engines, prefill, plain).run()
    text = [*without.prompt, *without.tokens]
    for wrong in (0.0, 0.3, 1.0):
        one = asked(engines, prefill, decode)
        with foreseen([text], wrong=wrong), counted() as rows:
            await one.run()
        assert_exact(engines, one)
        assert wrong or len([count for count in rows if count <= MOST + 1]) <= ANSWER / 2
    accepted, rejected = outcome(engines)
    assert accepted > ANSWER / 2
    assert rejected > ANSWER / 2
    await engines.idle("plain", "decode")


@pytest.mark.usefixtures("none_comes_home_by_itself")
async def test_kv_that_comes_home_while_it_decodes(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its creditor calls it back."""
    await engines.lenders(24)
    slow = SlowIterations(monkeypatch, 0.0)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 24 * BLOCK})
    holding = await ballast(engines, decode, 14 * BLOCK - 8)
    slow.take(scaled(0.1))
    one = asked(engines, prefill, decode, new=3 * ANSWER)
    task = await running(one)
    before = await lent(engines, "pool-0")
    assert before >= 3
    holding.cancel()
    await ready(lambda: room(engines, "decode", before))
    call = holder_pb2.CallBackRequest(creditor="pool-0", blocks=before)
    assert (await debtor(engines).CallBack(call, timeout=scaled(20))).home_blocks >= before - 1
    assert not task.done()
    slow.over()
    await task
    assert_exact(engines, one)
    await engines.idle("decode", "pool-0")


@pytest.mark.usefixtures("none_comes_home_by_itself")
async def test_kv_that_moves_to_another_holder_while_it_decodes(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engines.lenders(20, 20)
    slow = SlowIterations(monkeypatch, scaled(0.1))
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine=SMALL)
    one = asked(engines, prefill, decode, new=6 * ANSWER)
    task = await running(one)
    before = {name: await lent(engines, name) for name in pools(2)}
    source = max(before, key=lambda name: before[name])
    call = holder_pb2.CallBackRequest(creditor=source, blocks=5)
    assert (await debtor(engines).CallBack(call, timeout=scaled(20))).moved_blocks > 0
    assert not task.done()
    slow.over()
    await task
    assert_exact(engines, one)
    await engines.idle("decode", *pools(2))


@pytest.mark.usefixtures("none_comes_home_by_itself")
async def test_debts_that_are_swapped_while_both_decode(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowIterations(monkeypatch, scaled(0.1))
    turns: list[Turn] = []

    def make(number: int, prefill: Any, decode: Any) -> Turn:
        turns.append(asked(engines, prefill, decode, (0, 2)[number], new=10 * ANSWER))
        return turns[-1]

    tasks = await two_that_owe_each_other(engines, make)
    await swap_in_rounds(engines)
    assert not any(task.done() for task in tasks)
    slow.over()
    await asyncio.gather(*tasks)
    assert_exact(engines, *turns)
    await engines.idle(*PAIR)


async def test_a_truncated_session_is_a_replay_of_it(engines: Stack) -> None:
    """Two truncations, after the second of which fresh instances go on; the reference moves KV as the paper
    does."""
    store = await engines.kvstore()
    pairs = [
        (await engines.prefill(f"p{number}", loads="always"), await engines.decode(f"d{number}"))
        for number in range(2)
    ]
    session = Session(engines, TruncatedReference(engines.folder), draw=piece)
    await stays_in_use(session, 2, store, pairs)
    await engines.idle("d0", "d1")
