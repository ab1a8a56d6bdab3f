"""Chooses the transport by an address's scheme: "tcp:host:port" and "ucx:host:port" between hosts,
"shm:/path" and "unix:/path" on one."""

from __future__ import annotations

from kvcommons.errors import InvalidInput, UntrustedPeer
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.transport.base import Connection, Limits, Listener, Transport
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.rings import RING_BYTES
from kvcommons.transport.shared import SharedTransport
from kvcommons.transport.tcp import TcpTransport
from kvcommons.transport.ucx import UcxTransport
from kvcommons.transport.unix import UnixTransport

_UCX = (
    "UCX knows neither certificates nor tokens: use tcp:, or set private_network = true where nobody but "
    "this stack's services reaches the network"
)


def connect(
    address: str,
    deadline: Deadline,
    limits: Limits | None = None,
    *,
    rings: bool = True,
    role: Role = "holder",
    credentials: Credentials = OPEN,
) -> Connection:
    """Without `rings` frames go over a socket where the address says shm:, too. Over the network it shows
    `credentials`; where those are certificates, what answers has to have the role. Raises Unavailable when
    nobody listens, UntrustedPeer for one that is no service of the stack, DeadlineExceeded when nobody
    answers, InvalidInput for a bad address."""
    if address.startswith("ucx:") and credentials.keeps_out and not credentials.private_network:
        raise UntrustedPeer(f"{address}: {_UCX}")
    transport, rest = _choose(address, RING_BYTES if rings else 0, role, credentials)
    return transport.connect(rest, limits or Limits(), deadline)


def listen(
    address: str,
    limits: Limits | None = None,
    *,
    ring_bytes: int = RING_BYTES,
    credentials: Credentials = OPEN,
) -> Listener:
    """`ring_bytes` of shared memory for each direction of a connection, where the address says shm:. Over the
    network clients have to show what `credentials` want. Raises AlreadyExists when another process listens
    there, InvalidInput for an address that cannot be bound."""
    if address.startswith("ucx:") and credentials.keeps_out and not credentials.private_network:
        raise InvalidInput(f"data_listen = {address!r}: {_UCX}", param="data_listen")
    transport, rest = _choose(address, ring_bytes, "holder", credentials)
    return transport.listen(rest, limits or Limits())


def _choose(address: str, ring_bytes: int, role: Role, credentials: Credentials) -> tuple[Transport, str]:
    scheme, separator, rest = address.partition(":")
    if separator and scheme == "tcp":
        return TcpTransport(role, credentials), rest
    if separator and scheme == "unix":
        return UnixTransport(), rest
    if separator and scheme == "shm":
        return SharedTransport(ring_bytes), rest
    if separator and scheme == "ucx":
        return UcxTransport(), rest
    raise InvalidInput(
        f"{address!r} is no data address: write tcp:host:port, shm:/path, unix:/path or ucx:host:port"
    )
