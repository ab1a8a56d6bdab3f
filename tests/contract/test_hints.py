"""From a router's queue to the kvstore's DRAM, over real sockets: a real kvstore, a real router, scripted
engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import ledger_pb2
from kvcommons.rblock.identity import IdentityChain, tenant_salt
from kvcommons.token_ids import unpacked
from services.kvstore.tier import BlockShape
from services.router.http.tenants import LOCAL_TENANT
from tests.contract.kvstore_process import KvstoreProcess
from tests.contract.rest_stack import BLOCK_TOKENS, MODEL, KvStore, Stack, stack
from tests.machine import scaled
from tests.unit.kvstore.samples import SHAPE, block_ids
from tests.waiting import eventually, wait_until

IDS = block_ids(12)
SECRET = b"a secret of sixteen bytes or more"


def peek(store: KvstoreProcess, ids: list[bytes], model: bytes = SHAPE.model) -> list[int]:
    request = pb.MatchRequest(model=model, block_ids=ids, peek=True)
    return list(store.blocks.Match(request, timeout=scaled(5)).tiers)


class Known(KvStore):
    """A store process as the router's stack knows it."""

    def __init__(self, process: KvstoreProcess) -> None:
        self._known = process

    @property
    def instance(self) -> ledger_pb2.Instance:
        return ledger_pb2.Instance(
            id="kvstore-0",
            service="kvstore",
            control_address=self._known.control,
            data_address=self._known.data_address,
            host="here",
            load=ledger_pb2.Load(ready=True),
        )


def in_dram(store: KvstoreProcess, ids: list[bytes]) -> bool:
    return peek(store, ids, MODEL.fingerprint) == [pb.TIER_DRAM] * len(ids)


def test_after_a_restart_hinted_sessions_are_served_from_dram(socket_folder: Path) -> None:
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    store.put_blocks(IDS)
    store.wait_written()
    store.kill()
    again = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    assert peek(again, IDS) == [pb.TIER_DISK] * len(IDS)
    use = pb.ExpectedUse(model=SHAPE.model, block_ids=IDS[:8], starts_in_ms=500)
    hint = pb.HintRequest(router="router-1", uses=[use], ttl_ms=30_000)
    assert again.blocks.Hint(hint, timeout=scaled(5)).accepted_uses == 1
    expected = [pb.TIER_DRAM] * 8 + [pb.TIER_DISK] * 4
    wait_until(lambda: peek(again, IDS) == expected)
    stats = again.blocks.Stats(pb.StatsRequest(), timeout=scaled(5))
    assert (stats.block_hits, stats.block_misses) == (0, 0)  # looks of a scheduler count as neither
    assert again.get_blocks(IDS)[0] == len(IDS)
    with pytest.raises(InvalidInput, match="router"):
        again.blocks.Hint(pb.HintRequest(uses=[use]), timeout=scaled(5))
    assert again.terminate() == 0, again.errors


def prompt(name: int, blocks: int = 6) -> list[int]:
    """Token ids of a prompt with so many blocks to reuse."""
    return [5 + (name * 131 + at * 7) % 900 for at in range(blocks * BLOCK_TOKENS + 1)]


def ids_of(tokens: list[int]) -> list[bytes]:
    chain = IdentityChain(tenant_salt(SECRET, LOCAL_TENANT), MODEL.fingerprint, BLOCK_TOKENS)
    return chain.extend(tokens)


async def ask(served: Stack, tokens: list[int]) -> dict[str, Any]:
    status, body = await served.post("/v1/completions", {"prompt": tokens, "max_tokens": 2})
    assert status == 200, body
    return body


async def waiting(served: Stack, count: int) -> None:
    async def there() -> bool:
        return bool((await served.get("/v1/status"))[1]["queue"]["waiting"] == count)

    await eventually(there)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        pytest.param("fcfs", [0, 1, 2, 3], marks=pytest.mark.slow),
        pytest.param("fpf", [0, 3, 2, 1], marks=pytest.mark.slow),
        ("bounded_fpf", [0, 3, 2, 1]),
    ],
)
async def test_the_queue_starts_the_nearest_prefix_first_and_has_it_fetched(
    socket_folder: Path, policy: str, order: list[int]
) -> None:
    """One job runs; behind it wait one that is stored nowhere, one on disk that is to come to DRAM, and one
    with the running job's own prefix, which is on the device."""
    shape = BlockShape(model=MODEL.fingerprint, layers=2, object_bytes=4096)
    secret = socket_folder / "secret"
    secret.write_bytes(SECRET)
    prompts = [prompt(0), prompt(1), prompt(2), [*prompt(0), 7, 8]]
    stored = ids_of(prompts[2])[:6]
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    store.put_blocks(stored, shape=shape)
    store.wait_written()
    store.kill()
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    settings = {"max_running": 1, "policy": policy, "secret_file": str(secret)}
    async with stack(socket_folder, Known(store), settings=settings) as served:
        served.says("yes and no")
        await served.show()
        served.script.delay_s = scaled(1.0)
        asked = [asyncio.create_task(ask(served, prompts[0]))]
        await eventually(lambda: served.calls > 0)
        for number in (1, 2, 3):
            asked.append(asyncio.create_task(ask(served, prompts[number])))
            await waiting(served, number)
        assert await asyncio.to_thread(wait_until, lambda: in_dram(store, stored))
        assert not any(task.done() for task in asked)  # nobody asked for it: the hint did it
        served.script.delay_s = 0.0
        await asyncio.gather(*asked)
        started = [prompts.index(list(request.tokens)) for request in served.engines[0].prefill.jobs]
        assert started == order
    assert store.terminate() == 0, store.errors


