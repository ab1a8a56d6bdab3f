"""GET /v1/models"""

from __future__ import annotations

from aiohttp import web

from kvcommons.errors import ModelNotFound
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.api.shapes import Json
from services.router.http.middleware import SERVING


async def list_models(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    created_s = serving.started_s
    data = [model_body(model, created_s) for model in serving.fleet.models()]
    return web.json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    name = request.match_info["id"]
    for model in serving.fleet.models():
        if model.name == name:
            return web.json_response(model_body(model, serving.started_s))
    raise ModelNotFound(f"the model {name[:200]!r} is not served here; see GET /v1/models", param="model")


def model_body(model: ModelInfo, created_s: int) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvcommons",
        "max_model_len": model.context_window,
    }
