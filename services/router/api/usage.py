"""GET /v1/usage: what the tenant that asks has used, and what it may."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from services.router.http.middleware import SERVING, TENANT


async def usage(request: web.Request) -> web.Response:
    """Of this router, since it started."""
    serving, tenant = request.app[SERVING], request[TENANT].name
    used, requests_left, tokens_left = serving.quotas.usage(tenant, serving.clock())
    quota = serving.quotas.of(tenant)
    return web.json_response(
        {
            "object": "usage",
            "tenant": tenant,
            "since": serving.started_s,
            **asdict(used),
            "requests_per_minute": _rate(quota.requests_per_minute, requests_left),
            "tokens_per_minute": _rate(quota.tokens_per_minute, tokens_left),
        }
    )


def _rate(limit: int | None, left: int | None) -> dict[str, int] | None:
    return {"limit": limit, "remaining": left or 0} if limit is not None else None
