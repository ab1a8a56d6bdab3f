"""What a tenant's key may see: its own. What is of the whole stack needs an operator's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.router.api.routes import routes
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "session_id": "mine"}
ANN, BOB, OPS = ({"Authorization": f"Bearer key-of-{name}-1"} for name in ("ann", "bob", "ops"))
KEYS = "ann key-of-ann-1\nbob key-of-bob-1\nops key-of-ops-1 operator\n"


@pytest.fixture
def settings(socket_folder: Path) -> dict[str, str]:
    """Of a router with two tenants and an operator."""
    (socket_folder / "keys").write_text(KEYS)
    (socket_folder / "secret").write_bytes(b"s" * 32)
    return {"api_keys": str(socket_folder / "keys"), "secret_file": str(socket_folder / "secret")}


async def test_a_tenant_sees_its_own_and_an_operator_the_stack(
    socket_folder: Path, rest_store: KvStore, settings: dict[str, str]
) -> None:
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=OPS)
        served.says("hello")
        assert (await served.post(CHAT, HI, headers=ANN))[0] == 200
        for route in routes():
            path = route.path.replace("{id}", "mine")
            if route.method != "GET" or path.endswith("/prefill"):
                continue
            for method in ("GET", "HEAD"):
                for key in (ANN, BOB):
                    refused = await _status(served, method, path, key) == 403
                    assert refused is route.operator, (method, path)
                assert await _status(served, method, path, OPS) in (200, 404), (method, path)
        async with served.http.get("/v1/status", headers=ANN) as response:
            error = (await response.json())["error"]
        assert (error["code"], error["type"]) == ("permission_denied", "permission_error")
        assert "operator" in error["message"]
        for key, own in ((ANN, ["mine"]), (BOB, []), (OPS, [])):  # an operator is no other tenant
            sessions = (await served.get("/v1/sessions", headers=key))[1]["data"]
            assert [one["id"] for one in sessions] == own


async def _status(served: Stack, method: str, path: str, headers: dict[str, str]) -> int:
    async with served.http.request(method, path, headers=headers) as response:
        return response.status


async def test_a_key_that_is_taken_back_opens_nothing_and_stops_nothing(
    socket_folder: Path, rest_store: KvStore, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=OPS)
        served.says("word " * 200)
        served.script.delay_s = 0.01
        body = HI | {"stream": True, "session_id": "long"}
        async with served.http.post(CHAT, json=body, headers=BOB) as stream:
            assert stream.status == 200
            Path(settings["api_keys"]).write_text(
                KEYS.replace("bob key-of-bob-1", "bob new-key-of-bob-1") + "eve key-of-eve-1\n"
            )
            await eventually(lambda: _is(served, BOB, 401))
            text = await stream.text()
        assert text.endswith("data: [DONE]\n\n"), "a stream under way goes on"
        for key in ("new-key-of-bob-1", "key-of-eve-1"):
            assert await _status(served, "GET", "/v1/models", {"Authorization": f"Bearer {key}"}) == 200
        new = {"Authorization": "Bearer new-key-of-bob-1"}
        assert await _status(served, "GET", "/v1/sessions/long", new) == 200, "the tenant is who it was"
        Path(settings["api_keys"]).write_text("nonsense\n")  # an operator's mistake locks nobody out
        await eventually(lambda: "the keys stay as they were" in caplog.text)
        assert await _is(served, new, 200)


async def _is(served: Stack, headers: dict[str, str], status: int) -> bool:
    return await _status(served, "GET", "/v1/models", headers) == status
