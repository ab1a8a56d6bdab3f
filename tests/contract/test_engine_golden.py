"""The engines give the tokens that they gave when these were frozen: greedy ones, and ones sampled with a
seed, which transformers cannot name.

`tests/golden/tokens/<model kind>.json` holds them by case. A run of this file adds a case that is missing
there, and fails, so that nobody freezes tokens without looking at them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvcommons.pb import common_pb2
from services.router.sessions.truncation import Context
from tests.contract.engine_stack import BLOCK, Stack
from tests.contract.engine_turns import prompt, turn
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_truncation import NEW, Session, overflow_twice
from tests.contract.truncation_reference import Answer, TruncatedReference

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

FROZEN = Path(__file__).parents[1] / "golden" / "tokens"
MADE = 40
GREEDY = common_pb2.Sampling(temperature=0.0, top_p=1.0)
NUCLEUS = common_pb2.Sampling(temperature=0.9, top_p=0.9, seed=7)
PENALIZED = common_pb2.Sampling(
    temperature=1.2, top_p=0.95, seed=8, frequency_penalty=0.7, presence_penalty=0.4
)
WAYS = {"greedy": GREEDY, "nucleus": NUCLEUS, "penalized": PENALIZED}

Answers = dict[str, list[int]]


async def plain(engines: Stack) -> Answers:
    """One instance of each; the turns run in one batch."""
    prefill, decode = await engines.prefill(), await engines.decode()
    turns = {
        f"{way}-{length}": turn(
            prefill, decode, engines.model, engines.reference.prompt(length, MADE)[0], MADE, sampling=sampling
        )
        for way, sampling in WAYS.items()
        for length in (7, 75)
    }
    await asyncio.gather(*(one.run() for one in turns.values()))
    return {name: one.tokens for name, one in turns.items()}


async def reuse(engines: Stack) -> Answers:
    """The second turn runs on fresh instances, whose history comes from a kvstore."""
    store, made = await engines.kvstore(), {}
    first_prefill, first_decode = await engines.prefill("p1"), await engines.decode("d1")
    second_prefill, second_decode = await engines.prefill("p2"), await engines.decode("d2")
    for seed, (way, sampling) in enumerate(WAYS.items(), 20):
        tokens, _ = engines.reference.prompt(75, 2 * MADE, seed * 100)
        first = turn(
            first_prefill, first_decode, engines.model, tokens, MADE,
            sampling=sampling, history=engines.history(0),
        )  # fmt: skip
        await first.run()
        known = tokens + first.tokens
        full = (len(known) - 1) // BLOCK
        assert await stored(engines, store, known[: full * BLOCK]) == full
        second = turn(
            second_prefill, second_decode, engines.model, known, MADE,
            sampling=sampling, prompt_tokens=len(known), history=engines.history(full),
        )  # fmt: skip
        await second.run()
        assert second.first is not None
        assert second.first.cached_tokens
        made |= {f"{way}-first": first.tokens, f"{way}-second": second.tokens}
    return made


async def borrowed(engines: Stack) -> Answers:
    """Decode is too small for the sequence: two pools hold the rest and compute attention over it."""
    await engines.lenders(8, 8)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 6 * BLOCK})
    made = {}
    for way, sampling in WAYS.items():
        tokens, _ = engines.reference.prompt(260, MADE)
        one = await turn(prefill, decode, engines.model, tokens, MADE, sampling=sampling).run()
        assert one.reserved is not None
        assert len(one.reserved.placements) > 1
        made[way] = one.tokens
        await engines.idle("decode", "pool-0", "pool-1")
    return made


async def truncated(engines: Stack) -> Answers:
    """Four greedy turns with two truncations, then the same context sampled."""
    session, store = Session(engines, TruncatedReference(engines.folder)), await engines.kvstore()
    prefill, decode = await engines.prefill(), await engines.decode()
    made: Answers = {}

    async def run(number: int, context: Context, expected: Answer) -> None:
        history = engines.history(context.now.since_block)
        greedy = await session.answer(prefill, decode, context, expected, history=history)
        await session.kept(store, context)
        sampled = turn(
            prefill, decode, engines.model, list(context.now.tokens), NEW,
            truncated=context.now.message(), sampling=NUCLEUS, history=history,
        )  # fmt: skip
        made[f"greedy-{number}"] = greedy.tokens
        made[f"nucleus-{number}"] = (await sampled.run()).tokens

    await overflow_twice(session, 2, run)
    return made


async def choices(engines: Stack) -> Answers:
    """Four choices of one prompt in one batch, as `n = 4` asks for them."""
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(64)
    turns = []
    for choice in range(4):
        sampling = common_pb2.Sampling(temperature=1.0, top_p=1.0, seed=5, choice=choice)
        turns.append(turn(prefill, decode, engines.model, tokens, MADE, sampling=sampling))
    await asyncio.gather(*(one.run() for one in turns))
    return {f"choice-{choice}": one.tokens for choice, one in enumerate(turns)}


CASES: dict[str, Callable[[Stack], Awaitable[Answers]]] = {
    case.__name__: case for case in (plain, reuse, borrowed, truncated, choices)
}


@pytest.mark.parametrize("engines", ["llama", "mistral-sliding"], indirect=True)
@pytest.mark.parametrize("case", CASES)
async def test_the_tokens_are_the_frozen_ones(
    engines: Stack, case: str, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["engines"]
    made = await CASES[case](engines)
    assert all(len(tokens) >= NEW for tokens in made.values())
    file = FROZEN / f"{kind}.json"
    frozen = json.loads(file.read_text()) if file.exists() else {}
    if case not in frozen:
        file.write_text(_text(frozen | {case: made}))
        pytest.fail(f"{file.name} had no case {case}: it was added; look at it, commit it and run this again")
    assert made == frozen[case]


def _text(frozen: dict[str, Answers]) -> str:
    """JSON with one line for each answer."""
    cases = []
    for case, answers in sorted(frozen.items()):
        lines = (f"    {json.dumps(name)}: {_line(tokens)}" for name, tokens in answers.items())
        cases.append(f"  {json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


def _line(tokens: Sequence[int]) -> str:
    return json.dumps(list(tokens), separators=(",", ":"))
