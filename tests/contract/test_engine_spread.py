"""Prompts larger than prefill's own memory: what is known of them already is not computed again, and the
tokens are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvcommons.backend.interface import Partial
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.prompts import PromptSpan
from kvcommons.errors import Unavailable
from kvcommons.holder.attend_call import PendingPartial
from kvcommons.pb import prefill_pb2_grpc
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from kvcommons.prefill.spread import SpreadRows
from tests.contract.engine_stack import BLOCK, Stack
from tests.contract.engine_turns import turn
from tests.contract.test_engine_reuse import stored
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

PROMPT, ANSWER = 250, 30
FULL = (PROMPT + ANSWER - 1) // BLOCK
SMALL = {"capacity_tokens": 6 * BLOCK}
LARGE = {"capacity_tokens": 40 * BLOCK}


async def first_turn(
    engines: Stack, store: BlocksStub, prefill: Any, decode: Any
) -> tuple[list[int], list[int]]:
    """The tokens known after it, and those that follow."""
    tokens, expected = engines.reference.prompt(PROMPT, 2 * ANSWER)
    first = turn(prefill, decode, engines.model, tokens, ANSWER, history=engines.history(0))
    assert (await first.run()).tokens == expected[:ANSWER]
    known = tokens + expected[:ANSWER]
    assert await stored(engines, store, known[: FULL * BLOCK]) == FULL
    return known, expected[ANSWER:]


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_a_second_turn_where_the_first_one_was(engines: Stack) -> None:
    """Decode has all of it: prefill computes what is new, and attends over the rest there."""
    store, prefill = await engines.kvstore(), await engines.prefill(engine=SMALL)
    decode = await engines.decode(engine=LARGE)
    known, following = await first_turn(engines, store, prefill, decode)
    second = turn(prefill, decode, engines.model, known, ANSWER, history=engines.history(FULL))
    assert (await second.run()).tokens == following
    assert second.first is not None
    assert second.first.cached_tokens == FULL * BLOCK
    assert second.reserved is not None
    assert [placed.blocks for placed in second.reserved.placements] == [-(-(len(known) + 1) // BLOCK)]
    await engines.idle("decode")


@pytest.mark.parametrize(
    "kind", [{"engine": LARGE}, {"engine": SMALL, "placement": "overflow"}], ids=["local", "overflow"]
)
@pytest.mark.parametrize("engines", ["llama", "qwen3"], indirect=True)
async def test_a_second_turn_where_decode_fetches_its_history(engines: Stack, kind: dict[str, Any]) -> None:
    """To its own memory, or to that of the holders that it borrows from."""
    await engines.lenders(10, 10)
    store, prefill = await engines.kvstore(), await engines.prefill(engine=SMALL)
    decode = await engines.decode("d1", **kind)
    known, following = await first_turn(engines, store, prefill, decode)
    await engines.idle("d1", "pool-0", "pool-1")
    fresh = await engines.decode("d2", **kind)
    second = turn(prefill, fresh, engines.model, known, ANSWER, history=engines.history(FULL))
    assert (await second.run()).tokens == following
    assert second.first is not None
    assert second.first.cached_tokens == FULL * BLOCK
    await engines.idle("d2", "pool-0", "pool-1")


async def test_what_decode_could_not_fetch_is_computed(engines: Stack) -> None:
    """It is told of more blocks than the store has."""
    store, prefill = await engines.kvstore(), await engines.prefill(engine=SMALL)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    decode = await engines.decode("d1", engine=LARGE)
    part = turn(prefill, decode, engines.model, tokens[: 8 * BLOCK], 1, history=engines.history(0))
    await part.run()
    assert await stored(engines, store, tokens[: 8 * BLOCK]) == 8
    fresh = await engines.decode("d2", engine=LARGE)
    whole = turn(prefill, fresh, engines.model, tokens, ANSWER, history=engines.history(12))
    assert (await whole.run()).tokens == expected
    assert whole.first is not None
    assert whole.first.cached_tokens == 8 * BLOCK
    assert await stored(engines, store, tokens[: PROMPT // BLOCK * BLOCK]) == PROMPT // BLOCK
    await engines.idle("d2")


async def test_a_holder_that_fails_leaves_no_question_to_another_open(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose connection would be closed by nobody."""
    await engines.lenders(10, 10)
    prefill = await engines.prefill(engine=SMALL)
    decode = await engines.decode(engine=SMALL, placement="overflow")
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    finish, finished = SpreadRows._finish, list[PendingPartial]()

    def finishing(rows: SpreadRows, call: PendingPartial) -> Partial:
        if not finished and rows._before > 12 * BLOCK:
            finished.append(call)
            call.finish()
            raise Unavailable("as if a holder were gone")
        return finish(rows, call)

    cancelled: list[PendingPartial] = []
    monkeypatch.setattr(SpreadRows, "_finish", finishing)
    monkeypatch.setattr(PendingPartial, "cancel", cancelling(cancelled))
    with pytest.raises(Unavailable, match="did not attend over the prompt's blocks: as if"):
        await turn(prefill, decode, engines.model, tokens, ANSWER).run()
    assert cancelled
    assert not set(cancelled) & set(finished)
    again = turn(prefill, decode, engines.model, tokens, ANSWER)
    assert (await again.run()).tokens == expected
    await engines.idle("decode", "pool-0", "pool-1")


