"""The HTTP server: routes behind the middleware, bound to its address, drained when the router stops."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import resource
from typing import Any

from aiohttp import web

from kvcommons.errors import InvalidInput, Unavailable
from kvcommons.version import installed_version
from services.router.api.openapi import describe
from services.router.api.routes import routes
from services.router.config import RouterConfig
from services.router.http.connections import ConnectionTable
from services.router.http.cors import add_allowed_origin, cors_middleware
from services.router.http.middleware import (
    CALLER,
    OPEN_PATHS,
    SERVING,
    Handler,
    add_headers,
    request_middleware,
)
from services.router.http.protocol import Runner
from services.router.page.page import page_files, page_handlers
from services.router.serving import Serving

log = logging.getLogger(__name__)

# What the process opens besides clients' connections: channels, logs, libraries.
_OTHER_FILES = 256
# A flood fills the kernel's queue of connections before the event loop gets to it.
_BACKLOG = 1024


def application(serving: Serving) -> web.Application:
    app = web.Application(
        middlewares=[cors_middleware, request_middleware], client_max_size=serving.config.max_body_bytes
    )
    app[SERVING] = serving
    app.on_response_prepare.extend((add_headers, add_allowed_origin))
    table = routes()

    @functools.cache
    def document() -> bytes:
        keys = serving.config.api_keys is not None
        return json.dumps(describe(table, version=installed_version(), keys=keys)).encode()

    async def openapi(request: web.Request) -> web.Response:
        # Made once somebody asks: it would take longer than all else that a router does at its start.
        return web.Response(body=await asyncio.to_thread(document), content_type="application/json")

    app.router.add_get("/openapi.json", openapi)
    for route in table:
        # A session's id may have any character but a slash; aiohttp's own pattern excludes braces too.
        path = route.path.replace("{id}", "{id:[^/]+}")
        handler = _for_operators(route.handler) if route.operator else route.handler
        app.router.add_route(route.method, path, handler)
        if route.method == "GET":
            app.router.add_route("HEAD", path, _head(handler))
    page = page_handlers(page_files()) if serving.config.page else {}
    for path, shown in page.items():
        app.router.add_get(path, shown)  # and HEAD
    # Load balancers ask for health without a key, and it tells nothing but that; the page is where people
    # enter theirs.
    app[OPEN_PATHS] = frozenset({"/health", *page})
    return app


def _for_operators(handler: Handler) -> Handler:
    async def checked(request: web.Request) -> web.StreamResponse:
        request[CALLER].check_operator(request.path)
        return await handler(request)

    return checked


def _head(handler: Handler) -> Handler:
    """What GET would answer, without its body; never a stream, whose end nobody would wait for."""

    async def head(request: web.Request) -> web.StreamResponse:
        if "stream" in request.query:
            raise InvalidInput("HEAD has no stream: leave it out", param="stream")
        return await handler(request)

    return head


def connection_table(config: RouterConfig) -> ConnectionTable[Any]:
    """As many connections as the settings say, or as the process may have. Raises its limit of open files
    (each connection is one) as far as it may."""
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    connections_max = config.max_connections
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        connections_max = max(1, allowed - _OTHER_FILES)
        log.warning(
            "the limit of open files (%d) has room for %d connections, not for max_connections = %d",
            hard,
            connections_max,
            config.max_connections,
        )
    return ConnectionTable(
        connections_max=connections_max,
        per_address_max=min(connections_max, config.max_connections_per_address),
    )


class HttpServer:
    def __init__(self, serving: Serving) -> None:
        self._runner = Runner(application(serving), shutdown_timeout=serving.config.node.drain_s / 2)
        self._bind = serving.config.bind
        self._port = serving.config.port
        self._scheme = "http" if serving.certificate is None else "https"
        self.port = 0  # what was bound, once started

    async def start(self) -> None:
        """Raises Unavailable when the address cannot be bound."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._bind, self._port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise Unavailable(
                f"{self._bind}:{self._port} cannot be bound ({error.strerror}): is another router using it?"
            ) from error
        self.port = self._runner.addresses[0][1]
        log.info("serving", extra={"address": f"{self._scheme}://{self._bind}:{self.port}"})

    async def drain(self) -> None:
        """No new requests; those under way get half of the drain's time to end, then they are cancelled."""
        await self._runner.cleanup()
