"""Prefill whose stages have several ranks: its tokens are those of transformers, whatever becomes of a rank
meanwhile."""

from __future__ import annotations

import asyncio
import signal

import pytest

from kvcommons.errors import InvalidInput, Loading, Unavailable
from kvcommons.model.spec import ModelSpec, model_info
from kvcommons.rblock.layout import Layout
from kvcommons.stages.settings import StageSettings
from services.prefill.config import PrefillConfig
from services.prefill.stage import stage_share
from tests.contract.engine_stack import BLOCK, Stack, prefill_idle, settings, shape_of, slow
from tests.contract.engine_turns import compute, prefill_request, turn
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_stages import Retrying, assert_cancelling_frees, under_way
from tests.machine import scaled

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


@pytest.mark.parametrize(
    ("engines", "stages", "tensor"),
    [("qwen3", 1, 2), slow("qwen2", 1, 4), ("llama-tied-biased", 2, 2), slow("mistral-sliding", 1, 4)],
    indirect=["engines"],
)
async def test_the_first_token_is_the_reference_with_and_without_reuse(
    engines: Stack, stages: int, tensor: int
) -> None:
    await engines.lenders()
    stub = await engines.staged(stages, tensor=tensor)
    tokens, (expected,) = engines.reference.prompt(75)
    cold = await compute(stub, prefill_request(engines.model, tokens))
    assert (cold.token.token, cold.token.position, cold.cached_tokens) == (expected, 75, 0)
    warm = await compute(stub, prefill_request(engines.model, tokens))
    assert (warm.token.token, warm.cached_tokens, warm.device_tokens) == (expected, 64, 64)
    known = [engines.reference.prompt(length) for length in (300, 33, 75, 1)]
    made = await asyncio.gather(
        *(compute(stub, prefill_request(engines.model, tokens)) for tokens, _ in known)
    )
    assert [first.token.token for first in made] == [expected for _, (expected,) in known]
    await prefill_idle(stub)


@pytest.mark.parametrize(
    ("engines", "stages", "tensor"),
    [("mistral-sliding", 2, 2), slow("qwen2", 1, 4), slow("llama", 1, 2)],
    indirect=["engines"],
)
async def test_ranks_hand_over_their_heads_and_load_them_from_the_store(
    engines: Stack, stages: int, tensor: int
) -> None:
    """Decode goes on from what the ranks sent it, and from what they saved; a fresh group loads its heads of
    that, and one process without ranks loads all of it."""
    await engines.lenders()
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(75, 64)
    prefill, decode = await engines.staged(stages, "p1", tensor=tensor), await engines.decode("d1")
    first = turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0))
    assert (await first.run()).tokens == expected[:32]
    full = (75 + 32 - 1) // BLOCK
    known = tokens + expected[:32]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    await engines.idle("d1")

    decode = await engines.decode("d2", fetch_min_bytes=1 << 30)
    for prefill in (
        await engines.staged(1, "p2", tensor=2, loads="always"),
        await engines.prefill("p3", loads="always"),
    ):
        second = turn(prefill, decode, engines.model, known, 32, history=engines.history(full))
        assert (await second.run()).tokens == expected[32:]
        assert second.first is not None
        assert (second.first.cached_tokens, second.first.device_tokens) == (full * BLOCK, 0)
        await engines.idle("d2")
        await prefill_idle(prefill)


