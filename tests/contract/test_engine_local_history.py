"""History of prompts that decode computes itself: it is saved, found again in the store, loaded layer by
layer or computed anew, and made again behind truncations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kvcommons.engine.iteration import Iteration
from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.errors import DataLoss, Unavailable
from kvcommons.pb import common_pb2, data_pb2, prefill_pb2_grpc
from kvcommons.transport.client import DataClient
from kvcommons.transport.server import DataServer, Exchange
from services.decode.arrival.local_prefill import LocalSink
from services.router.sessions.truncation import Context
from tests.contract.engine_stack import BLOCK, Stack
from tests.contract.engine_turns import compute, prompt, turn
from tests.contract.test_engine_local import ALL
from tests.contract.test_engine_reuse import stored, through_wire
from tests.contract.test_engine_truncation import Session, asked, overflow_twice, stays_in_use
from tests.contract.truncation_reference import Answer, TruncatedReference
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is waited for, however slow the machine is."""
    monkeypatch.setattr(LoadOrCompute, "patience_s", lambda *_, **__: scaled(20.0))


@pytest.mark.usefixtures("patient")
async def test_a_prompt_that_was_computed_here_is_loaded_once_it_was_evicted(engines: Stack) -> None:
    """All of its full blocks were saved: of the answer there is not a token whose KV could have been. Another
    prompt takes their memory, and leaves nothing of its own."""
    store = await engines.kvstore()
    decode = await engines.decode(max_local_prefill_tokens=ALL, engine={"capacity_tokens": 16 * BLOCK})
    tokens, expected = engines.reference.prompt(200, 20)
    full = len(tokens) // BLOCK
    saving = await turn(None, decode, engines.model, tokens, 1, history=engines.history(0)).run()
    assert saving.tokens == expected[:1]
    assert await stored(engines, store, tokens[: full * BLOCK]) == full
    other = turn(None, decode, engines.model, prompt(16 * BLOCK - 1, 7), 1, no_reuse=True)
    await other.run()
    again = await turn(None, decode, engines.model, tokens, 20, history=engines.history(full)).run()
    assert again.tokens == expected
    assert again.reserved is not None
    assert again.reserved.computes
    assert again.first is not None
    assert (again.first.cached_tokens, again.first.device_tokens) == (full * BLOCK, 0)
    await engines.idle("decode")


@pytest.mark.usefixtures("patient")
async def test_a_second_turn_on_a_fresh_instance_loads_what_was_computed_and_generated(
    engines: Stack,
) -> None:
    store = await engines.kvstore()
    first = await engines.decode("d1", max_local_prefill_tokens=ALL)
    tokens, expected = engines.reference.prompt(75, 64)
    made = await turn(None, first, engines.model, tokens, 32, history=engines.history(0)).run()
    assert made.tokens == expected[:32]
    known = tokens + expected[:32]
    full = (len(known) - 1) // BLOCK
    assert await stored(engines, store, known[: full * BLOCK]) == full
    again = await engines.decode("d2", max_local_prefill_tokens=ALL)
    second = await turn(None, again, engines.model, known, 32, history=engines.history(full)).run()
    assert second.tokens == expected[32:]
    assert second.first is not None
    assert (second.first.cached_tokens, second.first.device_tokens) == (full * BLOCK, 0)
    await engines.idle("d1", "d2")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("loaded", [12, 5, 0])
async def test_what_of_a_history_is_loaded_and_what_is_computed_is_decided(
    engines: Stack, monkeypatch: pytest.MonkeyPatch, loaded: int
) -> None:
    """By what it is told of the history: whose the positions are, and how many blocks the store has."""
    store = await engines.kvstore()
    tokens, expected = await saved(engines, store)
    heard: list[tuple[int, range]] = []

    def decide(_: LoadOrCompute, blocks: int, *, positions: range, **__: int) -> int:
        heard.append((blocks, positions))
        return loaded

    monkeypatch.setattr(LoadOrCompute, "blocks_to_load", decide)
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    made = await turn(None, decode, engines.model, tokens, 20, history=engines.history(12)).run()
    assert made.tokens == expected
    assert heard == [(12, range(200))]
    assert made.first is not None
    assert (made.first.cached_tokens, made.first.device_tokens) == (loaded * BLOCK, 0)
    await engines.idle("decode")


async def saved(engines: Stack, store: Any) -> tuple[list[int], list[int]]:
    """A prompt of 200 tokens whose 12 full blocks the store has, and the 20 tokens that follow it."""
    tokens, expected = engines.reference.prompt(200, 20)
    before = await engines.decode("before", max_local_prefill_tokens=ALL)
    await turn(None, before, engines.model, tokens, 1, history=engines.history(0)).run()
    assert await stored(engines, store, tokens[:192]) == 12
    return tokens, expected


class LayerWire:
    """Between an instance and the store: a layer of history comes when it may pass."""

    def __init__(self, address: str, store: str, layers: int) -> None:
        self.passes = [threading.Event() for _ in range(layers)]
        self.passed: list[int] = []
        self._client = DataClient(store)
        self._server = DataServer(address, self._relay, name="wire")
        self._server.start()

    def _relay(self, request: data_pb2.DataRequest, exchange: Exchange) -> None:
        payload = bytearray()

        def into(reply: data_pb2.DataReply, size: int) -> list[bytearray]:
            payload[:] = bytes(size)
            return [payload]

        layers, deadline = request.get_layers.layers, exchange.deadline
        for reply in self._client.stream(request, into=into, replies=layers, deadline=deadline):
            if not self.passes[reply.got_layer.layer].wait(scaled(20.0)):
                raise Unavailable("the layer was never let through")
            exchange.reply(reply, [payload])
            self.passed.append(reply.got_layer.layer)

    def close(self) -> None:
        for one in self.passes:
            one.set()
        self._server.stop()
        self._client.close()


