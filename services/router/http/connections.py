"""Which connections the router keeps, and which it closes to have room for others. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

C = TypeVar("C")

# An IPv6 host is given a network of this size, and can come from any address in it.
_IPV6_PREFIX_BITS = 64


class ConnectionTable(Generic[C]):
    """Bounds connections, in all and of one address.

    A connection is *serving* from the moment that its request is authenticated until the answer is written,
    and *idle* before and after. Where a limit is reached a new connection takes the place of the one that has
    been idle longest, of its own address if that is at its limit. So whoever has no key, and opens
    connections to keep them, closes their own, and a client with a key gets in. Serving connections are never
    closed for others."""

    def __init__(self, *, connections_max: int, per_address_max: int) -> None:
        self._connections_max = connections_max
        self._per_address_max = per_address_max
        self._addresses: dict[C, str] = {}
        self._idle: dict[C, None] = {}  # the one that is idle longest comes first
        self._of_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def open(self, connection: C, address: str) -> tuple[bool, C | None]:
        """Whether a new connection is taken, and the connection that has to be closed for it.

        The latter is out of the table at once. A connection that is not admitted is not in the table.
        """
        victim: C | None = None
        if self._of_address[address] >= self._per_address_max:
            victim = next((one for one in self._idle if self._addresses[one] == address), None)
        elif len(self) >= self._connections_max:
            victim = next(iter(self._idle), None)
        else:
            self._add(connection, address)
            return True, None
        if victim is None:
            return False, None
        self.closed(victim)
        self._add(connection, address)
        return True, victim

    def serving(self, connection: C) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: C) -> None:
        """The answer is written, or the client is refused."""
        if connection in self._addresses:
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def closed(self, connection: C) -> None:
        """Does nothing for a connection that is not in the table."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._idle.pop(connection, None)
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    def _add(self, connection: C, address: str) -> None:
        self._addresses[connection] = address
        self._idle[connection] = None
        self._of_address[address] += 1


def client_address(host: str) -> str:
    """What one client counts as: its IPv4 address, or the network that an IPv6 host has to itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX_BITS), strict=False))
