"""What a connection passes before HTTP begins where the router serves by TLS.

A connection has its place in the table, and its deadlines, from the moment that it is accepted: whoever opens
one and says nothing is bounded as without TLS. A client that speaks HTTP without TLS is told what to do."""

from __future__ import annotations

import asyncio
import json
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import cast

from kvcommons.errors import InvalidInput
from services.router.api.shapes import error_body
from services.router.http.certificate import Certificate

_CLIENT_HELLO = 0x16  # the first byte of TLS; no method of HTTP begins with it
_SHUTDOWN_S = 5.0  # of a client that leaves its last bytes unread


class TlsDoor(asyncio.Protocol):
    """One connection, until its first bytes are there."""

    def __init__(
        self,
        certificate: Certificate,
        http: asyncio.BaseProtocol,
        *,
        accept: Callable[[asyncio.Transport], bool],
        leave: Callable[[], None],
        handshake_s: float,
    ) -> None:
        """`http` speaks on once TLS is there. `accept` says whether a new connection is kept; `leave` hears
        that it ended, whether HTTP had begun or not."""
        self._certificate = certificate
        self._http = http
        self._accept = accept
        self._leave = leave
        self._handshake_s = handshake_s
        self._transport: asyncio.Transport | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        if not self._accept(connection):
            connection.close()
            return
        connection.set_write_buffer_limits(high=0)  # as of a connection without TLS
        self._transport = connection

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._refused:
            return
        if data[0] != _CLIENT_HELLO:
            self._refused = True
            self._transport.write(_PLAIN)
            self._transport.write_eof()  # the client closes, or its time for a request runs out
            return
        secured = _Secured(
            asyncio.get_running_loop(),
            self._http,
            self._certificate.context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=self._handshake_s,  # type: ignore[arg-type]  # fractions, too
            ssl_shutdown_timeout=_SHUTDOWN_S,
        )
        secured.left = self._leave
        self._transport.set_protocol(secured)
        secured.connection_made(self._transport)
        while data:
            buffer = secured.get_buffer(len(data))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            secured.buffer_updated(count)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._transport is not None:
            self._leave()


class _Secured(SSLProtocol):
    """asyncio's own; it tells nobody of a connection that is lost before the handshake is through."""

    max_size = 1 << 15  # of the buffer that each connection has; asyncio's 256 KB would be 1 GB for 4,096
    left: Callable[[], None]

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.left()


def _plain() -> bytes:
    error = InvalidInput("this port speaks HTTPS only: call https:// and not http://")
    body = json.dumps(error_body(error)).encode()
    head = (
        f"HTTP/1.1 {error.http_status} Bad Request\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_PLAIN = _plain()
