"""GET /v1/models"""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from kvcommons.errors import ModelNotFound
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.api.shapes import Json
from services.router.http.middleware import SERVING, is_messages


async def list_models(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    created_s = serving.started_s
    if is_messages(request):
        data = [anthropic_model_body(model, created_s) for model in serving.fleet.models()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return web.json_response({"data": data, "has_more": False, "first_id": None, "last_id": None} | ends)
    data = [model_body(model, created_s) for model in serving.fleet.models()]
    return web.json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    name = request.match_info["id"]
    for model in serving.fleet.models():
        if model.name == name:
            body = anthropic_model_body if is_messages(request) else model_body
            return web.json_response(body(model, serving.started_s))
    raise ModelNotFound(f"the model {name[:200]!r} is not served here; see GET /v1/models", param="model")


def anthropic_model_body(model: ModelInfo, created_s: int) -> Json:
    """As Anthropic's clients read it."""
    created = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created,
        "max_input_tokens": model.context_window,
    }


def model_body(model: ModelInfo, created_s: int) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvcommons",
        "max_model_len": model.context_window,
    }
