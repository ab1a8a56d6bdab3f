"""/openapi.json: OpenAPI 3.1, made of the routes and the schemas that validate them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from services.router.api.query import LIMIT_DEFAULT, LIMIT_MAX
from services.router.api.routes import Route
from services.router.api.schemas.requests import SESSION_ID_SCHEMA
from services.router.turn.idempotency import HEADER, KEY_SCHEMA, REPLAYED_HEADER

_REASONS = {
    400: "Invalid: the error names the field.",
    401: "The API key is missing or not known.",
    403: "The key may not ask for that service_tier.",
    404: "No such model or session.",
    409: "Another turn of the session is under way, the id is taken, or the request of this Idempotency-Key "
    "has not ended.",
    413: "The body is too large.",
    422: "The Idempotency-Key came with another request before, or a grammar takes too long: simplify it.",
    429: "Too many requests wait; Retry-After says when to come back.",
    500: "Unexpected.",
    503: "Loading, overloaded, or the session store is out of reach.",
    504: "The request's deadline passed.",
    529: "Loading or overloaded; come back later.",
}
_RETRIED = (
    "A request that comes again under the same key, with the same body, is answered as the first one was; "
    f"the header {REPLAYED_HEADER} says so then."
)
_OK = 200
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TRUTH: dict[str, Any] = {"type": "string", "enum": ["true", "false"], "default": "false"}
_QUERIES: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX, "default": LIMIT_DEFAULT},
    "after": {"type": "string"},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "stream": _TRUTH,
}
_OF_SESSIONS = ("/v1/sessions/", "/v1/conversations/")  # with an id in their paths
_TEMPLATE = "#/components/schemas/{model}"


def describe(routes: Sequence[Route], *, version: str, keys: bool = True) -> dict[str, Any]:
    """The document, as JSON. `keys`: the server wants one."""
    schemas = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvcommons",
            "version": version,
            "description": "OpenAI's API, with sessions whose KV outlives the request and the process.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if keys else [],
    }


def _schemas(routes: Sequence[Route]) -> dict[str, Any]:
    models: dict[type[BaseModel], JsonSchemaMode] = {}
    for route in routes:
        models[route.error] = "serialization"
        if route.body is not None:
            models[route.body] = "validation"
        for answer in (*route.answers.values(), route.stream):
            if answer is not None:
                models[answer] = "serialization"
    _, document = models_json_schema(list(models.items()), ref_template=_TEMPLATE)
    definitions: dict[str, Any] = document["$defs"]
    return definitions


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": _responses(route),
    }
    of_session = route.path.startswith(_OF_SESSIONS)
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": SESSION_ID_SCHEMA if of_session and name == "id" else _TEXT,
        }
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": _QUERIES[name]} for name in route.query]
    parameters += [{"name": name, "in": "header", "schema": SESSION_ID_SCHEMA} for name in route.headers]
    if route.retried:
        parameters.append({"name": HEADER, "in": "header", "schema": KEY_SCHEMA, "description": _RETRIED})
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": any(field.is_required() for field in route.body.model_fields.values()),
            "content": {"application/json": {"schema": _ref(route.body)}},
        }
    if not route.errors:
        operation["security"] = []
    return operation


def _responses(route: Route) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, answer in route.answers.items():
        content = {"application/json": {"schema": _ref(answer)}}
        responses[str(status)] = {"description": route.summary, "content": content}
    if route.stream is not None:
        streamed = responses.setdefault(str(_OK), {"description": route.summary, "content": {}})
        streamed["content"]["text/event-stream"] = {"schema": _event(route)}
    if not route.answers:
        responses["200"] = {
            "description": route.summary,
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    for status in route.errors:
        assert status in _REASONS, (
            f"{route.path}: say in _REASONS of openapi.py what its error {status} means"
        )
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": _ref(route.error)}},
        }
    return responses


def _event(route: Route) -> dict[str, Any]:
    """Of a stream, as OpenAPI 3.2 describes one."""
    assert route.stream is not None
    text: dict[str, Any] = {"type": "string"}
    described = {"anyOf": [_ref(route.stream), _ref(route.error)]}
    data = text | {"contentMediaType": "application/json", "contentSchema": described}
    if route.done:
        data = {"anyOf": [text | {"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"event": text, "data": data}, "required": ["data"]}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(model=model.__name__)}
