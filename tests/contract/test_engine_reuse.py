"""History that comes from a real kvstore, or does not come: the tokens stay those of transformers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.errors import Unavailable
from kvcommons.model.spec import ModelSpec
from kvcommons.pb import common_pb2, data_pb2, kvstore_pb2
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub
from kvcommons.rblock.identity import IdentityChain
from kvcommons.transport.client import DataClient
from kvcommons.transport.server import DataServer, Exchange
from tests.contract.engine_stack import BLOCK, Stack, prefill_idle
from tests.contract.engine_turns import SALT, compute, prefill_request, prompt, turn
from tests.machine import scaled

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


async def stored(engines: Stack, store: BlocksStub, tokens: Sequence[int]) -> int:
    """How many leading blocks of these tokens the store has, once all full ones came, or after a while."""
    return await stored_ids(engines, store, IdentityChain(SALT, engines.model, BLOCK).extend(tokens))


async def stored_ids(engines: Stack, store: BlocksStub, ids: Sequence[bytes]) -> int:
    """The same, of these blocks."""
    until = time.monotonic() + scaled(5)
    while True:
        reply = await store.Match(
            kvstore_pb2.MatchRequest(model=engines.model, block_ids=ids), timeout=scaled(5)
        )
        if len(reply.tiers) == len(ids) or time.monotonic() > until:
            return len(reply.tiers)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("fetch_min_bytes", [0, 1 << 30])
@pytest.mark.parametrize("engines", ["llama", "qwen3"], indirect=True)
async def test_a_second_turn_on_fresh_instances_loads_all_full_blocks(
    engines: Stack, fetch_min_bytes: int
) -> None:
    """Decode fetches its part from the store, or, where that is little, has it from prefill."""
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(75, 64)
    prefill, decode = await engines.prefill("p1"), await engines.decode("d1")
    first = turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0))
    assert (await first.run()).tokens == expected[:32]
    assert first.finished is not None
    assert first.finished.saved_blocks == (75 + 31) // BLOCK - 75 // BLOCK
    full = (75 + 32 - 1) // BLOCK
    known = tokens + expected[:32]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    await engines.idle("d1")

    prefill = await engines.prefill("p2", loads="always")
    decode = await engines.decode("d2", fetch_min_bytes=fetch_min_bytes)
    second = turn(prefill, decode, engines.model, known, 32, history=engines.history(full))
    assert (await second.run()).tokens == expected[32:]
    assert second.first is not None
    assert (second.first.cached_tokens, second.first.device_tokens) == (full * BLOCK, 0)
    assert second.reserved is not None
    assert second.reserved.push_from_block == (0 if fetch_min_bytes else full)
    assert not second.missing
    await engines.idle("d2")


async def test_what_the_store_has_no_more_is_computed(engines: Stack) -> None:
    """Decode and prefill are told of blocks that are not there: of all, then of some. Prefill waits to hear
    it: on a slow machine it would give up a load that does not come, and compute what the store may have."""
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(100, 20)
    prefill, decode = await engines.prefill("p1", loads="always"), await engines.decode("d1")
    made = turn(prefill, decode, engines.model, tokens, 20, history=engines.history(6))
    assert (await made.run()).tokens == expected
    assert made.missing == [0]
    assert made.first is not None
    # What the store was thought to have was computed, and saved after all.
    assert await stored(engines, store, tokens[:96]) == 6

    ahead, following = tokens[:48] + prompt(60, 3), 20
    prefill, decode = await engines.prefill("p2", loads="always"), await engines.decode("d2")
    made = turn(prefill, decode, engines.model, ahead, following, history=engines.history(6))
    assert (await made.run()).tokens == engines.reference.follow(ahead, following)
    assert made.missing == [3]
    assert made.first is not None
    await engines.idle("d2")


async def test_a_store_out_of_reach_costs_time_alone(engines: Stack) -> None:
    tokens, expected = engines.reference.prompt(100, 20)
    prefill, decode = await engines.prefill(), await engines.decode()
    made = turn(prefill, decode, engines.model, tokens, 20, history=engines.history(6, "nowhere"))
    assert (await asyncio.wait_for(made.run(), scaled(20))).tokens == expected
    assert made.missing == [0]


async def test_without_reuse_nothing_is_saved(engines: Stack) -> None:
    store = await engines.kvstore()
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(75)
    made = turn(prefill, decode, engines.model, tokens, 40, history=engines.history(0), no_reuse=True)
    await made.run()
    assert made.finished is not None
    assert made.finished.saved_blocks == 0
    for name in ("prefill", "decode"):
        await engines.stop(name)  # which waits for what is being saved
    assert (await store.Stats(kvstore_pb2.StatsRequest(), timeout=scaled(5))).dram_blocks == 0


async def test_a_prompt_that_ends_at_once_is_saved_whole(engines: Stack) -> None:
    store = await engines.kvstore()
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens = prompt(64)
    await turn(prefill, decode, engines.model, tokens, 1, history=engines.history(0)).run()
    assert await stored(engines, store, tokens) == 4


async def test_jobs_that_need_the_same_history_load_it_once(engines: Stack) -> None:
    store = await engines.kvstore()
    tokens = prompt(320)
    before = await engines.prefill("p1")
    await compute(before, prefill_request(engines.model, tokens, history=engines.history(0)))
    assert await stored(engines, store, tokens) == 20
    prefill = await engines.prefill("p2", loads="always")
    request = prefill_request(engines.model, tokens, history=engines.history(19))
    results = await asyncio.gather(*(compute(prefill, request) for _ in range(3)))
    assert [first.cached_tokens for first in results] == [304] * 3
    assert sorted(first.device_tokens for first in results) == [0, 304, 304]


class CorruptingWire:
    """Between an instance and the store: a byte of a layer of a block arrives wrong, or the line breaks."""

    def __init__(self, address: str, store: str, *, layer: int, block: int, hang_up: bool) -> None:
        self._client = DataClient(store)
        self._layer, self._block, self._hang_up = layer, block, hang_up
        self._server = DataServer(address, self._relay, name="wire")
        self._server.start()

    def _relay(self, request: data_pb2.DataRequest, exchange: Exchange) -> None:
        count = request.get_layers.layers
        payload = bytearray()

        def into(reply: data_pb2.DataReply, size: int) -> list[bytearray]:
            payload[:] = bytes(size)
            return [payload]

        for reply in self._client.stream(request, into=into, replies=count, deadline=exchange.deadline):
            if reply.got_layer.layer == self._layer:
                if self._hang_up:
                    raise Unavailable("the line broke")
                blocks = len(reply.got_layer.checksums)
                if self._block < blocks:  # the store has no more what was condemned
                    payload[self._block * len(payload) // blocks] ^= 1
            exchange.reply(reply, [payload])

    def close(self) -> None:
        self._server.stop()
        self._client.close()


@pytest.mark.parametrize(
    ("layer", "block", "hang_up", "kept"), [(0, 0, False, 0), (1, 2, False, 2), (2, 0, True, 0)]
)
async def test_history_that_goes_wrong_in_mid_load_is_computed(
    engines: Stack, layer: int, block: int, hang_up: bool, kept: int
) -> None:
    """Layers before were used already: the job begins again with fewer blocks, and decode asks for what it
    lacks."""
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(100, 20)
    first = await engines.prefill("p1")
    await compute(first, prefill_request(engines.model, tokens, history=engines.history(0)))
    assert await stored(engines, store, tokens[:96]) == 6
    wire = CorruptingWire(
        engines.data("wire"), engines.data("kvstore"), layer=layer, block=block, hang_up=hang_up
    )
    history = common_pb2.History(
        control_address=engines.address("kvstore"), data_address=engines.data("wire"), matched_blocks=6
    )
    prefill, decode = await engines.prefill("p2", loads="always"), await engines.decode()
    alone = await compute(prefill, prefill_request(engines.model, tokens, history=history))
    assert (alone.token.token, alone.cached_tokens) == (expected[0], kept * BLOCK)
    made = turn(prefill, decode, engines.model, tokens, 20, history=history)
    assert (await made.run()).tokens == expected
    assert made.missing == [kept]
    await asyncio.to_thread(wire.close)
    await engines.idle("decode")


class StallingWire:
    """Between an instance and the store: a load of `blocks` stops before a layer, for good; saves do from the
    first on. Any other goes through."""

    def __init__(self, address: str, store: str, *, blocks: int, layer: int) -> None:
        self._client = DataClient(store)
        self._blocks, self._layer = blocks, layer
        self._gone = threading.Event()
        self._server = DataServer(address, self._relay, name="wire")
        self._server.start()

    def _relay(self, request: data_pb2.DataRequest, exchange: Exchange) -> None:
        get = request.get_layers
        if not request.HasField("get_layers"):
            self._gone.wait(60)
            raise Unavailable("the store never answered")
        payload = bytearray()

        def into(reply: data_pb2.DataReply, size: int) -> list[bytearray]:
            payload[:] = bytes(size)
            return [payload]

        replies = self._client.stream(request, into=into, replies=get.layers, deadline=exchange.deadline)
        for reply in replies:
            if len(get.block_ids) == self._blocks and reply.got_layer.layer == self._layer:
                self._gone.wait(60)
                raise Unavailable("the rest never came")
            exchange.reply(reply, [payload])

    def close(self) -> None:
        self._gone.set()
        self._server.stop()
        self._client.close()


@pytest.fixture
async def stalling(engines: Stack) -> AsyncIterator[Callable[..., StallingWire]]:
    wires: list[StallingWire] = []

    def make(**faults: int) -> StallingWire:
        wires.append(StallingWire(engines.data("wire"), engines.data("kvstore"), **faults))
        return wires[0]

    yield make
    for wire in wires:
        await asyncio.to_thread(wire.close)


def through_wire(engines: Stack, blocks: int) -> common_pb2.History:
    return common_pb2.History(
        control_address=engines.address("kvstore"), data_address=engines.data("wire"), matched_blocks=blocks
    )


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_load_that_stalls_is_given_up_and_computed(
    engines: Stack, stalling: Callable[..., StallingWire], layer: int
) -> None:
    """By the engine's own measure of how long computing takes: unknown, then known."""
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(100, 1)
    first = await engines.prefill("p1")
    await compute(first, prefill_request(engines.model, tokens, history=engines.history(0)))
    assert await stored(engines, store, tokens[:96]) == 6
    stalling(blocks=6, layer=layer)
    for name, warm in (("p2", False), ("p3", True)):
        prefill = await engines.prefill(name)
        if warm:
            await compute(prefill, prefill_request(engines.model, prompt(90, 5)))
        request = prefill_request(engines.model, tokens, history=through_wire(engines, 6))
        alone = await compute(prefill, request)
        assert alone.token.token == expected[0]
        assert alone.cached_tokens <= 3 * BLOCK  # at most half of it goes on, through the wire as it is then
        await prefill_idle(prefill)