@pytest.mark.parametrize(
    ("engines", "stages", "tensor"),
    [("qwen3", 2, 1), ("mistral-sliding", 2, 2), slow("qwen2", 1, 4)],
    indirect=["engines"],
)
async def test_kv_goes_to_decode_and_to_the_store_once(engines: Stack, stages: int, tensor: int) -> None:
    """Whoever it is from: all stages and ranks together send what the sequence's blocks take, and no byte
    more. A KV head that several of decode's ranks have goes to each of them."""
    await engines.lenders()
    store = await engines.kvstore()
    prefill = await engines.staged(stages, tensor=tensor)
    decode = await engines.staged_decode(stages, tensor=tensor)
    tokens, expected = engines.reference.prompt(300, 32)
    one = turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0))
    assert (await one.run()).tokens == expected
    full, known = (300 + 32 - 1) // BLOCK, tokens + expected
    assert await stored(engines, store, known[: full * BLOCK]) == full
    layout = Layout.of(model_info("m", ModelSpec.read(engines.folder), engines.model, "float32", BLOCK))
    members = [name for name in engines.processes if name not in ("ledger", "kvstore")]
    decodes = [name for name in members if name.startswith("decode")]
    assert len(decodes) == stages * tensor
    pushed = sum(received(engines, name, "write_blocks") for name in decodes)
    assert pushed == layout.blocks_of(300) * layout.block_bytes * max(tensor // layout.kv_heads, 1)
    for name in members:
        await engines.stop(name)  # which waits for what is being saved
    assert received(engines, "kvstore", "put_layer") == full * layout.block_bytes


def received(engines: Stack, name: str, op: str) -> float:
    """Bytes of payload that this instance was sent."""
    registry = engines.processes[name].telemetry.registry
    labels = {"op": op, "direction": "received"}
    return registry.get_sample_value("kvcommons_data_server_bytes_total", labels) or 0.0


@pytest.mark.usefixtures("unhurried")
async def test_cancelled_jobs_give_their_blocks_back_at_all_ranks(engines: Stack) -> None:
    await engines.lenders()
    await assert_cancelling_frees(engines, await engines.staged(2, tensor=2))


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
async def test_a_rank_that_dies_or_stands_still_ends_the_epoch(
    engines: Stack, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a prompt, while the others wait for its part of a sum: a clear error within seconds,
    all blocks back, and the group is there again with it."""
    monkeypatch.setattr("kvcommons.stages.connected.SILENCE_S", scaled(2.0))
    monkeypatch.setattr("kvcommons.stages.ranks.SUM_S", scaled(2.0))
    await engines.lenders()
    stub, decode = await engines.staged(1, tensor=2, process=True), await engines.decode()
    tokens, expected = engines.reference.prompt(480, 8)
    for _ in range(2):
        call = asyncio.create_task(compute(stub, prefill_request(engines.model, tokens, no_reuse=True)))
        await under_way(stub)
        child = engines.children[-1]
        child.send_signal(how)
        with pytest.raises(Unavailable, match="stage"):
            await call
        await prefill_idle(stub)
        if how is signal.SIGSTOP:
            with pytest.raises(Loading, match="lacks stages"):
                await compute(stub, prefill_request(engines.model, tokens))
            child.send_signal(signal.SIGCONT)
        else:
            child.wait()
            engines.stage(0, 1, rank=1, tensor=2, process=True)
        await engines.together(stub)
        made = turn(Retrying(stub), decode, engines.model, tokens, 8)
        assert (await made.run()).tokens == expected
        await engines.idle("decode")
        await prefill_idle(stub)


@pytest.mark.parametrize("engines", ["llama-all-heads"], indirect=True)
async def test_what_cannot_be_divided_is_refused_before_anything_starts(engines: Stack) -> None:
    config = PrefillConfig(
        node=engines.node("prefill"),
        engine=settings(engines.folder),
        ledger=engines.ledger,
        shape=StageSettings(tensor=3),
    )
    with pytest.raises(InvalidInput, match=r"tensor = 3 does not divide 4 query heads, .* over 1, 2, 4$"):
        stage_share(config)
    for wrong, named in (
        ({"tensor": 2, "rank": 2}, "rank = 2 of tensor = 2"),
        ({"tensor": 2, "rank": 1}, "set data_listen"),
        ({"tensor": 2, "core_lock": "lock"}, "leave core_lock out"),
    ):
        with pytest.raises(ValueError, match=named):
            PrefillConfig(
                node=engines.node("prefill"),
                engine=settings(engines.folder),
                ledger=(),
                shape=shape_of(wrong),
                **wrong,
            )
