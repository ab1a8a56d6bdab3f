"""Sequences behind truncations on real prefill, decode, kvstore and pool instances: the tokens are those of a
replay of all tokens and truncations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcommons.errors import DataLoss, InvalidInput
from kvcommons.pb import common_pb2
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from services.router.sessions.truncation import Context, Excerpt, Truncation, truncation_for
from tests.contract.engine_stack import BLOCK, Stack, prefill_idle
from tests.contract.engine_turns import CALL_S, SALT, Turn, compute, prefill_request, prompt, turn
from tests.contract.test_engine_reuse import stored_ids
from tests.contract.truncation_reference import Answer, TruncatedReference

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

NEW = 24
Shapes = tuple[tuple[int, int], tuple[int, int]]  # stages, and ranks of each: of prefill, and of decode
TURNS = (100, 0), (20, 4), (30, 0), (5, 3)  # new tokens of each, and blocks that are dropped before it
GREEDY = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)


@dataclass
class Session:
    """What a session is asked, of tokens that `draw` gives; `reference` hears the same, and says what is
    right."""

    engines: Stack
    reference: TruncatedReference
    seed: int = 1
    draw: Callable[[int, int], list[int]] = prompt
    call_s: float = CALL_S
    tokens: list[int] = field(default_factory=list)
    truncations: list[Truncation] = field(default_factory=list)

    def ask(self, count: int, *, drop_blocks: int = 0, head_blocks: int = 0) -> tuple[Context, Answer]:
        """A turn of `count` tokens: its context, and the answer that it has to get."""
        before = list(self.context().now.tokens)
        dropped = sum(one.dropped_tokens for one in self.truncations)
        pending = before[self.reference.length :]
        if drop_blocks:
            truncation = truncation_for(
                kept_tokens=len(before), dropped_tokens=dropped, head_tokens=head_blocks * BLOCK,
                new_tokens=count, answer_tokens=0, window=len(before) + count - drop_blocks * BLOCK,
                ratio=0.01, block_tokens=BLOCK,
            )  # fmt: skip
            assert truncation is not None
            assert truncation.dropped_tokens == drop_blocks * BLOCK
            self.truncations.append(truncation)
            at = truncation.at_token - dropped
            self.reference.truncate(at, truncation.head_tokens, truncation.dropped_tokens)
            pending = before[at:]
        for seed in range(self.seed, self.seed + 50):
            words = self.draw(count, seed)
            expected = self.reference.follow([*pending, *words], NEW)
            if expected is not None:
                self.seed = seed + 1
                self.tokens += words
                return self.context(), expected
        raise AssertionError("no prompt of 50 is evidence")

    def context(self) -> Context:
        model = ModelInfo(fingerprint=self.engines.model, block_tokens=BLOCK)
        return Context(salt=SALT, model=model, tokens=self.tokens, truncations=self.truncations)

    async def answer(
        self, prefill: Any, decode: Any, context: Context, expected: Answer, **changes: Any
    ) -> Turn:
        made = turn(
            prefill, decode, self.engines.model, list(context.now.tokens), NEW,
            truncated=context.now.message(), sampling=GREEDY, start_wait_ms=int(self.call_s * 1000),
            **changes,
        )  # fmt: skip
        made.call_s = self.call_s
        await made.run()
        assert made.tokens == expected.tokens
        assert [token.logprob for token in made.sampled] == pytest.approx(expected.logprobs, abs=1e-4)
        self.tokens += expected.tokens
        return made

    async def kept(self, store: BlocksStub, context: Context) -> int:
        """Blocks of the context and its answer, once they are stored."""
        chain = context.chain()
        chain.extend(self.tokens[-NEW:-1])
        assert await stored_ids(self.engines, store, chain.ids) == len(chain.ids)
        return len(chain.ids)


@pytest.fixture
def session(engines: Stack) -> Session:
    return Session(engines, TruncatedReference(engines.folder))


async def overflow_twice(
    session: Session, head_blocks: int, run: Any, turns: Sequence[tuple[int, int]] = TURNS
) -> None:
    """Four turns, with a truncation before the second and before the fourth."""
    for number, (count, drop) in enumerate(turns):
        context, expected = session.ask(count, drop_blocks=drop, head_blocks=head_blocks)
        await run(number, context, expected)


@pytest.mark.parametrize("engines", ["llama", "qwen3", "mistral-sliding", "llama-llama3"], indirect=True)
@pytest.mark.parametrize("head_blocks", [0, 2])
async def test_what_is_left_stays_in_use(engines: Stack, session: Session, head_blocks: int) -> None:
    """Nothing of it is computed again, whether it lies in the instances' memory or only in the store."""
    store = await engines.kvstore()
    await stays_in_use(
        session,
        head_blocks,
        store,
        [(await engines.prefill(f"p{i}", loads="always"), await engines.decode(f"d{i}")) for i in range(2)],
    )
    await engines.idle("d0", "d1")


@pytest.mark.parametrize(
    "shapes", [[((2, 1), (1, 1)), ((2, 1), (1, 1))], [((1, 2), (1, 2)), ((2, 2), (2, 2))]], ids=str
)
async def test_what_is_left_stays_in_use_in_stages_and_ranks(session: Session, shapes: list[Shapes]) -> None:
    """Each has its layers of the shifted head, or its heads of it, and loads them."""
    await stays_in_use_in_shapes(session, shapes)


