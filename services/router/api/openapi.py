"""/openapi.json: OpenAPI 3.1, made of the routes and the schemas that validate them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from services.router.api.routes import Route
from services.router.api.schemas import answers

_REASONS = {
    400: "Invalid: the error names the field.",
    401: "The API key is missing or not known.",
    403: "The key may not ask for that service_tier.",
    404: "No such model or session.",
    409: "Another turn of the session is under way, or the id is taken.",
    413: "The body is too large.",
    429: "Too many requests wait; Retry-After says when to come back.",
    500: "Unexpected.",
    503: "Loading, overloaded, or the session store is out of reach.",
}
_TEMPLATE = "#/components/schemas/{model}"


def describe(routes: Sequence[Route], *, version: str) -> dict[str, Any]:
    """The document, as JSON."""
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
        "security": [{"key": []}],
    }


def _schemas(routes: Sequence[Route]) -> dict[str, Any]:
    models: dict[type[BaseModel], JsonSchemaMode] = {answers.Error: "serialization"}
    for route in routes:
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
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "integer" if name == "limit" else "string"}}
        for name in route.query
    ]
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
        content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
        if route.stream is not None:
            content["text/event-stream"] = {"schema": _ref(route.stream)}
        responses[str(status)] = {"description": route.summary, "content": content}
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
            "content": {"application/json": {"schema": _ref(answers.Error)}},
        }
    return responses


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(model=model.__name__)}
