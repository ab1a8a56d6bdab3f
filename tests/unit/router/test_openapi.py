from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.router.api.body import AGENT_HEADERS, SESSION_HEADERS
from services.router.api.openapi import describe
from services.router.api.routes import routes
from services.router.api.schemas.requests import SESSION_ID_SCHEMA


def test_an_error_without_a_reason_says_where_the_reason_goes() -> None:
    """The router describes its routes when it starts: so does whoever adds one."""
    odd = replace(routes()[0], path="/v1/odd", errors=(418,))
    with pytest.raises(AssertionError, match=r"/v1/odd: say in _REASONS of openapi\.py .* 418"):
        describe([odd], version="1")


def document(*, keys: bool = True) -> dict[str, Any]:
    return describe(routes(), version="1", keys=keys)


def test_a_key_is_asked_for_where_the_server_wants_one() -> None:
    assert document()["security"] == [{"key": []}]
    assert document(keys=False)["security"] == []


def test_a_stream_is_described_as_events_of_a_200() -> None:
    paths = document()["paths"]
    streams = {
        path: operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
        for path, operations in paths.items()
        for operation in operations.values()
        if "text/event-stream" in operation["responses"].get("200", {}).get("content", {})
    }
    assert {"/v1/chat/completions", "/v1/sessions/{id}/prefill", "/v1/commons"} <= streams.keys()
    done, chunk = streams["/v1/chat/completions"]["properties"]["data"]["anyOf"]
    assert done["const"] == "[DONE]"
    described = [one["$ref"].rpartition("/")[2] for one in chunk["contentSchema"]["anyOf"]]
    assert described == ["ChatCompletionChunk", "Error"]
    assert "anyOf" not in streams["/v1/messages"]["properties"]["data"]
    assert "202" in paths["/v1/sessions/{id}/prefill"]["post"]["responses"]


def test_queries_ids_and_headers_have_the_bounds_that_are_checked() -> None:
    paths = document()["paths"]
    listed = {
        one["name"]: one["schema"] for one in paths["/v1/conversations/{id}/items"]["get"]["parameters"]
    }
    assert (listed["limit"]["minimum"], listed["limit"]["maximum"]) == (1, 100)
    assert listed["order"]["enum"] == ["asc", "desc"]
    assert listed["id"] == SESSION_ID_SCHEMA
    headers = {
        one["name"]: one["schema"]
        for one in paths["/v1/chat/completions"]["post"]["parameters"]
        if one["in"] == "header"
    }
    assert headers.keys() == {*SESSION_HEADERS, *AGENT_HEADERS, "Idempotency-Key"}
    assert headers.pop("Idempotency-Key")["maxLength"] == 255
    assert all(schema == SESSION_ID_SCHEMA for schema in headers.values())
    prompt = document()["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [kind.get("minLength") or kind.get("minItems") for kind in prompt] == [1, 1, 1, 1]
