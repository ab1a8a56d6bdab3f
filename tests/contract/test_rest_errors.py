"""Every refusal has the right status, and OpenAI's shape with all four keys."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from kvcommons.model.tokenizer import Tokenizer
from services.router.config import RouterConfig
from tests.contract.rest_stack import MODEL_FOLDER, KvStore, Stack, stack
from tests.machine import scaled
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def refusal(served: Stack, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
    async with served.http.request(method, path, **options) as response:
        assert response.headers["X-Request-Id"]
        assert response.content_type == "application/json"
        body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return response.status, body["error"]


BAD_BODIES: list[tuple[bytes, str | None, str]] = [
    (b"", None, "empty"),
    (b"\xff\xfe", None, "UTF-8"),
    (b"{", None, "not JSON"),
    (b"[]", None, "a list"),
    (b"[" * 5_000, None, "nested"),
    (b"{}", "messages", "missing"),
    (b'{"messages": []}', "messages", "at least 1"),
    (b'{"messages": "hi"}', "messages", "list"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "string"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content", "missing"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "surrogate"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD_BODIES, ids=[says for _, _, says in BAD_BODIES])
async def test_bad_bodies(served: Stack, body: bytes, param: str | None, says: str) -> None:
    status, error = await refusal(served, "POST", CHAT, data=body, headers=JSON)
    assert (status, error["param"]) == (400, param)
    assert says in error["message"]


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temprature": 1}, "temprature", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
    ({"n": 99}, "n", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "grammar"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"structured_outputs": {"json": {"$ref": "http://a/b"}}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "invalid_value",
    ),
    ({"response_format": {"type": "json_object"}, "stop": "x"}, "stop", "invalid_value"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "invalid_value"),
    ({"truncation": "auto"}, "truncation", "invalid_value"),  # of a session only
    ({"truncation": "oldest"}, "truncation", "invalid_value"),
    ({"store_partial": True}, "store_partial", "unsupported_parameter"),
]


@pytest.mark.parametrize(("field", "param", "code"), BAD_FIELDS)
async def test_bad_fields(served: Stack, field: dict[str, Any], param: str, code: str) -> None:
    status, error = await refusal(served, "POST", CHAT, json=HI | field)
    assert (status, error["param"], error["code"]) == (400, param, code)


async def test_headers_that_are_not_built_say_so(served: Stack) -> None:
    for path in ("/v1/sessions", "/tokenize", "/v1/responses/input_tokens"):
        status, error = await refusal(served, "POST", path, json={}, headers={"Idempotency-Key": "k"})
        assert (status, error["param"]) == (400, "Idempotency-Key")
    status, error = await refusal(
        served, "POST", "/v1/completions", json={"prompt": "a"}, headers={"X-Session-ID": "s"}
    )
    assert (status, error["param"]) == (400, "session_id")


async def test_paths_methods_and_sizes(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await refusal(served, "GET", "/v2/chat"))[0] == 404
    status, error = await refusal(served, "PUT", CHAT)
    assert (status, error["code"]) == (405, "method_not_allowed")
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    status, error = await refusal(served, "POST", CHAT, data=io.BytesIO(big))
    assert (status, error["code"]) == (413, "request_too_large")
    status, error = await refusal(
        served, "POST", CHAT, json={"messages": [{"role": "user", "content": "word " * 9000}]}
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")
    long = json.dumps({"prompt": "all the words of a book, said again and again; " * 80_000}).encode()
    tokenized: list[int] = []  # characters
    encode_text = Tokenizer.encode_text

    def counted(self: Tokenizer, text: str) -> list[int]:
        tokenized.append(len(text))
        return encode_text(self, text)

    monkeypatch.setattr(Tokenizer, "encode_text", counted)
    status, error = await refusal(served, "POST", "/v1/completions", data=io.BytesIO(long), headers=JSON)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert 0 < sum(tokenized) < len(long) / 10, "megabytes are not tokenized to find that out"
    assert served.engines[0].decode.jobs == []


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
MALFORMED: dict[str, tuple[bytes, int, str]] = {
    "nonsense": (b"hello\r\n\r\n", 400, "no HTTP/1.1 request"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "HTTPS"),
    "version": (b"GET /health HTTP/9.9\r\n\r\n", 400, "no HTTP/1.1 request"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
    "header": (POST + b"Authorization Bearer key-of-ann-1\r\n\r\n", 400, "header"),
    "header's value": (POST + b"Authorization: key-of-ann-1\x00\r\n\r\n", 400, "header"),
    "large header": (POST + b"A: " + b"x" * 70_000 + b"\r\n\r\n", 431, "65536 bytes"),
    "large path": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "65536 bytes"),
    "many headers": (POST + b"A: 1\r\n" * 3000 + b"\r\n", 400, "headers"),
    "length": (POST + b"Content-Length: nine\r\n\r\n", 400, "Content-Length"),
    "chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400, "chunk"),
    "expectation": (POST + b"Expect: miracles\r\nContent-Length: 0\r\n\r\n", 417, "100-continue"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_request_gets_an_error_in_the_same_shape(
    served: Stack, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, status, says = MALFORMED[name]
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(scaled(10)):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end: it closes the connection
    writer.close()
    assert int(head.split()[1]) == status
    assert b"application/json" in head
    assert b"X-Request-Id: req-" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert says in error["message"]
    assert b"key-of-ann" not in body
    assert "key-of-ann" not in caplog.text
    assert (await served.get("/health"))[0] == 200


async def test_a_sessions_full_window(served: Stack) -> None:
    served.says("word " * 1900)
    status, _ = await served.post(CHAT, HI | {"session_id": "long"})
    assert status == 200
    status, error = await refusal(
        served,
        "POST",
        CHAT,
        json={"messages": [{"role": "user", "content": "more " * 300}], "session_id": "long"},
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "session" in error["message"]


async def test_request_ids(served: Stack) -> None:
    async with served.http.get("/health", headers={"X-Request-Id": "abc-1"}) as response:
        assert response.headers["X-Request-Id"] == "abc-1"
    async with served.http.get("/health", headers={"X-Request-Id": "a b;c"}) as response:
        assert response.headers["X-Request-Id"].startswith("req-")
    served.says("hi")
    options: dict[str, Any] = {"json": HI | {"stream": True}, "headers": {"X-Request-Id": "abc-2"}}
    async with served.http.post(CHAT, **options) as response:
        assert response.headers["X-Request-Id"] == "abc-2"


async def test_loading_and_degraded(socket_folder: Path, rest_store: KvStore) -> None:
    async with stack(socket_folder, rest_store) as served:
        status, health = await served.get("/health")
        assert (status, health["status"]) == (503, "loading")
        status, error = await refusal(served, "POST", CHAT, json=HI)
        assert (status, error["code"]) == (503, "loading")
        await served.show(store=False)
        status, health = await served.get("/health")
        assert (status, health["status"]) == (503, "degraded")
        served.says("hi")
        assert (await served.post(CHAT, HI))[0] == 200
        status, error = await refusal(served, "POST", "/v1/sessions", json={})
        assert (status, error["code"]) == (503, "store_unavailable")
        await served.show()
        status, health = await served.get("/health")
        assert (status, health["status"]) == (200, "ok")


async def test_a_full_queue_is_a_429(socket_folder: Path, rest_store: KvStore) -> None:
    async with stack(socket_folder, rest_store, settings={"max_running": 1, "max_queue": 1}) as served:
        await served.show()
        served.says("word " * 30)
        served.script.delay_s = 0.02
        first, second = (asyncio.create_task(served.post(CHAT, HI)) for _ in range(2))

        async def full() -> bool:
            queue = (await served.get("/v1/status"))[1]["queue"]
            return bool(queue == {"running": 1, "waiting": 1})

        await eventually(full)
        async with served.http.post(CHAT, json=HI) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        assert [(await first)[0], (await second)[0]] == [200, 200]


async def test_keys_and_tenants(socket_folder: Path, rest_store: KvStore, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# tenants\nann key-of-ann-1 operator\nbob key-of-bob-1\n")
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    settings = {"api_keys": str(tmp_path / "keys"), "secret_file": str(tmp_path / "secret")}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        ann = {"Authorization": "Bearer key-of-ann-1"}
        bob = {"Authorization": "Bearer key-of-bob-1"}
        await served.show(headers=ann)
        served.says("hello")
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/v1/status"):
            status, error = await refusal(served, "GET", path)
            assert (status, error["code"]) == (401, "invalid_api_key")
        status, error = await refusal(
            served, "POST", CHAT, json=HI, headers={"Authorization": "Bearer wrong-key-1"}
        )
        assert (status, error["type"]) == (401, "authentication_error")
        # As Anthropic's clients send it; where both are sent, Authorization counts.
        wrong, right = {"x-api-key": "wrong-key-1"}, {"x-api-key": "key-of-ann-1"}
        for headers, expected in ((right, 200), (wrong, 401), (wrong | ann, 200)):
            assert (await served.get("/v1/models", headers=headers))[0] == expected
        status, error = await refusal(
            served, "GET", "/v1/models", headers=right | {"Authorization": "Bearer wrong-key-1"}
        )
        assert (status, error["code"]) == (401, "invalid_api_key")
        async with served.http.post("/v1/messages", json=HI | {"max_tokens": 9}, headers=wrong) as response:
            body = await response.json()
        assert (response.status, body["error"]["type"]) == (401, "authentication_error")
        assert (await served.get("/health"))[0] == 200
        body = HI | {"session_id": "mine"}
        assert (await served.post(CHAT, body, headers=ann))[0] == 200
        assert (await served.get("/v1/sessions/mine", headers=ann))[0] == 200
        status, error = await refusal(served, "GET", "/v1/sessions/mine", headers=bob)
        assert (status, error["code"]) == (404, "session_not_found")
        assert (await served.post(CHAT, body, headers=bob))[0] == 200
        salts = {request.salt for request in served.engines[0].decode.jobs}
        assert len(salts) == 2


def test_settings_that_cannot_be_served() -> None:
    common: dict[str, Any] = {
        "node": Node(listen="unix:/tmp/r.sock"),
        "ledger": ("unix:/tmp/l.sock",),
        "model": str(MODEL_FOLDER),
    }
    with pytest.raises(InvalidInput, match="loopback"):
        RouterConfig(**common, bind="0.0.0.0")
    with pytest.raises(InvalidInput, match="secret_file"):
        RouterConfig(**common, bind="0.0.0.0", api_keys="keys")
    with pytest.raises(InvalidInput, match="request_deadline_s"):
        RouterConfig(**common, request_deadline_s=float("nan"))
    assert RouterConfig(**common, bind="0.0.0.0", api_keys="keys", secret_file="secret").port == 8000


async def test_metrics_count_what_was_served(served: Stack) -> None:
    served.says("hello")
    served.script.cached_tokens = 3
    await served.post(CHAT, HI)
    async with served.http.get("/metrics") as response:
        text = await response.text()
    assert 'kvcommons_request_success_total{finished_reason="stop",model_name="demo"} 1.0' in text
    assert 'kvcommons_prefix_cache_hits_total{model_name="demo"} 3.0' in text
    assert "kvcommons_time_to_first_token_seconds_count" in text
    assert 'kvcommons_num_requests_running{model_name="demo"} 0.0' in text
    assert 'kvcommons_num_requests_waiting{model_name="demo"} 0.0' in text


async def test_openapi_describes_every_path(served: Stack) -> None:
    _, document = await served.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        at: Any = document
        for step in reference.removeprefix("#/").split("/"):
            at = at[step]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"], (method, path)
            status, _ = await _status(served.http, method, path.replace("{id}", "nobody"))
            assert str(status) in operation["responses"], (method, path, status)
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "session_id", "top_k", "min_p", "ignore_eos", "seed", "reuse"} <= set(fields)


async def _status(http: aiohttp.ClientSession, method: str, path: str) -> tuple[int, bytes]:
    data = b"not json" if method == "post" else None
    async with http.request(method, path, data=data, headers=JSON) as response:
        return response.status, await response.read()