async def test_an_answer_says_from_which_tier_its_prompt_came(socket_folder: Path) -> None:
    """One block of six is on the device, three are on disk and two in DRAM."""
    shape = BlockShape(model=MODEL.fingerprint, layers=2, object_bytes=4096)
    (socket_folder / "secret").write_bytes(SECRET)
    stored = ids_of(prompt(4))[:6]
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    store.put_blocks(stored[:4], shape=shape)
    store.wait_written()
    store.kill()
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    store.put_blocks(stored[4:], shape=shape)
    assert peek(store, stored, MODEL.fingerprint) == [pb.TIER_DISK] * 4 + [pb.TIER_DRAM] * 2
    settings = {"secret_file": str(socket_folder / "secret")}
    async with stack(socket_folder, Known(store), settings=settings) as served:
        await served.show()
        served.says("yes")
        served.script.cached_tokens, served.script.device_tokens = 6 * BLOCK_TOKENS, BLOCK_TOKENS
        body = {"prompt": prompt(4), "stream_options": {"include_usage": True}}
        *_, last, _ = await served.stream("/v1/completions", body)
        found = [last["timings"][f"{tier}_tokens"] for tier in ("device", "dram", "disk")]
        assert found == [BLOCK_TOKENS, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK_TOKENS
    assert store.terminate() == 0, store.errors


@pytest.mark.slow
async def test_a_store_that_dies_holds_up_nobody_and_hears_of_the_queue_when_it_is_back(
    socket_folder: Path,
) -> None:
    """Jobs wait, the store dies under the hints, jobs go on; one that is back gets the hints of those that
    still wait."""
    shape = BlockShape(model=MODEL.fingerprint, layers=2, object_bytes=4096)
    (socket_folder / "secret").write_bytes(SECRET)
    stored = ids_of(prompt(3))[:6]
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    store.put_blocks(stored, shape=shape)
    store.wait_written()
    settings = {"max_running": 1, "policy": "bounded_fpf", "secret_file": str(socket_folder / "secret")}
    async with stack(socket_folder, Known(store), settings=settings) as served:
        served.says("yes")
        await served.show()
        served.script.delay_s = scaled(2.0)
        asked = [asyncio.create_task(ask(served, prompt(0)))]
        await eventually(lambda: served.calls > 0)
        for number in (1, 2):
            asked.append(asyncio.create_task(ask(served, [*prompt(3), number])))
            await waiting(served, number)
        store.kill()
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=scaled(40))
        assert len(done) == 1
        again = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
        assert await asyncio.to_thread(wait_until, lambda: in_dram(again, stored))
        served.script.delay_s = 0.0
        await asyncio.gather(*asked)
        assert (await served.get("/v1/status"))[1]["queue"] == {"running": 0, "waiting": 0}
    assert again.terminate() == 0, again.errors


async def test_what_is_computed_of_a_document_stays_while_others_come_and_go(socket_folder: Path) -> None:
    shape = BlockShape(model=MODEL.fingerprint, layers=2, object_bytes=4096)
    secret = socket_folder / "secret"
    secret.write_bytes(SECRET)
    room = {"dram_bytes": 1 << 20, "disk_bytes": 2 << 20}  # for 128 and 256 blocks
    store = KvstoreProcess(socket_folder, socket_folder / "store", **room).wait_ready()

    def keep(ids: list[bytes]) -> None:
        store.put_blocks(ids, shape=shape)
        store.wait_written()

    async with stack(socket_folder, Known(store), settings={"secret_file": str(secret)}) as served:
        served.says("yes and no")
        await served.show()
        parts = served.engines[0].prefill.requests
        served.script.delay_s = 0.2
        text = " ".join(f"Friend number {at} likes blue." for at in range(120))
        await served.post("/v1/sessions/document/prefill", {"content": text})
        await eventually(lambda: len(parts) == 1)
        served.script.delay_s = 60.0  # of its second part
        await eventually(lambda: len(parts) == 2)
        computed, alike = ids_of(unpacked(parts[0].job.tokens)), block_ids(64)
        assert len(computed) == len(alike)
        await asyncio.to_thread(keep, computed)
        await asyncio.to_thread(keep, alike)
        for name in range(3, 11):  # twice what there is room for
            await asyncio.to_thread(keep, ids_of(prompt(name, 64)))
        assert len(peek(store, computed, MODEL.fingerprint)) == len(computed)
        assert not peek(store, alike, MODEL.fingerprint)
    assert store.terminate() == 0, store.errors