def cancelling(cancelled: list[PendingPartial]) -> Callable[[PendingPartial], None]:
    cancel = PendingPartial.cancel

    def cancelling_one(call: PendingPartial) -> None:
        cancelled.append(call)
        cancel(call)

    return cancelling_one


async def test_a_spread_prompt_is_alone_in_its_iterations(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one process has both roles, sequences generate between its layers: they do not wait for the
    holders that it waits for."""
    seen: list[list[str]] = []
    run = Iteration.run

    def recorded(self: Iteration, *between_layers: Any) -> Any:
        spread = [isinstance(group, PromptSpan) and not group.prompt.memory.keeps for group in self.groups]
        seen.append(["spread" if one else "other" for one in spread])
        return run(self, *between_layers)

    monkeypatch.setattr(Iteration, "run", recorded)
    both = await engines.decode("both", colocated=True, engine={"capacity_tokens": 12 * BLOCK})
    large = await engines.decode("large", engine=LARGE)
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    (mine, answer), (theirs, other) = (
        engines.reference.prompt(20, 100),
        engines.reference.prompt(PROMPT, 20, 50),
    )
    generating = turn(None, both, engines.model, mine, 100)
    task = asyncio.create_task(generating.run())
    await eventually(lambda: len(generating.tokens) > 2)
    spread = turn(prefill, large, engines.model, theirs, 20)
    assert (await spread.run()).tokens == other
    assert (await task).tokens == answer
    kinds = [tuple(one) for one in seen]
    chunks = [at for at, one in enumerate(kinds) if "spread" in one]
    assert len(chunks) > 1
    assert {kinds[at] for at in chunks} == {("spread",)}
    assert ("other",) in kinds[chunks[0] : chunks[-1]], "the other sequence goes on meanwhile"
    await engines.idle("both", "large")


@pytest.mark.parametrize("settings", [LARGE, SMALL], ids=["whole", "spread"])
async def test_chunks_end_inside_blocks(engines: Stack, settings: dict[str, Any]) -> None:
    """As they do wherever an objective or another prompt's chunk leaves them no more tokens: `chunk_tokens`
    may be any number."""
    prefill = await engines.prefill(engine=settings, chunk_tokens=BLOCK + 7)
    decode = await engines.decode(engine=LARGE)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    assert (await turn(prefill, decode, engines.model, tokens, ANSWER).run()).tokens == expected
    await engines.idle("decode")
