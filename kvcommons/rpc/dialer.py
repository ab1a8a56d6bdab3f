"""How a process reaches other services: what it shows them, and who counts what it sends."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from kvcommons.rpc.channel import open_channel
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.transport.base import Observer
from kvcommons.transport.client import DataClient
from kvcommons.transport.sockets import ASK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Whoever it dials has to have the role, where there are certificates."""

    credentials: Credentials = OPEN
    observer: Observer | None = None  # of exchanges on the data plane

    def channel(self, address: str, role: Role) -> grpc.aio.Channel:
        """As `open_channel`."""
        return open_channel(address, role, self.credentials)

    def client(
        self, address: str, role: Role, *, kept_max: int = 8, ask_s: float = ASK_S, rings: bool = True
    ) -> DataClient:
        """Of a data plane."""
        return DataClient(
            address,
            kept_max=kept_max,
            observer=self.observer,
            ask_s=ask_s,
            rings=rings,
            role=role,
            credentials=self.credentials,
        )


# Shows nothing, and nobody counts: on sockets of one host.
UNSECURED = Dialer()
