"""gRPC servers: health, and one interceptor that every call passes.

    server = RpcServer(address, telemetry)
    server.add(add_BlocksServicer_to_server, BlocksServicer(...))
    await server.start()          # answers health: not ready
    server.set_ready(True)
    await stop.wait()
    await server.drain(grace_s=10)

Handlers raise classes of `kvcommons.errors`; callers that use `rpc.channel` get the same class. Anything else
that a handler raises is logged with its traceback and arrives as Internal, without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvcommons.errors import (
    METADATA_KEY,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    KVCommonsError,
    Unavailable,
    UntrustedPeer,
)
from kvcommons.rpc.callers import PROOF_KEY, CallerCheck, caller_check_of, server_credentials
from kvcommons.rpc.channel import MESSAGE_BYTES_MAX, REQUEST_ID_KEY, SESSION_ID_KEY, TRACEPARENT_KEY
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.tenants import SIGNATURE_KEY, TenantVerifier
from kvcommons.telemetry import logs
from kvcommons.telemetry.metrics import CallMetrics
from kvcommons.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

# Trailing metadata has a limit of its own (8 KiB by default), and an error need not be longer than a page.
MESSAGE_CHARS_MAX = 1_500
CALL_DEADLINE_S = 60.0
# The caller's deadline began when it sent the request, so it ends before the one here by what that took. A
# call that is cancelled after so much of its time has met its deadline.
DEADLINE_SHARE = 0.9

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # two processes on one port is a mistake
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # what the channels of `rpc.channel` send
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


class RpcServer:
    """One gRPC server on `address` ("unix:/path", or "host:port" where port 0 binds a free one)."""

    def __init__(
        self,
        address: str,
        telemetry: Telemetry,
        *,
        call_deadline_s: float = CALL_DEADLINE_S,
        credentials: Credentials = OPEN,
        tenants: TenantVerifier | None = None,
    ) -> None:
        """Whom it answers on a network is a matter of `credentials`; a socket's file lets in whom it lets
        in. `tenants`: who is believed for whom a call is made; None: everybody."""
        self.address = address  # what was bound, once started
        over_network = not address.startswith("unix:")
        self._certificate = credentials.certificate if over_network else None
        callers = caller_check_of(credentials, telemetry.service) if over_network else None
        self._service = telemetry.service
        self._health = HealthServicer()
        self._ready = False
        self._server = grpc.aio.server(
            interceptors=[_Interceptor(telemetry, call_deadline_s, callers, tenants)], options=_OPTIONS
        )
        self.add(health_pb2_grpc.add_HealthServicer_to_server, self._health)

    def add(self, register: Callable[[Any, Any], None], servicer: object) -> None:
        """`register` is the generated `add_…Servicer_to_server`."""
        register(servicer, self._server)

    async def start(self) -> None:
        """Binds and answers. Raises Unavailable when the address cannot be bound."""
        try:
            if self._certificate is None:
                port = self._server.add_insecure_port(self.address)
            else:
                port = self._server.add_secure_port(self.address, server_credentials(self._certificate))
        except RuntimeError as error:
            raise Unavailable(
                f"{self.address} cannot be bound: is another process using it, and does its directory exist?"
            ) from error
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._publish()
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """What health answers, for the process ("") and for the service's name."""
        if ready != self._ready:
            self._ready = ready
            await self._publish()

    @property
    def ready(self) -> bool:
        return self._ready

    async def drain(self, grace_s: float) -> None:
        """No new calls; those under way get `grace_s` to end, then they are cancelled."""
        await self._health.enter_graceful_shutdown()
        self._ready = False
        await self._server.stop(grace_s)
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    async def _publish(self) -> None:
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if self._ready else answer.NOT_SERVING
        for name in ("", self._service):
            await self._health.set(name, status)


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(
        self,
        telemetry: Telemetry,
        call_deadline_s: float,
        callers: CallerCheck | None = None,
        tenants: TenantVerifier | None = None,
    ) -> None:
        self._tenants = tenants
        self._tracer = telemetry.tracer
        self._metrics = CallMetrics(telemetry.registry)
        self._call_deadline_s = call_deadline_s
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers UNIMPLEMENTED
            return None
        assert not handler.request_streaming, "no contract of ours streams requests"
        method = handler_call_details.method
        # Requests come as bytes and are read within the call: what gRPC cannot read it answers with UNKNOWN.
        read = partial(_read, handler.request_deserializer, method)
        codec = (None, handler.response_serializer)
        if not handler.response_streaming:

            async def unary(request: bytes, context: _Context) -> Any:
                async with self._call(method, read, request, context) as message:
                    return await handler.unary_unary(message, context)

            return grpc.unary_unary_rpc_method_handler(unary, *codec)

        # Not a generator: writing here keeps the handler's whole life inside of one deadline.
        async def stream(request: bytes, context: _Context) -> None:
            async with self._call(method, read, request, context) as message:
                replies = handler.unary_stream(message, context)
                if not hasattr(replies, "__aiter__"):
                    await replies  # a handler that writes by itself, as health's Watch does
                    return
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        await context.write(reply)

        return grpc.unary_stream_rpc_method_handler(stream, *codec)

    @contextlib.asynccontextmanager
    async def _call(
        self, method: str, read: Callable[[bytes], Any], request: bytes, context: _Context
    ) -> AsyncIterator[Any]:
        """Around one call, whose message it gives: its ids, its span, its deadline, what its failure becomes,
        what is counted."""
        started = time.monotonic()
        incoming = dict(context.invocation_metadata() or ())
        left_s = context.time_remaining()
        limit_s = self._call_deadline_s if left_s is None else left_s
        code = "cancelled"
        try:
            with logs.bound(**_ids(incoming)), self._span(method, _text(incoming.get(TRACEPARENT_KEY))):
                async with _bounded(method, limit_s):
                    yield self._admitted(method, read, request, context, incoming)
            code = "ok"
        except KVCommonsError as error:
            code = error.code
            await _abort(context, error)
        except asyncio.CancelledError:
            # gRPC cancels a handler when the caller is gone, and at the deadline too, whoever is faster.
            if time.monotonic() - started >= DEADLINE_SHARE * limit_s:
                code = DeadlineExceeded.code
            raise
        finally:
            self._metrics.ended(method, code, time.monotonic() - started)

    def _admitted(
        self,
        method: str,
        read: Callable[[bytes], Any],
        request: bytes,
        context: _Context,
        incoming: dict[str, str | bytes],
    ) -> Any:
        """The message of a caller that may make the call: nothing is read of others. Raises UntrustedPeer,
        InvalidInput."""
        try:
            if self._callers is not None:
                self._callers.admit(method, context, _binary(incoming.get(PROOF_KEY)))
            message = read(request)
            if self._tenants is not None:
                self._tenants.check(method, message, _binary(incoming.get(SIGNATURE_KEY)))
            return message
        except UntrustedPeer as error:
            log.warning("refused a call: %s", error.message, extra={"peer": context.peer()})
            raise

    def _span(self, method: str, parent: str) -> contextlib.AbstractContextManager[object]:
        """None for what belongs to no request: heartbeats and health would bury the traces of those that
        do."""
        if not parent:
            return contextlib.nullcontext()
        return self._tracer.span(
            method.removeprefix("/"),
            parent=parent,
            attributes={"rpc.system": "grpc", "rpc.method": method},
            kind="server",
        )