@pytest.fixture
async def wire(engines: Stack) -> AsyncIterator[Callable[[], LayerWire]]:
    made: list[LayerWire] = []

    def make() -> LayerWire:
        layers = engines.reference.layers
        made.append(LayerWire(engines.data("wire"), engines.data("kvstore"), layers))
        return made[0]

    yield make
    for one in made:
        await asyncio.to_thread(one.close)


@pytest.mark.usefixtures("patient")
async def test_a_layer_of_history_is_loaded_while_the_one_before_is_computed(
    engines: Stack, wire: Callable[[], LayerWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None comes before the one before it was used."""
    tokens, expected = await saved(engines, await engines.kvstore())
    held, computed = wire(), list[int]()

    def note(_: LocalSink, prompt: Any, layer: int, blocks: range) -> None:
        computed.append(layer)
        for one in held.passes[layer + 1 : layer + 2]:
            one.set()

    monkeypatch.setattr(LocalSink, "computed", note)
    held.passes[0].set()
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    made = await turn(None, decode, engines.model, tokens, 1, history=through_wire(engines, 12)).run()
    assert made.tokens == expected[:1]
    assert made.first is not None
    assert made.first.cached_tokens == 12 * BLOCK
    assert computed == list(range(engines.reference.layers)), "one chunk, begun with its first layer"
    await engines.idle("decode")


@pytest.mark.usefixtures("patient")
async def test_history_is_loaded_before_its_prompts_turn(
    engines: Stack, wire: Callable[[], LayerWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt has several chunks, of which the second one does not begin before all layers came."""
    tokens, expected = await saved(engines, await engines.kvstore())
    other, others = engines.reference.prompt(150, 1, 50)
    held, run = wire(), Iteration.run
    goes_on = [threading.Event(), threading.Event()]
    seen: list[Sequence[str]] = []

    def gated(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        seen.append([group.prompt.request.request_id for group in self.groups])  # type: ignore[attr-defined]
        if len(seen) <= len(goes_on):
            assert goes_on[len(seen) - 1].wait(scaled(20.0))
        return run(self, *between_layers)

    monkeypatch.setattr(Iteration, "run", gated)
    for one in held.passes:
        one.set()
    decode = await engines.decode(max_local_prefill_tokens=ALL, chunk_tokens=64)
    first = turn(None, decode, engines.model, other, 1, request_id="long")
    second = turn(
        None, decode, engines.model, tokens, 1, history=through_wire(engines, 12), request_id="warm"
    )
    computing = asyncio.create_task(first.run())
    await eventually(lambda: seen, "the first chunk")
    loading = asyncio.create_task(second.run())
    await eventually(lambda: second.reserved, "the other one is there")
    goes_on[0].set()
    await eventually(lambda: len(held.passed) == len(held.passes), "the history comes before its turn")
    assert seen == [["long"]] * len(seen)
    goes_on[1].set()
    await asyncio.gather(computing, loading)
    assert (first.tokens, second.tokens) == (others, expected[:1])
    assert second.first is not None
    assert second.first.cached_tokens == 12 * BLOCK
    await engines.idle("decode")


@pytest.mark.parametrize("engines", ["llama", "mistral-sliding"], indirect=True)
@pytest.mark.parametrize("head_blocks", [0, 2])
async def test_behind_truncations_what_is_left_stays_in_use_here(engines: Stack, head_blocks: int) -> None:
    """Whether it lies in the instance's memory or only in the store; there is no prefill."""
    store = await engines.kvstore()
    session = Session(engines, TruncatedReference(engines.folder))
    pairs = [(None, await engines.decode(f"d{i}", max_local_prefill_tokens=ALL)) for i in range(2)]
    await stays_in_use(session, head_blocks, store, pairs)
    await engines.idle("d0", "d1")


async def test_a_truncated_session_is_replayed_where_it_generates(engines: Stack) -> None:
    """A process with both roles that has nothing of it refuses a turn whose history it lacks; it computes the
    excerpts as prefill, and the turn itself from what it has then."""
    session, contexts = Session(engines, TruncatedReference(engines.folder)), list[tuple[Context, Answer]]()

    async def keep(number: int, context: Context, expected: Answer) -> None:
        contexts.append((context, expected))
        session.tokens += expected.tokens

    await overflow_twice(session, 1, keep)
    context, expected = contexts[-1]
    both = await engines.decode("both", colocated=True, chunk_tokens=32)
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    with pytest.raises(DataLoss, match="replay"):
        await session.answer(None, both, context, expected)
    await engines.idle("both")
    for excerpt in context.excerpts[:-1]:
        await compute(prefill, asked(engines, excerpt))
    made = await session.answer(None, both, context, expected)
    assert made.reserved is not None
    assert made.reserved.computes
    assert made.first is not None
    assert made.first.cached_tokens == made.first.device_tokens == context.now.since_token
    await engines.idle("both")
