"""What a page in a browser may do to a server without keys on the same machine: nothing, unless it is said.

Each request is as a browser sends it, from its own documentation of Origin, Host and Fetch Metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from services.router.config import RouterConfig
from tests.contract.rest_stack import MODEL_FOLDER, KvStore, Stack, stack

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
EVIL = "https://evil.example"
HI = json.dumps({"messages": [{"role": "user", "content": "hi"}], "session_id": "stolen"}).encode()
JSON = "application/json"
CROSS = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}

# What a page elsewhere sends, with no question asked first: method, path, headers, body.
ATTACKS: dict[str, tuple[str, str, dict[str, str], bytes | None]] = {
    "fetch without cors": ("POST", CHAT, {**CROSS, "Content-Type": "text/plain"}, HI),
    "a form": ("POST", CHAT, {**CROSS, "Content-Type": "text/plain"}, HI + b"="),
    "an old browser": ("POST", CHAT, {"Origin": EVIL, "Content-Type": "text/plain"}, HI),
    "a sandboxed frame": ("POST", CHAT, {"Origin": "null", "Content-Type": "text/plain"}, HI),
    "no body": ("POST", "/v1/sessions", CROSS, None),
    "another port": ("POST", "/v1/sessions", {"Origin": "http://127.0.0.1:3000"}, None),
    "an image": ("GET", "/v1/sessions", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, None),
    "a frame": ("GET", "/v1/sessions", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}, None),
    "a form that navigates": ("POST", "/v1/sessions", {**CROSS, "Sec-Fetch-Dest": "document"}, None),
    "a rebound name": ("GET", "/v1/sessions", {"Host": "evil.example:8000"}, None),
    "a rebound page": (
        "POST",
        CHAT,
        {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": JSON},
        HI,
    ),
    "a name that begins well": ("GET", "/v1/sessions", {"Host": "127.0.0.1.evil.example"}, None),
    "an address elsewhere": ("GET", "/v1/sessions", {"Host": "192.0.2.1"}, None),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_page_of_another_site_is_refused(served: Stack, attack: str) -> None:
    method, path, headers, body = ATTACKS[attack]
    async with served.http.request(method, path, headers=headers, data=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (403, "permission_denied")
        assert error["param"] in ("Host", "Origin")
        assert "Access-Control-Allow-Origin" not in response.headers
    assert (await served.get("/v1/sessions?limit=100"))[1]["data"] == []
    assert served.engines[0].decode.jobs == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
async def test_a_body_has_to_be_called_json(served: Stack, kind: str | None) -> None:
    """Whoever sends it: a header that is left out is a mistake that is named."""
    headers = {} if kind is None else {"Content-Type": kind}
    async with served.http.post(CHAT, data=HI, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "Content-Type")
    assert "application/json" in error["message"]
    assert served.engines[0].decode.jobs == []


OWN: list[dict[str, str]] = [
    {},  # no browser
    {"Host": "localhost:8000"},  # a port that a container publishes
    {"Host": "LOCALHOST."},
    {"Host": "[::1]:8000"},
    {"Host": "127.1.2.3"},
    {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]


@pytest.mark.parametrize("headers", OWN)
async def test_what_is_no_page_of_another_site_is_served(served: Stack, headers: dict[str, str]) -> None:
    served.says("hello")
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    given = {"Content-Type": f"{JSON}; charset=utf-8", **headers}
    async with served.http.post(CHAT, data=body, headers=given) as response:
        assert response.status == 200
    async with served.http.post("/v1/sessions", headers=headers) as response:  # an empty body has no type
        assert response.status == 201
        created = (await response.json())["id"]
    async with served.http.delete(f"/v1/sessions/{created}", headers=headers) as response:
        assert response.status == 200


async def test_a_link_from_elsewhere_opens(served: Stack) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await served.get("/v1/models", headers=headers))[0] == 200


async def test_pages_and_names_that_are_said_are_served(socket_folder: Path, rest_store: KvStore) -> None:
    settings: dict[str, Any] = {"cors_origins": (EVIL,), "allowed_hosts": ("kv.example",)}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show()
        assert (await served.get("/v1/models", headers={**CROSS, "Host": "KV.example:443"}))[0] == 200
        assert (await served.get("/v1/models", headers={"Host": "other.example"}))[0] == 403
        assert (await served.get("/v1/models", headers={"Origin": "https://other.example"}))[0] == 403


async def test_with_keys_the_key_decides(socket_folder: Path, rest_store: KvStore) -> None:
    """A page has no key, and an address of the network is what clients are to call."""
    (socket_folder / "keys").write_text("ann key-of-ann-1\n")
    (socket_folder / "secret").write_bytes(b"s" * 32)
    settings = {"api_keys": str(socket_folder / "keys"), "secret_file": str(socket_folder / "secret")}
    ann = {"Authorization": "Bearer key-of-ann-1"}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        assert (await served.get("/version", headers={**CROSS, "Host": "192.0.2.1:8000", **ann}))[0] == 200
        assert (await served.get("/version", headers={**CROSS, "Host": "192.0.2.1:8000"}))[0] == 401


@pytest.mark.parametrize("host", ["https://kv.example", "kv.example:443", "a b", ""])
def test_a_name_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="allowed_hosts"):
        RouterConfig(
            node=Node(listen="unix:/tmp/r.sock"),
            ledger=("unix:/tmp/l.sock",),
            model=str(MODEL_FOLDER),
            allowed_hosts=(host,),
        )
