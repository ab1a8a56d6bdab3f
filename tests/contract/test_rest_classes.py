"""Classes of service at the HTTP surface: by scripted engines, so that a request can be made to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from kvcommons.rpc.process import Process
from kvcommons.telemetry.telemetry import Telemetry
from services.router.__main__ import serve
from services.router.admission.classes import ClassObjectives
from services.router.config import RouterConfig
from tests.contract.rest_engine import Engine, Script, ScriptedLedger
from tests.contract.rest_stack import MODEL, MODEL_FOLDER, KvStore, Stack, stack
from tests.machine import scaled
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi there"}]
CLASSES = {
    "priority": ClassObjectives(ttft_s=60.0, tbt_s=0.05, unmet="refuse"),
    "strict": ClassObjectives(ttft_s=0.5, unmet="refuse"),
    "quick": ClassObjectives(ttft_s=0.5, tbt_s=0.05),
    "flex": ClassObjectives(tbt_s=2.0),
    "internal": ClassObjectives(),
}
ENTITLED = {"local": ("default", "priority", "strict", "quick", "flex")}


@pytest.fixture
async def narrow(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    """One request at a time, of four classes."""
    settings = {"max_running": 1, "service_classes": CLASSES, "entitlements": ENTITLED}
    async with stack(socket_folder, rest_store, settings=settings) as it:
        await it.show()
        yield it


async def busy(served: Stack) -> asyncio.Task[Any]:
    """A request that runs, and goes on doing so; those after it wait, by what is known at first for a
    second."""
    served.says("word " * 500)
    served.script.delay_s = 0.05
    task = asyncio.create_task(served.post(CHAT, {"messages": HI}))
    await eventually(lambda: served.calls > 0)
    return task


async def test_the_class_is_used_and_echoed(narrow: Stack) -> None:
    narrow.says("hello")
    create = narrow.client.chat.completions.create
    for asked, used, tbt_ms in [
        ("priority", "priority", 50),
        ("flex", "flex", 2000),
        ("auto", "default", 0),
        ("default", "default", 0),
        ("scale", "default", 0),
    ]:
        tier: Any = asked
        whole = await create(model="demo", messages=HI, service_tier=tier)
        assert whole.service_tier == used
        stream = await create(model="demo", messages=HI, service_tier=tier, stream=True)
        assert {chunk.service_tier async for chunk in stream} == {used}
        jobs = [*narrow.engines[0].decode.jobs[-2:], *narrow.engines[0].prefill.jobs[-2:]]
        assert {job.tbt_objective_ms for job in jobs} == {tbt_ms}
    unasked = await create(model="demo", messages=HI)
    assert unasked.service_tier == "default"
    completion = await narrow.client.completions.create(
        model="demo", prompt="hi", extra_body={"service_tier": "flex"}
    )
    assert completion.model_extra is not None
    assert completion.model_extra["service_tier"] == "flex"


async def test_a_class_that_is_not_there_or_not_the_tenants(narrow: Stack) -> None:
    create: Any = narrow.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="did you mean 'priority'") as unknown:
        await create(model="demo", messages=HI, service_tier="prioritty")
    assert unknown.value.param == "service_tier"
    with pytest.raises(openai.PermissionDeniedError, match="'internal'") as denied:
        await create(model="demo", messages=HI, service_tier="internal")
    assert denied.value.param == "service_tier"
    for wrong in (3, "", "x" * 65, ["flex"]):
        status, body = await narrow.post(CHAT, {"messages": HI, "service_tier": wrong})
        assert (status, body["error"]["param"]) == (400, "service_tier")
    assert narrow.engines[0].decode.jobs == []


async def test_what_cannot_be_met_is_refused_at_once_or_served_as_default(narrow: Stack) -> None:
    running = await busy(narrow)
    create: Any = narrow.client.chat.completions.create
    with pytest.raises(openai.RateLimitError, match="'strict' promises the first token within") as refused:
        await create(model="demo", messages=HI, service_tier="strict")
    assert refused.value.param == "service_tier"
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    waiting = asyncio.create_task(create(model="demo", messages=HI, service_tier="quick"))
    await eventually(lambda: _waiting(narrow))
    narrow.says("hello")
    narrow.script.delay_s = 0.0
    assert (await waiting).service_tier == "default"
    assert (await running)[0] == 200
    counted = await _counted(narrow)
    assert counted["strict", "refused"] == counted["quick", "best_effort"] == 1
    assert counted["default", "met"] == 2


async def test_a_session_whose_turn_was_refused_is_free_for_the_next(narrow: Stack) -> None:
    running = await busy(narrow)
    body = {"messages": HI, "session_id": "refused"}
    assert (await narrow.post(CHAT, body | {"service_tier": "strict"}))[0] == 429
    narrow.says("hello")
    narrow.script.delay_s = 0.0
    assert (await running)[0] == 200

    async def free() -> bool:  # the lease is given back in the background
        return (await narrow.post(CHAT, body))[0] == 200

    await eventually(free)


SECOND_A_ROW = {"few_rows": 1.0, "more_rows": 1.0, "pairs": 1e-9}  # as instances say of themselves


async def test_what_prompts_take_by_their_instances_decides_too(
    socket_folder: Path, rest_store: KvStore
) -> None:
    """At a second a token, some tens of tokens are promised, and no hundreds; what is stored takes none."""
    classes = {
        "strict": ClassObjectives(ttft_s=60.0, unmet="refuse"),
        "quick": ClassObjectives(ttft_s=60.0),
        "fluent": ClassObjectives(tbt_s=0.9, unmet="refuse"),
    }
    async with stack(socket_folder, rest_store, settings={"service_classes": classes}) as served:
        served.engines[0].costs = SECOND_A_ROW
        await served.show()
        served.says("hello")
        long = [{"role": "user", "content": "one two three four five six " * 20}]
        body: dict[str, Any] = {"messages": long, "session_id": "costly"}
        status, refused = await served.post(CHAT, body | {"service_tier": "strict"})
        assert status == 429
        assert "first token within 60 s" in refused["error"]["message"]

        async def as_quick() -> bool:  # once the lease of the turn that was refused is given back
            status, answer = await served.post(CHAT, body | {"service_tier": "quick"})
            return status == 200 and answer["service_tier"] == "default"

        await eventually(as_quick)
        again = {"messages": HI, "session_id": "costly", "service_tier": "strict"}
        assert (await served.post(CHAT, again | {"reuse": False}))[0] == 429

        async def as_strict() -> bool:
            status, answer = await served.post(CHAT, again)
            return status == 200 and answer["service_tier"] == "strict"

        await eventually(as_strict)
        status, refused = await served.post(CHAT, {"messages": HI, "service_tier": "fluent"})
        assert status == 429
        assert "a token every 0.9 s, and one takes 1 s here" in refused["error"]["message"]


async def test_a_class_that_nobody_can_keep_ends_the_start(socket_folder: Path) -> None:
    ledger, engine = ScriptedLedger(socket_folder), Engine(socket_folder, "engine", Script(), MODEL)
    engine.costs = SECOND_A_ROW
    await engine.start()
    await ledger.start()
    await ledger.show(engine.instances())
    config = router(socket_folder, service_classes={"fluent": ClassObjectives(tbt_s=0.9)})
    try:
        async with asyncio.timeout(scaled(20)):
            with pytest.raises(InvalidInput, match="'fluent' promises a token every") as refused:
                await serve(config, process())
        assert refused.value.param == "service_classes"
    finally:
        await ledger.stop()
        await engine.stop()


async def test_entitlements_of_a_tenant_without_a_key_end_the_start(socket_folder: Path) -> None:
    with pytest.raises(InvalidInput, match="'ann', which has no key"):
        await serve(router(socket_folder, entitlements={"ann": ("default",)}), process())


def router(folder: Path, **settings: Any) -> RouterConfig:
    return RouterConfig(
        node=Node(listen=f"unix:{folder}/router.sock"),
        ledger=(f"unix:{folder}/ledger.sock",),
        model=str(MODEL_FOLDER),
        **settings,
    )


def process() -> Process:
    return Process(
        service="router",
        instance_id="router-0",
        host="here",
        stop=asyncio.Event(),
        telemetry=Telemetry.off("router"),
    )


async def _waiting(served: Stack) -> bool:
    return bool((await served.get("/v1/status"))[1]["queue"]["waiting"] == 1)


async def _counted(served: Stack) -> dict[tuple[str, str], float]:
    async with served.http.get("/metrics") as response:
        text = await response.text()
    found = {}
    for line in text.splitlines():
        if line.startswith("kvcommons_service_class_requests_total{"):
            labels, _, value = line.rpartition(" ")
            _, outcome, _, name, _ = labels.split('"')
            found[name, outcome] = float(value)
    return found
