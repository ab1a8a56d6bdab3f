"""A tenant that takes more than it may is refused, in OpenAI's shape, and costs others nothing."""

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
from services.router.admission.quotas import Quota
from services.router.config import RouterConfig
from tests.contract.rest_stack import MODEL_FOLDER, KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi there"}]
ANN, BOB, CID, OPS = ({"Authorization": f"Bearer key-of-{name}-1"} for name in ("ann", "bob", "cid", "ops"))
QUOTAS = {
    "ann": Quota(requests_per_minute=3),
    "cid": Quota(sessions=2),
    "bob": Quota(tokens_per_minute=100, queue_share=0.5),
}


@pytest.fixture
async def keyed(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    """Ann has few requests, Bob few tokens and half of a short queue; one request runs at a time."""
    keys = "ann key-of-ann-1\nbob key-of-bob-1\ncid key-of-cid-1\nops key-of-ops-1 operator\n"
    (socket_folder / "keys").write_text(keys)
    (socket_folder / "secret").write_bytes(b"s" * 32)
    settings = {
        "api_keys": str(socket_folder / "keys"),
        "secret_file": str(socket_folder / "secret"),
        "quotas": QUOTAS,
        "max_running": 1,
        "max_queue": 4,
    }
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=OPS)
        yield served


async def ask(served: Stack, key: dict[str, str], **fields: Any) -> tuple[int, dict[str, Any]]:
    return await served.post(CHAT, {"messages": HI, **fields}, headers=key)


async def test_requests_a_minute(keyed: Stack) -> None:
    keyed.says("hello")
    assert [(await ask(keyed, ANN))[0] for _ in range(3)] == [200, 200, 200]
    async with keyed.http.post(CHAT, json={"messages": HI}, headers=ANN) as refused:
        error = (await refused.json())["error"]
        assert (refused.status, error["code"], error["type"]) == (429, "quota_exceeded", "rate_limit_error")
        assert 1 <= int(refused.headers["Retry-After"]) <= 20
    async with openai.AsyncOpenAI(
        base_url=f"{keyed.url}/v1", api_key="key-of-ann-1", max_retries=0
    ) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="demo", messages=HI)
    assert (await ask(keyed, BOB))[0] == 200
    _, usage = await keyed.get("/v1/usage", headers=ANN)
    assert (usage["tenant"], usage["requests"], usage["refused"]) == ("ann", 3, 2)
    assert usage["requests_per_minute"] == {"limit": 3, "remaining": 0}
    assert usage["completion_tokens"] > 0
    assert usage["tokens_per_minute"] is None


async def test_tokens_a_minute_count_what_was_computed(keyed: Stack) -> None:
    keyed.says("word " * 120)
    status, answer = await ask(keyed, BOB)
    assert status == 200, "a request may overdraw what is left"
    used = answer["usage"]
    _, usage = await keyed.get("/v1/usage", headers=BOB)
    assert usage["completion_tokens"] == used["completion_tokens"] > 100
    assert usage["tokens_per_minute"] == {"limit": 100, "remaining": 0}
    status, answer = await ask(keyed, BOB)
    assert (status, answer["error"]["code"]) == (429, "quota_exceeded")
    assert "tokens" in answer["error"]["message"]


async def test_a_share_of_the_queue(keyed: Stack) -> None:
    """Without the share, Bob's requests would fill the queue, and Ann's be refused."""
    keyed.says("word " * 60)
    keyed.script.delay_s = 0.02
    running = asyncio.create_task(ask(keyed, OPS))
    await eventually(lambda: keyed.calls > 0)
    mine = [asyncio.create_task(ask(keyed, BOB)) for _ in range(5)]
    await eventually(lambda: sum(task.done() for task in mine) == 3)
    keyed.script.delay_s = 0.0
    assert (await ask(keyed, ANN))[0] == 200, "there is room for others"
    assert (await running)[0] == 200
    codes = sorted(str(body.get("error", {}).get("code")) for _, body in await asyncio.gather(*mine))
    assert codes == ["None", "None", "quota_exceeded", "quota_exceeded", "quota_exceeded"]


async def test_a_quota_of_nobody_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann key-of-ann-1\n")
    (tmp_path / "secret").write_bytes(b"s" * 32)
    config = RouterConfig(
        node=Node(listen=f"unix:{tmp_path}/r.sock"),
        ledger=(f"unix:{tmp_path}/l.sock",),
        model=str(MODEL_FOLDER),
        api_keys=str(tmp_path / "keys"),
        secret_file=str(tmp_path / "secret"),
        quotas={"ana": Quota(), "*": Quota()},
    )
    process = Process(
        service="router",
        instance_id="r",
        host="here",
        stop=asyncio.Event(),
        telemetry=Telemetry.off("router"),
    )
    with pytest.raises(InvalidInput, match="quotas names the tenant 'ana'"):
        await serve(config, process)


async def test_a_number_of_sessions(keyed: Stack) -> None:
    """However they are made; those that are there go on, and one that goes makes room."""
    keyed.says("hello")
    assert (await ask(keyed, CID, session_id="first"))[0] == 200
    status, _ = await keyed.post("/v1/sessions", {"id": "second"}, headers=CID)
    assert status == 201
    for path, body in (
        ("/v1/sessions", {"id": "third"}),
        (CHAT, {"messages": HI, "session_id": "third"}),
        ("/v1/conversations", {}),
        ("/v1/sessions/first/fork", {"id": "third"}),
        ("/v1/sessions/first/fork", {"id": "third", "messages": 2}),
        ("/v1/sessions/first/fork", {"messages": 2}),
    ):
        status, answer = await keyed.post(path, body, headers=CID)
        assert (status, answer["error"]["code"]) == (429, "quota_exceeded"), (path, body)
        assert "2 sessions" in answer["error"]["message"]
    listed = await keyed.get("/v1/sessions", headers=CID)
    assert [one["id"] for one in listed[1]["data"]] == ["first", "second"]
    assert (await ask(keyed, CID, session_id="first"))[0] == 200  # they go on
    assert (await ask(keyed, CID, session_id="second"))[0] == 200
    assert (await ask(keyed, BOB, session_id="of bob"))[0] == 200  # and so do others
    async with keyed.http.delete("/v1/sessions/first", headers=CID) as deleted:
        assert deleted.status in (200, 204)
    assert (await ask(keyed, CID, session_id="third"))[0] == 200  # the refused turn left no lease
