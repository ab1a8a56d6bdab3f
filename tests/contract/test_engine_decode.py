"""Prefill and decode together: the tokens of transformers, over reuse, resumption and batches; failures end
clearly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from kvcommons.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    InvalidInput,
    ModelNotFound,
    StaleEpoch,
    Unavailable,
)
from kvcommons.pb import common_pb2, data_pb2
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from tests.contract.engine_stack import BLOCK, Stack, no_iterations
from tests.contract.engine_turns import compute, prefill_request, prompt, turn
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

NOISY = common_pb2.Sampling(
    temperature=1.0, top_p=0.95, seed=7, choice=1, frequency_penalty=0.7, presence_penalty=0.4
)


@pytest.mark.parametrize("engines", ["llama", "qwen3", "mistral-sliding"], indirect=True)
async def test_tokens_are_the_reference_cold_and_from_the_device_tier(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens, expected = engines.reference.prompt(75, 64)
    cold = await turn(prefill, decode, engines.model, tokens, 64).run()
    assert cold.tokens == expected
    assert cold.finished is not None
    assert cold.finished.reason == "length"
    assert cold.reserved is not None
    assert cold.reserved.push_from_block == 0
    warm = await turn(prefill, decode, engines.model, tokens, 64).run()
    assert warm.tokens == expected
    assert warm.first is not None
    assert warm.first.device_tokens == 64
    assert warm.reserved is not None
    assert warm.reserved.push_from_block == 4
    follow_up = await turn(prefill, decode, engines.model, tokens + expected, 5).run()
    assert follow_up.reserved is not None
    assert follow_up.reserved.push_from_block == (75 + 64 - 1) // BLOCK
    await engines.idle("decode")


async def test_a_batch_gives_each_sequence_what_it_gets_alone(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode(max_batch=3)
    cases = [engines.reference.prompt(length, 30, 10 * length) for length in (5, 33, 64, 90, 17)]
    turns = [turn(prefill, decode, engines.model, tokens, 30) for tokens, _ in cases]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in cases]
    await engines.idle("decode")


async def test_a_repetition_penalty_and_a_least_length_are_those_of_transformers(engines: Stack) -> None:
    """Also where the turn is resumed, and what was said becomes a part of what is computed anew."""
    prefill, decode = await engines.prefill(), await engines.decode()
    for seed in range(1, 40):
        tokens = prompt(40, seed)
        plain = engines.reference.follow(tokens, 12)
        if plain is None or plain[3] in plain[:3]:
            continue
        stop = plain[3]  # which would end the answer at its fourth token
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(penalty=1.4),
                MinNewTokensLengthLogitsProcessor(40, 9, stop, device="cpu"),
            ]
        )
        expected = engines.reference.follow(tokens, 20, processors)
        if expected is not None and expected != engines.reference.follow(tokens, 20):
            break
    sampling = common_pb2.Sampling(
        temperature=0.0, top_p=1.0, repetition_penalty=1.4, min_tokens=9, stop_token_ids=[stop]
    )
    ends = next((at + 1 for at, token in enumerate(expected) if token == stop), 20)
    assert ends > 9
    expected = expected[:ends]
    whole = await turn(prefill, decode, engines.model, tokens, 20, sampling=sampling).run()
    assert whole.tokens == expected
    for cut in (1, 7):
        resumed = turn(
            prefill, decode, engines.model, tokens + expected[:cut], 20 - cut,
            sampling=sampling, prompt_tokens=40, no_reuse=True,
        )  # fmt: skip
        assert (await resumed.run()).tokens == expected[cut:]


async def test_a_resumed_turn_continues_alike(engines: Stack) -> None:
    """Noise by position, penalties from the prompt's end: what follows does not depend on where it was
    cut."""
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(40)
    whole = await turn(prefill, decode, engines.model, tokens, 50, sampling=NOISY).run()
    assert len(set(whole.tokens)) > 20
    for cut in (1, 23, 49):
        resumed = turn(
            prefill, decode, engines.model, tokens + whole.tokens[:cut], 50 - cut,
            sampling=NOISY, prompt_tokens=40, no_reuse=True,
        )  # fmt: skip
        assert (await resumed.run()).tokens == whole.tokens[cut:]


async def test_choices_share_their_prompt(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(64)
    turns = []
    for choice in range(4):
        sampling = common_pb2.Sampling(temperature=1.0, top_p=1.0, seed=5, choice=choice)
        turns.append(turn(prefill, decode, engines.model, tokens, 150, sampling=sampling))
    running = [asyncio.create_task(one.run()) for one in turns]
    await eventually(lambda: all(len(one.tokens) > 2 for one in turns))
    with no_iterations():
        seen = await engines.inspect("decode")
        used = seen.total_blocks - seen.free_blocks
        # 4 blocks of the prompt once, and for each choice what it has generated so far, heard or on its way.
        await eventually(lambda: used <= 4 + sum(-(-len(one.tokens) // BLOCK) + 1 for one in turns))
    await asyncio.gather(*running)
    assert len({tuple(one.tokens) for one in turns}) == 4
    await engines.idle("decode")


async def test_without_reuse_nothing_is_found_or_left(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(60)
    await turn(prefill, decode, engines.model, tokens, 8).run()
    again = await turn(prefill, decode, engines.model, tokens, 8, no_reuse=True).run()
    assert again.reserved is not None
    assert again.reserved.push_from_block == 0
    other = prompt(60, seed=2)
    await turn(prefill, decode, engines.model, other, 8, no_reuse=True).run()
    after = await turn(prefill, decode, engines.model, other, 8).run()
    assert after.reserved is not None
    assert after.reserved.push_from_block == 0


async def test_a_stop_token_is_the_last_one_streamed(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens, expected = engines.reference.prompt(20, 30)
    for index in (0, 9):
        stop = expected[index]
        sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, stop_token_ids=[stop])
        stopped = await turn(prefill, decode, engines.model, tokens, 30, sampling=sampling).run()
        assert stopped.tokens == expected[: expected.index(stop) + 1]
        assert stopped.finished is not None
        assert stopped.finished.reason == "stop"
    await engines.idle("decode")


async def test_logprobs_come_with_each_token(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True, top_logprobs=2)
    made = await turn(prefill, decode, engines.model, prompt(20), 5, sampling=sampling).run()
    assert all(token.logprob < 0 and len(token.top) == 2 for token in made.sampled)
    assert all(token.top[0].token == token.token for token in made.sampled)


@pytest.mark.usefixtures("unhurried")
async def test_cancelling_frees_the_sequence_at_once(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    turns = [turn(prefill, decode, engines.model, prompt(40, seed), 450) for seed in range(3)]
    running = [asyncio.create_task(one.run()) for one in turns]
    await eventually(lambda: all(one.tokens for one in turns))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engines.idle("decode")
    assert all(len(one.tokens) < 400 for one in turns)


@pytest.mark.usefixtures("unhurried")
async def test_the_youngest_gives_way_when_memory_is_short(engines: Stack) -> None:
    prefill = await engines.prefill()
    decode = await engines.decode(engine={"capacity_tokens": 12 * BLOCK})
    (old, expected), young = engines.reference.prompt(60, 60), prompt(60, seed=9)
    first = turn(prefill, decode, engines.model, old, 60)
    second = turn(prefill, decode, engines.model, young, 400)
    running = asyncio.create_task(first.run())
    await eventually(lambda: len(first.tokens) > 1)
    with pytest.raises(CapacityExhausted, match="older sequences precedence"):
        await second.run()
    await running
    assert first.tokens == expected
    engines.reference.assert_greedy(young, second.tokens)
    with pytest.raises(CapacityExhausted, match="13 blocks and this decode instance has 12 free"):
        await turn(prefill, decode, engines.model, prompt(192, seed=77), 5).run()
    await engines.idle("decode")


async def test_a_prompt_that_never_comes_is_waited_for_a_bounded_time(engines: Stack) -> None:
    decode = await engines.decode()
    call = decode.Generate(
        turn(None, decode, engines.model, prompt(40), 5, start_wait_ms=200).request, timeout=10
    )
    events = aiter(call)
    assert (await anext(events)).WhichOneof("event") == "reserved"
    with pytest.raises(Unavailable, match=r"did not deliver the prompt within 0\.2 s"):
        await anext(events)
    await engines.idle("decode")


async def test_prefill_names_the_target_that_it_cannot_reach(engines: Stack) -> None:
    prefill = await engines.prefill(push_deadline_s=1.0)
    nobody = common_pb2.SegmentPlace(data_address=f"unix:{engines.runtime}/none", handle=1, epoch=1, blocks=3)
    with pytest.raises(Unavailable, match=f"holder at unix:{engines.runtime}/none"):
        await compute(prefill, prefill_request(engines.model, prompt(40), targets=[nobody]))
    assert (await compute(prefill, prefill_request(engines.model, prompt(40)))).cached_tokens == 32


async def test_writes_to_a_sequence_that_ended_are_refused(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()
    done = await turn(prefill, decode, engines.model, prompt(40), 5).run()
    assert done.reserved is not None
    placement = done.reserved.placements[0]
    client = DataClient(placement.data_address)
    start = data_pb2.StartSequence(handle=placement.handle, epoch=placement.epoch)
    with pytest.raises(StaleEpoch):
        await asyncio.to_thread(
            client.call, data_pb2.DataRequest(start_sequence=start), deadline=Deadline.after(5)
        )
    client.close()
    with pytest.raises(Unavailable, match="did not reach"):
        await compute(prefill, prefill_request(engines.model, prompt(40), targets=[placement]))


async def test_what_cannot_be_generated_is_refused_with_a_reason(engines: Stack) -> None:
    decode = await engines.decode()

    async def refuse(tokens: list[int], new: int, *, model: bytes = engines.model, **changes: Any) -> None:
        await turn(None, decode, model, tokens, new, **changes).run()

    with pytest.raises(ModelNotFound):
        await refuse([1], 5, model=bytes(32))
    with pytest.raises(InvalidInput, match="vocabulary"):
        await refuse([199], 5)
    with pytest.raises(ContextLengthExceeded, match="window of 512"):
        await refuse([1], 600)
    with pytest.raises(ContextLengthExceeded):
        await refuse([1], 0)
    with pytest.raises(InvalidInput, match="start_wait_ms"):
        await refuse([1], 5, start_wait_ms=0)
    with pytest.raises(InvalidInput, match="salt"):
        await refuse([1], 5, salt=b"short")
    await engines.idle("decode")
