"""Paths that OpenAI's API has and this server has not built: a clear answer instead of a 404."""

from __future__ import annotations

from aiohttp import web

from kvcommons.errors import UnsupportedParameter


async def unbuilt(request: web.Request) -> web.Response:
    path = request.path[:80]
    raise UnsupportedParameter(
        f"{path} is not built yet: use /v1/chat/completions with session_id, which keeps the conversation",
        param=path,
    )
