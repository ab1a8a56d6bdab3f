"""Chooses the transport by an address's scheme: "tcp:host:port" between hosts, "unix:/path" on one."""

from __future__ import annotations

from kvcommons.errors import InvalidInput, UnsupportedParameter
from kvcommons.transport.base import Connection, Limits, Listener, Transport
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.tcp import TcpTransport
from kvcommons.transport.unix import UnixTransport


def connect(address: str, deadline: Deadline, limits: Limits | None = None) -> Connection:
    """Raises Unavailable when nobody listens, DeadlineExceeded when nobody answers, InvalidInput for a bad
    address."""
    transport, rest = _choose(address)
    return transport.connect(rest, limits or Limits(), deadline)


def listen(address: str, limits: Limits | None = None) -> Listener:
    """Raises AlreadyExists when another process listens there, InvalidInput for an address that cannot be
    bound."""
    transport, rest = _choose(address)
    return transport.listen(rest, limits or Limits())


def _choose(address: str) -> tuple[Transport, str]:
    scheme, separator, rest = address.partition(":")
    if separator and scheme == "tcp":
        return TcpTransport(), rest
    if separator and scheme == "unix":
        return UnixTransport(), rest
    if separator and scheme in ("shm", "ucx"):
        raise UnsupportedParameter(f"transport {scheme!r} in {address!r} is not built yet: use tcp: or unix:")
    raise InvalidInput(f"{address!r} is no data address: write tcp:host:port or unix:/path")
