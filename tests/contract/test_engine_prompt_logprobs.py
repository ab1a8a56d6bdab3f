"""How likely a prompt's own tokens are, as prefill says it: transformers' log-probabilities in float32,
however the prompt is computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from kvcommons.backend.interface import Device
from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.model.prompt_logprobs import LogprobsOfChunk
from kvcommons.pb import common_pb2, prefill_pb2_grpc
from kvcommons.pb import prefill_pb2 as pb
from tests.contract.engine_stack import BLOCK, Stack, prefill_idle
from tests.contract.engine_turns import CALL_S, compute, prefill_request, prompt, turn
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_stages import Retrying, under_way
from tests.exactness import MARGIN
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


class Scored:
    """A prefill's stub: the logprobs of its calls are kept, and not passed on."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.messages: list[common_pb2.PromptLogprobs] = []

    async def Compute(self, request: pb.PrefillRequest, timeout: float) -> AsyncIterator[pb.PrefillEvent]:
        self.messages.clear()
        async for event in self._stub.Compute(request, timeout=timeout):
            if event.WhichOneof("event") == "logprobs":
                self.messages.append(event.logprobs)
            else:
                yield event


def assert_exact(
    engines: Stack, tokens: Sequence[int], messages: Sequence[common_pb2.PromptLogprobs], top: int
) -> None:
    """Each position once, in order; its numbers are the reference's, and its rank is among those that numbers
    within the margin allow."""
    reference = engines.reference.prompt_logprobs(tokens)
    at = 1
    for message in messages:
        assert (message.first, message.top) == (at, top)
        count = len(message.logprobs)
        assert count == len(message.ranks)
        assert len(message.top_tokens) == len(message.top_logprobs) == count * top
        rows = reference[at - 1 : at - 1 + count]
        own = rows.gather(1, torch.tensor(tokens[at : at + count]).unsqueeze(1))
        torch.testing.assert_close(torch.tensor(message.logprobs), own[:, 0], rtol=0, atol=MARGIN)
        ranks = torch.tensor(message.ranks)
        assert (ranks > (rows > own + MARGIN).sum(-1)).all()
        assert (ranks <= (rows > own - MARGIN).sum(-1)).all()
        indices = torch.tensor(message.top_tokens, dtype=torch.long).view(count, top)
        best = torch.tensor(message.top_logprobs).view(count, top)
        torch.testing.assert_close(best, rows.topk(top, dim=-1).values, rtol=0, atol=MARGIN)
        torch.testing.assert_close(best, rows.gather(1, indices), rtol=0, atol=MARGIN)
        at += count
    assert at == len(tokens)


async def score(
    engines: Stack, stub: Any, tokens: Sequence[int], top: int, **changes: Any
) -> pb.PrefillFirst:
    """The prompt's result, after its logprobs were found exact."""
    scored = Scored(stub)
    request = prefill_request(engines.model, tokens, prompt_logprobs=top, **changes)
    first = await compute(scored, request)
    assert_exact(engines, tokens, scored.messages, top)
    return first


