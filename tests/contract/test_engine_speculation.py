"""Drafts change how many tokens an iteration brings, and no token: real instances beside transformers, and
beside instances that verify nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcommons.engine.drafts import speculation
from kvcommons.errors import CapacityExhausted
from kvcommons.pb import common_pb2
from kvcommons.token_ids import packed
from services.router.sessions.truncation import Context
from tests.contract.engine_drafts import MOST, counted, foreseen, outcome
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack
from tests.contract.engine_turns import Turn, prompt, turn
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_truncation import Session, stays_in_use
from tests.contract.truncation_reference import Answer, TruncatedReference
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "choice": 1}
SAMPLINGS = {
    "greedy": common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True, top_logprobs=2),
    "seeded": common_pb2.Sampling(**SEEDED, logprobs=True),
    "penalties": common_pb2.Sampling(
        **SEEDED, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3, min_p=0.01
    ),
    "bias": common_pb2.Sampling(**SEEDED, top_k=20, logit_bias={5: 3.0, 9: -100.0}),
}


def sampling_of(name: str, seed: int) -> common_pb2.Sampling:
    """One of `SAMPLINGS`, with another seed."""
    made = common_pb2.Sampling()
    made.CopyFrom(SAMPLINGS[name])
    made.seed = seed
    return made


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("engines", ["llama", "qwen3", "mistral-sliding"], indirect=True)
async def test_tokens_are_the_reference(engines: Stack) -> None:
    """Of a text that repeats itself and of one that does not; drafts are right in the first."""
    prefill, decode = await engines.prefill(), await engines.decode(max_draft_tokens=MOST)
    tokens, expected = engines.reference.prompt(75, 64)
    made = await turn(prefill, decode, engines.model, tokens, 64).run()
    assert made.tokens == expected
    said = [*tokens, *expected]
    with foreseen([said], wrong=0.0), counted() as rows:
        again = await turn(prefill, decode, engines.model, tokens, 64).run()
    assert again.tokens == expected
    assert len([one for one in rows if one <= MOST + 1]) <= 64 / 3, "several tokens an iteration"
    for wrong in (0.2, 1.0):
        with foreseen([said], wrong=wrong):
            again = await turn(prefill, decode, engines.model, tokens, 64).run()
        assert again.tokens == expected
    accepted, rejected = outcome(engines)
    assert accepted > 50
    assert rejected > 50
    follow_up = await turn(prefill, decode, engines.model, said, 5).run()
    assert follow_up.reserved is not None
    assert follow_up.reserved.push_from_block == (75 + 64 - 1) // BLOCK, "what was accepted is published"
    engines.reference.assert_greedy(said, follow_up.tokens)
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_tokens_are_those_without_drafts(engines: Stack, name: str) -> None:
    """Alone and in a batch with others, log-probabilities and what is resumed in the middle included."""
    prefill = await engines.prefill()
    plain = await engines.decode("plain", max_draft_tokens=0)
    drafting = await engines.decode(max_draft_tokens=MOST)

    def turns(decode: Any) -> list[Turn]:
        made = []
        for seed in range(1, 4):
            tokens = prompt(30, seed) * 2  # which repeats
            made.append(turn(prefill, decode, engines.model, tokens, 60, sampling=sampling_of(name, seed)))
        return made

    expected = [await one.run() for one in turns(plain)]
    texts = [[*one.prompt, *one.tokens] for one in expected]
    for wrong in (None, 0.0, 0.3):
        made = turns(drafting)
        if wrong is None:  # drafts as they are found
            await asyncio.gather(*(one.run() for one in made))
        else:
            with foreseen(texts, wrong=wrong):
                await asyncio.gather(*(one.run() for one in made))
        for one, other in zip(made, expected, strict=True):
            assert one.tokens == other.tokens
            logprobs, others = ([token.logprob for token in some.sampled] for some in (one, other))
            assert logprobs == pytest.approx(others, abs=1e-4)
            assert [len(token.top) for token in one.sampled] == [len(token.top) for token in other.sampled]
    assert outcome(engines)[0] > 100
    for cut in (1, 23, 59):
        resumed = turns(drafting)[0]
        resumed.request.job.tokens += packed(expected[0].tokens[:cut])
        with foreseen(texts, wrong=0.3):
            assert (await resumed.run()).tokens == expected[0].tokens[cut:]
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
async def test_what_a_tenant_was_answered_is_drafted_for_that_tenant_alone(engines: Stack) -> None:
    """Of answers that repeat nothing of their own; and the tokens are the same."""
    prefill, decode = await engines.prefill(), await engines.decode(max_draft_tokens=MOST)
    sampling = common_pb2.Sampling(**SEEDED)

    async def accepted(tenant: str) -> tuple[list[int], float]:
        before = outcome(engines)[0]
        asked = turn(prefill, decode, engines.model, prompt(30, 1), 60, sampling=sampling, tenant=tenant)
        tokens = (await asked.run()).tokens
        return tokens, outcome(engines)[0] - before

    first, alone = await accepted("t")
    again, known = await accepted("t")
    others, unknown = await accepted("u")
    assert first == again == others
    assert known > 40
    assert alone == unknown < 10
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
async def test_an_answer_ends_within_its_drafts(engines: Stack) -> None:
    """At a stop token, at its last position, and not before it may."""
    prefill, decode = await engines.prefill(), await engines.decode(max_draft_tokens=MOST)
    tokens, expected = engines.reference.prompt(20, 60)
    said = [*tokens, *expected]
    with foreseen([said], wrong=0.0):
        for index in (1, 9, 30):
            stop = expected[index]
            sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, stop_token_ids=[stop])
            stopped = await turn(prefill, decode, engines.model, tokens, 60, sampling=sampling).run()
            assert stopped.tokens == expected[: expected.index(stop) + 1]
            assert stopped.finished is not None
            assert stopped.finished.reason == "stop"
        for new in (1, 2, 3, 8, 17):
            cut = await turn(prefill, decode, engines.model, tokens, new).run()
            assert cut.tokens == expected[:new]
            assert cut.finished is not None
            assert cut.finished.reason == "length"
    plain = await engines.decode("plain", max_draft_tokens=0)
    sampling = common_pb2.Sampling(
        temperature=0.0, top_p=1.0, min_tokens=20, stop_token_ids=[expected[4], expected[25]]
    )
    without = await turn(prefill, plain, engines.model, tokens, 60, sampling=sampling).run()
    with foreseen([said, [*tokens, *without.tokens]], wrong=0.0):
        made = await turn(prefill, decode, engines.model, tokens, 60, sampling=sampling).run()
    assert made.tokens == without.tokens
    assert len(made.tokens) >= 20
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
async def test_choices_of_one_prompt_draft_each_for_itself(engines: Stack) -> None:
    prefill, plain = await engines.prefill(), await engines.decode("plain", max_draft_tokens=0)
    decode = await engines.decode(max_draft_tokens=MOST)
    tokens = prompt(70)

    def choices(decode: Any) -> list[Turn]:
        return [
            turn(
                prefill, decode, engines.model, tokens, 100,
                sampling=common_pb2.Sampling(temperature=1.0, top_p=1.0, seed=5, choice=choice),
            )
            for choice in range(4)
        ]  # fmt: skip

    expected = [(await one.run()).tokens for one in choices(plain)]
    with foreseen([[*tokens, *made] for made in expected], wrong=0.3):
        made = choices(decode)
        await asyncio.gather(*(one.run() for one in made))
    assert [one.tokens for one in made] == expected
    assert outcome(engines)[0] > 50
    await engines.idle("decode")


async def test_a_sequence_uses_the_room_that_grew_for_drafts_none_of_which_is_verified(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "choose", lambda *_, **__: {})
    prefill, decode = await engines.prefill(), await engines.decode(max_draft_tokens=MOST)
    tokens, expected = engines.reference.prompt(50, 80)
    with foreseen([[*tokens, *expected]], wrong=0.0):
        made = await turn(prefill, decode, engines.model, tokens, 80).run()
    assert made.tokens == expected
    assert outcome(engines) == (0, 0)
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
async def test_nothing_behind_what_was_accepted_is_saved(engines: Stack) -> None:
    """Blocks that the store has are of the tokens that came, wherever wrong drafts had filled them before."""
    store = await engines.kvstore()
    prefill, decode = await engines.prefill("p1"), await engines.decode(max_draft_tokens=MOST)
    tokens, expected = engines.reference.prompt(50, 80)
    said = [*tokens, *expected]
    with foreseen([said], wrong=0.4):
        made = await turn(prefill, decode, engines.model, tokens, 80, history=engines.history(0)).run()
    assert made.tokens == expected
    assert made.finished is not None
    full = (50 + 80 - 1) // BLOCK
    assert made.finished.saved_blocks == full - 50 // BLOCK
    assert await stored(engines, store, said[: full * BLOCK]) == full
    prefill, cold = await engines.prefill("p2", loads="always"), await engines.decode("cold")
    again = await turn(prefill, cold, engines.model, said, 5, history=engines.history(full)).run()
    assert again.first is not None
    assert again.first.cached_tokens == full * BLOCK
    engines.reference.assert_greedy(said, again.tokens)


@pytest.mark.usefixtures("all_drafts")
async def test_drafts_take_no_block_that_another_sequence_needs(
    engines: Stack, unhurried: SlowIterations
) -> None:
    """The younger of two gives way as it would without them, and goes on elsewhere behind its tokens."""
    prefill = await engines.prefill()
    decode = await engines.decode(engine={"capacity_tokens": 12 * BLOCK}, max_draft_tokens=MOST)
    (old, expected), young = engines.reference.prompt(60, 60), prompt(60, seed=9)
    unhurried.over()
    plain = await engines.decode("plain", max_draft_tokens=0)
    follows = (await turn(prefill, plain, engines.model, young, 200).run()).tokens
    unhurried.take(0.05)
    with foreseen([[*old, *expected], [*young, *follows]], wrong=0.3, most=2):
        first = turn(prefill, decode, engines.model, old, 60)
        second = turn(prefill, decode, engines.model, young, 200)
        running = asyncio.create_task(first.run())
        await eventually(lambda: len(first.tokens) > 1)
        with pytest.raises(CapacityExhausted):
            await second.run()
        await running
    assert first.tokens == expected
    assert second.tokens == follows[: len(second.tokens)]
    assert second.tokens
    resumed = turn(
        prefill, plain, engines.model, [*young, *second.tokens], 200 - len(second.tokens), prompt_tokens=60
    )
    assert [*second.tokens, *(await resumed.run()).tokens] == follows
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
async def test_a_sequence_that_borrows_drafts_nothing(engines: Stack) -> None:
    """It drafts until its first block that lies elsewhere; meanwhile, and then, its tokens are the same."""
    await engines.lenders(32)
    tokens, expected = engines.reference.prompt(40, 120)
    prefill = await engines.prefill()
    decode = await engines.decode(
        engine={"capacity_tokens": 6 * BLOCK}, placement="overflow", max_draft_tokens=MOST
    )
    with foreseen([[*tokens, *expected]], wrong=0.2), counted() as rows:
        made = await turn(prefill, decode, engines.model, tokens, 120).run()
    assert made.tokens == expected
    assert made.borrowed, "it borrowed"
    assert rows.count(1) > 40, "an iteration a token, once it does"
    assert sum(outcome(engines)) > 10
    await engines.idle("decode")


@pytest.mark.usefixtures("all_drafts")
async def test_behind_a_truncation_drafts_are_verified_too(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context in two parts, whose queries are rotated for each, until it is full."""
    session, texts = Session(engines, TruncatedReference(engines.folder)), list[list[int]]()
    ask = session.ask

    def foretold(count: int, **changes: Any) -> tuple[Context, Answer]:
        context, expected = ask(count, **changes)
        texts.append([*context.now.tokens, *expected.tokens])
        return context, expected

    monkeypatch.setattr(session, "ask", foretold)
    store, prefill = await engines.kvstore(), await engines.prefill(loads="always")
    decode = await engines.decode(max_draft_tokens=MOST)
    with foreseen(texts, wrong=0.2):
        await stays_in_use(session, 2, store, [(prefill, decode)] * 2)
    assert outcome(engines)[0] > 40
    await engines.idle("decode")


async def test_drafts_are_verified_where_they_pay_only(engines: Stack) -> None:
    """Nothing is forced here: a text that repeats itself has drafts, and noise has hardly any."""
    prefill, decode = await engines.prefill(), await engines.decode(max_draft_tokens=MOST)
    noise = common_pb2.Sampling(temperature=3.0, top_p=1.0, seed=3)
    made = await turn(prefill, decode, engines.model, prompt(30), 200, sampling=noise).run()
    assert len(set(made.tokens)) > 80
    assert sum(outcome(engines)) < 20
    before = sum(outcome(engines))
    said = prompt(40) * 5
    steady = common_pb2.Sampling(
        temperature=0.0, top_p=1.0, logit_bias={said[0]: 100.0}
    )  # which says one token for ever
    again = await turn(prefill, decode, engines.model, said, 150, sampling=steady).run()
    assert set(again.tokens) == {said[0]}
    accepted, _ = outcome(engines)
    assert accepted > 50 + before
