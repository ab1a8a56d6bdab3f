"""Channels to other services.

A call without a timeout is a programming error. What fails arrives as a class of `kvcommons.errors`, also in
the middle of a stream. Trace context, request id and session id travel along.

    channel = open_channel("unix:/run/kvcommons/kvstore.sock")
    reply = await BlocksStub(channel).Match(request, timeout=0.5)
    await channel.close()

Streams are iterated (`async for`), never read with `.read()`; leave one early with `call.cancel()`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvcommons.errors import Unavailable, from_grpc
from kvcommons.rpc.callers import PROOF_KEY, channel_credentials
from kvcommons.rpc.renewed import RenewedChannel
from kvcommons.security.certificate import CertificateFiles
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.security.token import SharedToken
from kvcommons.telemetry import logs
from kvcommons.telemetry.trace import current_traceparent

# Token lists travel in requests, hundreds of thousands of them for a long context.
MESSAGE_BYTES_MAX = 64 << 20
TRACEPARENT_KEY = "traceparent"
REQUEST_ID_KEY = "kvcommons-request-id"
SESSION_ID_KEY = "kvcommons-session-id-bin"  # clients choose session ids: any text, so not a plain header

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A peer that restarts is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A peer that is paused, or whose machine is gone, is noticed though no packet says so.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A proxy in the environment is for the world outside.
    ("grpc.enable_http_proxy", 0),
)


# What a call carries besides: a key and its value, by its method and request; None: nothing.
Carried = Callable[[str, Any], tuple[str, bytes] | None]


def open_channel(
    address: str, role: Role = "ledger", credentials: Credentials = OPEN, *, carried: Sequence[Carried] = ()
) -> grpc.aio.Channel:
    """A channel to "unix:/path" or "host:port". It connects at its first call and reconnects by itself. Close
    it. Over the network it shows `credentials`, certificates as they are at each call, and where there are
    such, what answers there has to have the role."""
    carries = list(carried)
    over_network = not address.startswith("unix:")
    if over_network and credentials.token is not None:
        carries.append(_proof(credentials.token, role))
    interceptors: list[Any] = [_UnaryInterceptor(carries), _StreamInterceptor(carries)]
    if over_network and credentials.certificate is not None:

        def connect(files: CertificateFiles) -> grpc.aio.Channel:
            secured, options = channel_credentials(files, role)
            return grpc.aio.secure_channel(
                address, secured, options=(*_OPTIONS, *options), interceptors=interceptors
            )

        return RenewedChannel(credentials.certificate, connect)
    return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)


def _proof(token: SharedToken, role: Role) -> Carried:
    return lambda method, request: (PROOF_KEY, token.prove_call(method, role, time.time()))


def _outgoing(
    details: grpc.aio.ClientCallDetails, request: Any, carried: Sequence[Carried]
) -> grpc.aio.ClientCallDetails:
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    assert details.timeout is not None, f"{method} was called without a timeout"
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for key, value in (
        (TRACEPARENT_KEY, current_traceparent()),
        (REQUEST_ID_KEY, logs.request_id.get()),
        (SESSION_ID_KEY, logs.session_id.get().encode()),
    ):
        if value:
            metadata.add(key, value)
    for carry in carried:
        if (pair := carry(method, request)) is not None:
            metadata.add(*pair)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _UnaryInterceptor(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, carried: Sequence[Carried]) -> None:
        self._carried = carried

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        try:
            call = await continuation(_outgoing(client_call_details, request, self._carried), request)
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error


class _StreamInterceptor(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, carried: Sequence[Carried]) -> None:
        self._carried = carried

    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        try:
            call = await continuation(_outgoing(client_call_details, request, self._carried), request)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error
        return _translated(call)


async def _translated(call: AsyncIterable[Any]) -> AsyncIterator[Any]:
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        raise from_grpc(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # gRPC raises this for a call that was cancelled, too: whoever iterates was not.
        raise Unavailable("the call was cancelled") from None