@contextlib.asynccontextmanager
async def _bounded(method: str, limit_s: float) -> AsyncIterator[None]:
    """Ends the body at its deadline; all that it may raise becomes a KVCommonsError."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except (
        KVCommonsError,
        grpc.aio.AbortError,
    ):  # AbortError: health answers for an unknown service by itself
        raise
    except TimeoutError as error:
        what = "its deadline passed" if limit.expired() else "something it waited for took too long"
        raise DeadlineExceeded(f"{method}: {what}") from error
    except Exception as error:
        log.exception("%s failed unexpectedly", method)
        raise Internal(f"{method} failed unexpectedly; the log of its service says why") from error


def _read(deserialize: Callable[[bytes], Any], method: str, request: bytes) -> Any:
    try:
        return deserialize(request)
    except DecodeError:
        raise InvalidInput(f"{method}: the request is no message of that method: run one version") from None


def _ids(incoming: dict[str, str | bytes]) -> dict[str, str]:
    return {
        "request_id": _text(incoming.get(REQUEST_ID_KEY)),
        "session_id": _text(incoming.get(SESSION_ID_KEY)),
    }


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _binary(value: str | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""


async def _abort(context: _Context, error: KVCommonsError) -> NoReturn:
    detail = error.to_detail()
    if len(detail.message) > MESSAGE_CHARS_MAX:
        detail.message = detail.message[:MESSAGE_CHARS_MAX] + "…"
    await context.abort(error.grpc_status, detail.message, ((METADATA_KEY, detail.SerializeToString()),))
    raise AssertionError("abort always raises")