@pytest.mark.parametrize(("layer", "keep"), [(0, 2), (1, 2), (2, 5), (1, 0)])
async def test_of_a_load_that_is_given_up_some_blocks_are_kept(
    engines: Stack,
    stalling: Callable[..., StallingWire],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
    keep: int,
) -> None:
    """Layers of history that are there, others that come later, and what is computed instead: one prompt."""
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(100, 20)
    first = await engines.prefill("p1")
    await compute(first, prefill_request(engines.model, tokens, history=engines.history(0)))
    assert await stored(engines, store, tokens[:96]) == 6
    stalling(blocks=6, layer=layer)
    layers = ModelSpec.read(engines.folder).layers

    def patience_s(_: LoadOrCompute, *, positions: range, layers_left: int, **__: float) -> float:
        return 0.0 if positions == range(6 * BLOCK) and layers_left <= layers - layer else 10.0

    monkeypatch.setattr(LoadOrCompute, "patience_s", patience_s)
    monkeypatch.setattr(LoadOrCompute, "blocks_to_keep", lambda *_, **__: keep)
    prefill, decode = await engines.prefill("p2"), await engines.decode()
    made = turn(prefill, decode, engines.model, tokens, 20, history=engines.history(6))
    made.prefill_history = through_wire(engines, 6)
    assert (await made.run()).tokens == expected
    assert made.first is not None
    assert made.first.cached_tokens == keep * BLOCK
    await prefill_idle(prefill)
    await engines.idle("decode")


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_fetch_that_stalls_is_cut_short_once_prefill_has_delivered(
    engines: Stack, stalling: Callable[..., StallingWire], layer: int
) -> None:
    """Long before the fetch's own deadline, which is behind the call's."""
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(100, 10)  # of which no block is saved
    first = await engines.prefill("p1")
    await compute(first, prefill_request(engines.model, tokens, history=engines.history(0)))
    assert await stored(engines, store, tokens[:96]) == 6
    stalling(blocks=6, layer=layer)
    decode = await engines.decode(fetch_deadline_s=120)
    made = turn(first, decode, engines.model, tokens, 10, history=through_wire(engines, 6))
    made.prefill_history = engines.history(6)
    assert (await made.run()).tokens == expected
    assert made.missing == [0]
    await engines.idle("decode")


async def test_a_job_never_waits_for_the_saves_of_the_one_before(
    engines: Stack, stalling: Callable[..., StallingWire]
) -> None:
    """There is room for one prompt, and the store takes no block: those go to the write buffer."""
    await engines.kvstore()
    stalling(blocks=0, layer=0)
    prefill = await engines.prefill(engine={"capacity_tokens": 7 * BLOCK})
    for seed in range(3):
        tokens, expected = engines.reference.prompt(100, 1, first_seed=1 + 200 * seed)
        request = prefill_request(engines.model, tokens, history=through_wire(engines, 0))
        assert (await compute(prefill, request)).token.token == expected[0]