@pytest.mark.parametrize("engines", ["llama", "mistral-sliding", "qwen3"], indirect=True)
async def test_they_are_the_reference_over_several_chunks_and_slices(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 32 rows, whose logits are made 7 rows at a time."""
    monkeypatch.setattr("kvcommons.model.prompt_logprobs._LOGITS_BYTES", 4 * 199 * 7)
    stub = await engines.prefill()
    for length, top in ((300, 5), (75, 0), (33, 20), (2, 1), (1, 3)):
        tokens, (expected,) = engines.reference.prompt(length)
        first = await score(engines, stub, tokens, top)
        assert (first.token.token, first.cached_tokens) == (expected, 0)
    await prefill_idle(stub)


async def test_messages_are_of_bounded_size(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcommons.model.prompt_logprobs.POSITIONS_MAX", 50)
    stub = Scored(await engines.prefill(chunk_tokens=480))
    tokens = prompt(400)
    await compute(stub, prefill_request(engines.model, tokens, prompt_logprobs=2))
    assert [len(message.logprobs) for message in stub.messages] == [50] * 7 + [49]
    assert_exact(engines, tokens, stub.messages, 2)


async def test_nothing_is_reused_for_them_and_what_is_computed_is_for_others(engines: Stack) -> None:
    store, stub = await engines.kvstore(), await engines.prefill()
    tokens, (expected,) = engines.reference.prompt(75)
    first = await score(engines, stub, tokens, 3, history=engines.history(0))
    assert (first.cached_tokens, first.device_tokens) == (0, 0)
    assert await stored(engines, store, tokens[:64]) == 4
    plain = await compute(stub, prefill_request(engines.model, tokens))
    assert (plain.token.token, plain.cached_tokens) == (expected, 64)
    again = await score(engines, stub, tokens, 3, history=engines.history(4))
    assert (again.token.token, again.cached_tokens) == (expected, 0)
    await prefill_idle(stub)


async def test_a_turn_goes_on_behind_them(engines: Stack) -> None:
    """Decode, which would have computed so short a prompt itself, leaves it to prefill, and takes blocks of
    its own for it though it has the same."""
    prefill, decode = Scored(await engines.prefill()), await engines.decode(max_local_prefill_tokens=64)
    tokens, expected = engines.reference.prompt(60, 12)
    plain = turn(prefill, decode, engines.model, tokens, 12)
    assert (await plain.run()).tokens == expected
    assert plain.reserved is not None
    assert plain.reserved.computes
    made = turn(prefill, decode, engines.model, tokens, 12, prompt_logprobs=4)
    assert (await made.run()).tokens == expected
    assert made.reserved is not None
    assert (made.reserved.computes, made.reserved.push_from_block) == (False, 0)
    assert_exact(engines, tokens, prefill.messages, 4)
    await engines.idle("decode")


async def test_of_a_prompt_beyond_prefills_memory(engines: Stack) -> None:
    """Its chunks attend over what lies at decode."""
    prefill = Scored(await engines.prefill(engine={"capacity_tokens": 6 * BLOCK}))
    decode = await engines.decode()
    tokens, expected = engines.reference.prompt(250, 8)
    for _ in range(2):
        made = turn(prefill, decode, engines.model, tokens, 8, prompt_logprobs=4)
        assert (await made.run()).tokens == expected
        assert made.first is not None
        assert made.first.cached_tokens == 0
        assert_exact(engines, tokens, prefill.messages, 4)
        await engines.idle("decode")


async def test_of_an_instance_with_both_roles(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads prompts, its own and another decode's, beside sequences that generate there: those go on
    between slices of logits, and say the same."""
    monkeypatch.setattr("kvcommons.model.prompt_logprobs._LOGITS_BYTES", 4 * 199 * 7)
    both = await engines.decode("both", colocated=True, chunk_tokens=32, max_local_prefill_tokens=480)
    alone = await engines.decode("alone")
    stub = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    tokens, expected = engines.reference.prompt(75, 60)
    running = turn(stub, both, engines.model, tokens, 60)
    others, following = engines.reference.prompt(300, 8)
    read = [
        (Scored(stub), both, tokens, expected[:8]),
        (Scored(stub), alone, others, following),
    ]
    made = [
        turn(scored, decode, engines.model, prompted, 8, prompt_logprobs=3)
        for scored, decode, prompted, _ in read
    ]
    await asyncio.gather(running.run(), *(one.run() for one in made))
    assert running.tokens == expected
    for one, (scored, _, prompted, answer) in zip(made, read, strict=True):
        assert one.tokens == answer
        assert_exact(engines, prompted, scored.messages, 3)
    await engines.idle("both", "alone")


@pytest.mark.parametrize(
    ("engines", "stages", "tensor"),
    [("llama", 2, 1), ("qwen3", 1, 2), ("llama-tied-biased", 2, 2)],
    indirect=["engines"],
)
async def test_of_stages_and_ranks(engines: Stack, stages: int, tensor: int) -> None:
    """Beside prompts of which none are wanted."""
    await engines.lenders()
    stub = await engines.staged(stages, tensor=tensor)
    wanted, (expected,) = engines.reference.prompt(300)
    plain, (following,) = engines.reference.prompt(75)
    firsts = await asyncio.gather(
        score(engines, stub, wanted, 5),
        compute(stub, prefill_request(engines.model, plain)),
        score(engines, stub, plain, 0),
    )
    assert [first.token.token for first in firsts] == [expected, following, following]
    await prefill_idle(stub)


@pytest.mark.usefixtures("unhurried")
async def test_a_stage_killed_in_the_middle_gives_the_same_again(engines: Stack) -> None:
    await engines.lenders()
    stub = await engines.staged(2, process=True)
    scored = Scored(stub)
    tokens, expected = engines.reference.prompt(480, 8)
    decode = await engines.decode()
    made = turn(Retrying(scored), decode, engines.model, tokens, 8, prompt_logprobs=5)
    running = asyncio.create_task(made.run())
    await under_way(stub)
    engines.children[-1].kill()
    engines.children[-1].wait()
    engines.stage(1, 2, process=True)
    assert (await running).tokens == expected
    assert_exact(engines, tokens, scored.messages, 5)
    await engines.idle("decode")
    await prefill_idle(stub)


async def test_a_call_cancelled_among_slices_ends_there(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 479 slices, a row each, that would take seconds."""
    monkeypatch.setattr("kvcommons.model.prompt_logprobs._LOGITS_BYTES", 4 * 199)
    read, longer_s = list[slice](), scaled(0.01)
    add = LogprobsOfChunk.add

    def slowly(collected: LogprobsOfChunk, rows: slice, logits: torch.Tensor, device: Device) -> None:
        read.append(rows)
        time.sleep(longer_s)
        add(collected, rows, logits, device)

    monkeypatch.setattr(LogprobsOfChunk, "add", slowly)
    stub = await engines.prefill(chunk_tokens=480)
    tokens, (expected,) = engines.reference.prompt(480)
    call = stub.Compute(prefill_request(engines.model, tokens, prompt_logprobs=20), timeout=CALL_S)
    running = asyncio.create_task(_drained(call))
    await eventually(lambda: read)
    call.cancel()
    with pytest.raises((asyncio.CancelledError, KVCommonsError)):
        await running
    await prefill_idle(stub)
    assert len(read) < 479
    longer_s = 0.0
    assert (await score(engines, stub, tokens, 1)).token.token == expected


async def _drained(call: Any) -> None:
    async for _ in call:
        pass


async def test_what_cannot_be_said_is_refused(engines: Stack) -> None:
    stub = await engines.prefill()
    with pytest.raises(InvalidInput, match="at most 20") as refused:
        await compute(stub, prefill_request(engines.model, prompt(40), prompt_logprobs=21))
    assert refused.value.param == "prompt_logprobs"
    truncated = common_pb2.Truncated(head_tokens=0, dropped_tokens=BLOCK, since_token=0, parent=bytes(32))
    with pytest.raises(InvalidInput, match="truncated"):
        await compute(
            stub, prefill_request(engines.model, prompt(40), prompt_logprobs=1, truncated=truncated)
        )
