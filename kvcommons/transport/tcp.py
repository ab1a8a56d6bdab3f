"""TCP, between hosts: "tcp:host:port" (an IPv6 host in brackets; port 0 lets the system choose one)."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvcommons.errors import AlreadyExists, DeadlineExceeded, InvalidInput, Unavailable
from kvcommons.security.credentials import Credentials
from kvcommons.security.roles import Role
from kvcommons.transport.base import Connection, Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection, Stream
from kvcommons.transport.offering import OfferingStream
from kvcommons.transport.proving import PROVING_S, TokenTerms, prove
from kvcommons.transport.sockets import SocketListener, SocketStream, finish_connect
from kvcommons.transport.tls import HANDSHAKE_S, TlsTerms, secure

_BACKLOG = 128
# A host that vanishes without a FIN is noticed after about 10 s on an idle connection, and while sending
# alike.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    family: int
    sockaddr: tuple[object, ...]


class TcpTransport:
    def __init__(self, role: Role, credentials: Credentials) -> None:
        """`role`: of whoever is connected to, where there are certificates."""
        self._role = role
        self._credentials = credentials

    def connect(self, rest: str, limits: Limits, deadline: Deadline) -> Connection:
        address = f"tcp:{rest}"
        plain = connect_stream(rest, address, deadline)
        try:
            return FramedConnection(self._introduced(plain, deadline), address, limits)
        except BaseException:
            plain.close()
            raise

    def listen(self, rest: str, limits: Limits) -> SocketListener:
        return listen_on(rest, "tcp", self._opened, limits)

    def _introduced(self, plain: SocketStream, deadline: Deadline) -> Stream:
        certificate, token = self._credentials.certificate, self._credentials.token
        if certificate is not None:
            return secure(plain, certificate, self._role, deadline)
        if token is not None:
            prove(plain, token, deadline)
        return plain

    def _opened(self, sock: socket.socket, peer: str) -> Stream:
        plain = open_stream(sock, peer)
        certificate, token = self._credentials.certificate, self._credentials.token
        if certificate is not None:
            return OfferingStream(plain, TlsTerms(plain, certificate), within_s=HANDSHAKE_S)
        if token is not None:
            return OfferingStream(plain, TokenTerms(plain, token), within_s=PROVING_S)
        return plain


def connect_stream(rest: str, address: str, deadline: Deadline) -> SocketStream:
    """A connection to `rest`, "host:port"; `address` is how people wrote it."""
    host, port = _split(rest, address)
    failure: Unavailable | None = None
    for endpoint in _resolve(host, port, deadline):
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            stream = open_stream(sock, address)
            finish_connect(sock, endpoint.sockaddr, address, deadline)
        except Unavailable as error:
            sock.close()
            failure = error
            continue
        except BaseException:
            sock.close()
            raise
        return stream
    raise failure or Unavailable(f"{host!r} has no address")


def listen_on(
    rest: str, scheme: str, open_stream: Callable[[socket.socket, str], Stream], limits: Limits
) -> SocketListener:
    """Listens on `rest`, "host:port", which people wrote after `scheme`."""
    host, port = _split(rest, f"{scheme}:{rest}")
    endpoint = _resolve(host, port, Deadline.after(10))[0]
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        # Only lets a restart bind while old connections are in TIME_WAIT; a living listener still
        # excludes us.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(endpoint.sockaddr)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AlreadyExists(
                f"{scheme}:{rest} is in use: stop what listens there, or choose another port"
            ) from error
        raise InvalidInput(f"cannot listen on {scheme}:{rest}: {error.strerror}") from error
    shown = f"[{host}]" if ":" in host else host
    address = f"{scheme}:{shown}:{sock.getsockname()[1]}"
    return SocketListener(sock, address, open_stream, limits, lambda: None)


def open_stream(sock: socket.socket, peer: str) -> SocketStream:
    _prepare(sock)
    return SocketStream(sock, peer)


def _prepare(sock: socket.socket) -> None:
    """Buffer sizes are left to the kernel: setting them turns its tuning off, and caps them at rmem_max."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def _split(rest: str, address: str) -> tuple[str, int]:
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        scheme = address.partition(":")[0]
        raise InvalidInput(f"{address} is no address: write {scheme}:host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _resolve(host: str, port: int, deadline: Deadline) -> list[_Endpoint]:
    """At least one. Names are looked up on a thread of their own, for a resolver knows no deadline."""
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    answer: queue.SimpleQueue[list[_Endpoint] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(_look_up(host, port, 0))
        except OSError as error:
            answer.put(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        found = answer.get(timeout=deadline.left())
    except queue.Empty:
        raise DeadlineExceeded(f"looking up {host!r} took longer than the deadline") from None
    if isinstance(found, OSError):
        raise Unavailable(f"cannot look up {host!r}: {found.strerror}") from found
    return found


def _look_up(host: str, port: int, flags: int) -> list[_Endpoint]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [_Endpoint(family=family, sockaddr=sockaddr) for family, _, _, _, sockaddr in found]
