"""What web tools ask besides the API: the version, HEAD, and leave for a page to call from a browser."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from services.router.api.routes import routes
from services.router.config import RouterConfig
from tests.contract.rest_stack import MODEL_FOLDER, WINDOW, KvStore, Stack, stack

pytest_plugins = ("tests.contract.rest_fixtures",)

PAGE = "https://chat.example.org"
OTHER = "https://elsewhere.example.org"
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
# Of answers, besides what a page may read anyhow.
OF_TRANSPORT = {
    "access-control-allow-origin", "access-control-expose-headers", "cache-control", "connection",
    "content-encoding", "content-length", "content-type", "date", "server", "transfer-encoding", "vary",
    "x-accel-buffering",
}  # fmt: skip
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_the_version_is_the_packages(served: Stack) -> None:
    assert await served.get("/version") == (200, {"version": version("kvcommons")})


async def test_head_is_get_without_a_body(served: Stack) -> None:
    for route in routes():
        if route.method != "GET":
            continue
        path = route.path.replace("{id}", "nobody")
        async with served.http.get(path) as got, served.http.head(path) as head:
            assert head.status == got.status, path
            assert head.content_type == got.content_type, path
            assert await head.read() == b""
    async with served.http.head("/v1/sessions/nobody/prefill?stream=true") as head:
        assert head.status == 400
    async with served.http.head(CHAT) as head:
        assert head.status == 405


async def test_tokens_are_those_of_the_prompt_and_come_back_as_text(served: Stack) -> None:
    text = "My cat is called Zuzu."
    expected = served.tokenizer.encode_prompt(text)
    status, body = await served.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert (status, body["tokens"], body["count"]) == (200, expected, len(expected))
    assert body["max_model_len"] == WINDOW
    assert "".join(body["token_strs"]).endswith("Zuzu.")
    bare = {"prompt": text, "add_special_tokens": False}
    assert (await served.post("/tokenize", bare))[1]["tokens"] == served.tokenizer.encode_text(text)
    assert await served.post("/detokenize", {"tokens": expected}) == (200, {"prompt": text})


async def test_messages_come_to_what_a_chat_says_it_had(served: Stack) -> None:
    served.says("hello")
    _, answered = await served.post(CHAT, HI)
    status, body = await served.post("/tokenize", {"messages": HI["messages"]})
    assert (status, body["count"]) == (200, answered["usage"]["prompt_tokens"])


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI["messages"]}, 400, "prompt"),
        ("/tokenize", {"messages": HI["messages"], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "word " * 20_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [5_000_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * (WINDOW + 1)}, 400, "tokens"),
    ],
)
async def test_what_has_no_tokens_is_refused(
    served: Stack, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    found, answer = await served.post(path, body)
    assert (found, answer["error"]["param"]) == (status, param)


async def test_only_pages_that_are_named_may_call(socket_folder: Path, rest_store: KvStore) -> None:
    keys = socket_folder / "keys"
    keys.write_text("ann key-of-ann-1 operator\n")
    (socket_folder / "secret").write_bytes(b"s" * 32)
    settings = {
        "cors_origins": (PAGE,), "api_keys": str(keys), "secret_file": str(socket_folder / "secret"),
        "unknown_fields": "ignore", "volatile_lines": "move",
    }  # fmt: skip
    ann = {"Authorization": "Bearer key-of-ann-1"}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=ann)
        served.says("hello")
        async with served.http.options(CHAT, headers={**PREFLIGHT, "Origin": PAGE}) as asked:
            assert asked.status == 204
            assert asked.headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in asked.headers["Access-Control-Allow-Methods"]
            assert "authorization" in asked.headers["Access-Control-Allow-Headers"]
        messages = [{"role": "system", "content": "Current time: 09:15:17"}, *HI["messages"]]
        sent = {**ann, "Origin": PAGE, "anthropic-version": "2023-06-01", "Idempotency-Key": "k"}
        readable: set[str] = set()
        for stream in (False, True, True):
            body = {"messages": messages, "stream": stream, "session_id": "web", "mirostat": 1}
            key = {"Idempotency-Key": f"key-{stream}"}
            async with served.http.post(CHAT, json=body, headers=sent | key) as answered:
                assert answered.status == 200
                assert answered.headers["Access-Control-Allow-Origin"] == PAGE
                await answered.read()
            exposed = {name.lower() for name in answered.headers["Access-Control-Expose-Headers"].split(", ")}
            readable |= {name.lower() for name in answered.headers} - OF_TRANSPORT
            assert readable <= exposed
        assert {"x-ignored-fields", "x-volatile-lines", "x-session-id", "idempotent-replayed"} <= readable
        assert {"x-request-id", "request-id", "server-timing"} <= readable
        assert "retry-after" in exposed
        async with served.http.post(CHAT, json=HI, headers={"Origin": PAGE}) as refused:
            assert refused.status == 401  # and the page can read why
            assert refused.headers["Access-Control-Allow-Origin"] == PAGE
        async with served.http.options(CHAT, headers={**PREFLIGHT, "Origin": OTHER}) as asked:
            assert asked.status == 401
            assert "Access-Control-Allow-Origin" not in asked.headers


async def test_no_page_may_call_unless_it_is_said(served: Stack) -> None:
    async with served.http.get("/health", headers={"Origin": PAGE}) as answered:
        assert "Access-Control-Allow-Origin" not in answered.headers


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "https://a b", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(InvalidInput, match="cors_origins"):
        RouterConfig(
            node=Node(listen="unix:/tmp/r.sock"),
            ledger=("unix:/tmp/l.sock",),
            model=str(MODEL_FOLDER),
            cors_origins=(origin,),
        )