async def stays_in_use_in_shapes(
    session: Session,
    shapes: Sequence[Shapes],
    turns: Sequence[tuple[int, int]] = TURNS,
    **settings: Any,
) -> None:
    """In the first shapes the first two turns, in the others those behind them. `settings`: of all."""
    engines = session.engines
    await engines.lenders()
    store = await engines.kvstore()
    pairs = [
        (
            await engines.staged(prefill[0], f"p{number}", tensor=prefill[1], loads="always", **settings),
            await engines.staged_decode(decode[0], f"d{number}", tensor=decode[1], **settings),
        )
        for number, (prefill, decode) in enumerate(shapes)
    ]
    await stays_in_use(session, 2, store, pairs, turns)
    await engines.idle(*[f"d{number}" for number in range(len(shapes))])


async def stays_in_use(
    session: Session,
    head_blocks: int,
    store: BlocksStub,
    pairs: Sequence[tuple[Any, Any]],
    turns: Sequence[tuple[int, int]] = TURNS,
) -> None:
    """`pairs`: prefill and decode, of the first two turns and of the others."""
    engines, found = session.engines, 0

    async def run(number: int, context: Context, expected: Answer) -> None:
        nonlocal found
        now = context.now
        if now.since_block and number in (1, 3):
            found = now.since_block
        made = await session.answer(*pairs[number // 2], context, expected, history=engines.history(found))
        assert made.first is not None
        # A load that falls behind on a busy machine is given up, and what can be computed is.
        assert now.since_token <= made.first.cached_tokens <= found * BLOCK
        found = await session.kept(store, context)

    await overflow_twice(session, head_blocks, run, turns)
    dropped_blocks = sum(drop for _, drop in turns)
    assert sum(one.dropped_tokens for one in session.truncations) == dropped_blocks * BLOCK


async def test_lost_kv_is_made_again_excerpt_by_excerpt(engines: Stack, session: Session) -> None:
    """A prefill that has nothing refuses an excerpt whose history it lacks, and replays the session from the
    first."""
    contexts: list[tuple[Context, Answer]] = []

    async def run(number: int, context: Context, expected: Answer) -> None:
        contexts.append((context, expected))
        session.tokens += expected.tokens

    await overflow_twice(session, 1, run)
    context, expected = contexts[-1]
    prefill, decode = await engines.prefill(), await engines.decode()
    with pytest.raises(DataLoss, match="replay"):
        await compute(prefill, asked(engines, context.now))
    assert len(context.excerpts) == 3
    for excerpt in context.excerpts[:-1]:
        await compute(prefill, asked(engines, excerpt))
    made = await session.answer(prefill, decode, context, expected)
    assert made.first is not None
    assert made.first.cached_tokens == context.now.since_token


def asked(engines: Stack, excerpt: Excerpt) -> Any:
    return prefill_request(engines.model, excerpt.tokens, truncated=excerpt.message())


@pytest.mark.parametrize(("placement", "capacity"), [("overflow", 5), ("overflow", 9), ("grow", 40)])
async def test_the_head_may_lie_elsewhere(
    engines: Stack, session: Session, placement: str, capacity: int
) -> None:
    """Decode borrows: the head on a pool, or part of it, and a batch with a sequence that has none; or
    holders join behind the head while what is new is computed."""
    await engines.lenders(20)
    store = await engines.kvstore()
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement=placement, holder_tokens=3 * BLOCK, engine={"capacity_tokens": capacity * BLOCK}
    )
    plain, following = engines.reference.prompt(40, NEW)

    async def run(number: int, context: Context, expected: Answer) -> None:
        history = engines.history(context.now.since_block)
        made = session.answer(prefill, decode, context, expected, history=history, request_id=f"r{number}")
        beside = turn(prefill, decode, engines.model, plain, NEW, request_id=f"b{number}")
        await asyncio.gather(made, beside.run())
        assert beside.tokens == following
        await session.kept(store, context)

    await overflow_twice(session, 2, run)
    await engines.idle("decode", "pool-0")


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
@pytest.mark.parametrize("head_blocks", [1, 2])
@pytest.mark.parametrize(
    ("stages", "holders"), [(1, "decode"), (1, "pools"), (1, "joining pools"), (2, "pools")]
)
async def test_prefill_may_have_room_for_a_part(
    engines: Stack, session: Session, head_blocks: int, stages: int, holders: str
) -> None:
    """It attends over the rest where that lies, over the head with shifted queries, wherever that ends."""
    await engines.lenders(20, 20)
    store = await engines.kvstore()
    prefill = await engines.staged(stages, engine={"capacity_tokens": 3 * BLOCK})
    placed: dict[str, dict[str, Any]] = {
        "decode": {},
        "pools": {"placement": "offload", "borrow_blocks": 3},
        "joining pools": {"placement": "grow", "holder_tokens": 3 * BLOCK},
    }
    decode = await engines.decode(**placed[holders])

    async def run(number: int, context: Context, expected: Answer) -> None:
        history = engines.history(context.now.since_block)
        await session.answer(prefill, decode, context, expected, history=history, request_id=f"r{number}")
        await session.kept(store, context)

    await overflow_twice(session, head_blocks, run)
    await engines.idle("decode", "pool-0", "pool-1")
    await prefill_idle(prefill)


async def test_nonsense_is_refused(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(100)
    for wrong in (
        {"head_tokens": 5},
        {"head_tokens": 2 * BLOCK, "since_token": BLOCK},
        {"since_token": 2 * BLOCK, "block_ids": [bytes(32)]},
        {"since_token": BLOCK, "block_ids": [b"short"]},
        {"block_ids": [bytes(32)] * 7},
    ):
        message = common_pb2.Truncated(dropped_tokens=BLOCK, **wrong)
        with pytest.raises(InvalidInput, match="truncated"):
            await compute(prefill, prefill_request(engines.model, tokens, truncated=message))
        with pytest.raises(InvalidInput, match="truncated"):
            await turn(prefill, decode, engines.model, tokens, 1, truncated=message).run()
