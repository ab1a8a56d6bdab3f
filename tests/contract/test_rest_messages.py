"""Anthropic's Messages over REST."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from kvcommons.errors import Unprocessable
from services.router.api.routes import routes
from tests.contract.rest_stack import MODEL, Stack

pytest_plugins = ("tests.contract.rest_fixtures",)

PATH = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}


def ask(text: str = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL.name, "max_tokens": 20, "messages": messages, **fields}


async def test_an_answer_and_its_usage(served: Stack) -> None:
    (answer,) = served.says("hello, Ann")
    status, message = await served.post(
        f"{PATH}?beta=true", ask("I am Ann", system="be kind"), headers=VERSION
    )
    assert status == 200
    assert message["content"] == [{"type": "text", "text": "hello, Ann"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    prompt = served.engines[0].decode.jobs[0].tokens
    assert served.tokenizer.decode(prompt).index("be kind") < served.tokenizer.decode(prompt).index("Ann")
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert usage["output_tokens"] == len(answer)


async def test_what_ends_an_answer_is_told(served: Stack) -> None:
    served.says("one two three four")
    _, message = await served.post(PATH, ask(stop_sequences=["three", "x"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "three")
    assert message["content"] == [{"type": "text", "text": "one two "}]
    _, message = await served.post(PATH, ask(max_tokens=2))
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 2)


async def test_a_stream_is_the_whole_message(served: Stack) -> None:
    served.says("hello, Ann")
    served.script.delay_s, served.script.cached_tokens = 0.02, 5
    found = await served.stream(PATH, ask())
    kinds = [event["type"] for event in found if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    text = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
    assert text == "hello, Ann"
    _, whole = await served.post(PATH, ask())
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert found[-2]["usage"] == whole["usage"], "of the whole answer, not of its beginning"
    assert whole["usage"]["cache_read_input_tokens"] == 5


async def test_a_stream_that_breaks_ends_with_an_error(pair: Stack) -> None:
    pair.says("one two three four five")
    pair.script.fail_at = {3: Unprocessable("no token goes on")}
    found = await pair.stream(PATH, ask())
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "invalid_request_error"
    assert found[-1]["request_id"]


async def test_a_mask_that_takes_too_long_has_a_status_that_is_declared(served: Stack) -> None:
    """Before a stream begins, too."""
    served.says("one two")
    (route,) = (one for one in routes() if one.path == PATH)
    for fields in ({}, {"stream": True}):
        served.script.prefill_fails = [Unprocessable("the grammar takes too long: simplify it")]
        status, body = await served.post(PATH, ask(**fields))
        assert (status, body["error"]["type"]) == (422, "invalid_request_error")
        assert "simplify it" in body["error"]["message"]
        assert status in route.errors


async def test_tokens_are_counted_as_they_are_used(served: Stack) -> None:
    body = ask("I am Ann", system="be kind")
    _, counted = await served.post(
        f"{PATH}/count_tokens", {name: body[name] for name in ("model", "messages", "system")}
    )
    assert served.engines[0].decode.jobs == []
    served.says("hello")
    _, message = await served.post(PATH, body)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"model": "other"}, 404, "not_found_error", "other"),
    ({"max_tokens": 100_000}, 400, "invalid_request_error", "prompt is too long"),
    ({"mcp_servers": [{"name": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
]


@pytest.mark.parametrize(("fields", "status", "kind", "says"), REFUSED, ids=[says for *_, says in REFUSED])
async def test_errors_are_in_its_envelope(
    served: Stack, fields: dict[str, Any], status: int, kind: str, says: str
) -> None:
    """Also where a stream is asked for: none has begun."""
    for asked in (ask(**fields), ask(**fields, stream=True)):
        async with served.http.post(PATH, json=asked) as response:
            assert response.content_type == "application/json"
            body = await response.json()
            assert (response.status, body["type"], body["error"]["type"]) == (status, "error", kind)
            assert body["request_id"] == response.headers["request-id"] == response.headers["X-Request-Id"]
        assert says in body["error"]["message"]


async def test_clients_are_told_that_they_can_go_on_without_a_thread(served: Stack) -> None:
    """In the words by which the SDK's tool runner knows it."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        status, body = await served.post(PATH, ask(thread=thread))
        assert status == 400
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert body["error"]["details"] == details
        assert "whole conversation" in body["error"]["message"]
    served.says("hello")
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
    client = anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
    async with client:
        runner = client.beta.messages.tool_runner(**ask(), tools=[tool])
        message = await runner.until_done()
    assert message.content[0].text == "hello"


async def test_what_is_no_request_is_answered_in_the_envelope_too(served: Stack) -> None:
    json_type = {"Content-Type": "application/json"}
    for method, path, data, status in (
        ("POST", PATH, b"not json", 400),
        ("GET", PATH, None, 405),
        ("POST", f"{PATH}/batches", b"{}", 404),
    ):
        async with served.http.request(method, path, data=data, headers=json_type) as response:
            body = json.loads(await response.read())
            assert (response.status, body["type"]) == (status, "error"), body


async def test_models_are_listed_for_whoever_asks(served: Stack) -> None:
    async with served.http.get("/v1/models", headers=VERSION) as response:
        body = await response.json()
    (model,) = body["data"]
    assert (model["type"], model["id"], body["has_more"]) == ("model", MODEL.name, False)
    assert body["first_id"] == body["last_id"] == MODEL.name
    async with served.http.get(f"/v1/models/{MODEL.name}", headers=VERSION) as response:
        assert await response.json() == model
    _, plain = await served.get("/v1/models")
    assert plain["data"][0]["object"] == "model"
