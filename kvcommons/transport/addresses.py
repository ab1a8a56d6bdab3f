"""Chooses the transport by an address's scheme: "tcp:host:port" and "ucx:host:port" between hosts,
"shm:/path" and "unix:/path" on one."""

from __future__ import annotations

from kvcommons.errors import InvalidInput
from kvcommons.transport.base import Connection, Limits, Listener, Transport
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.rings import RING_BYTES
from kvcommons.transport.shared import SharedTransport
from kvcommons.transport.tcp import TcpTransport
from kvcommons.transport.ucx import UcxTransport
from kvcommons.transport.unix import UnixTransport


def connect(
    address: str, deadline: Deadline, limits: Limits | None = None, *, rings: bool = True
) -> Connection:
    """Without `rings` frames go over a socket where the address says shm:, too. Raises Unavailable when
    nobody listens, DeadlineExceeded when nobody answers, InvalidInput for a bad address."""
    transport, rest = _choose(address, RING_BYTES if rings else 0)
    return transport.connect(rest, limits or Limits(), deadline)


def listen(address: str, limits: Limits | None = None, *, ring_bytes: int = RING_BYTES) -> Listener:
    """`ring_bytes` of shared memory for each direction of a connection, where the address says shm:.
    Raises AlreadyExists when another process listens there, InvalidInput for an address that cannot be
    bound."""
    transport, rest = _choose(address, ring_bytes)
    return transport.listen(rest, limits or Limits())


def _choose(address: str, ring_bytes: int = RING_BYTES) -> tuple[Transport, str]:
    scheme, separator, rest = address.partition(":")
    if separator and scheme == "tcp":
        return TcpTransport(), rest
    if separator and scheme == "unix":
        return UnixTransport(), rest
    if separator and scheme == "shm":
        return SharedTransport(ring_bytes), rest
    if separator and scheme == "ucx":
        return UcxTransport(), rest
    raise InvalidInput(
        f"{address!r} is no data address: write tcp:host:port, shm:/path, unix:/path or ucx:host:port"
    )
