"""Runs in a container of its own on a stack's network `services`, as somebody who is none of its services:
tries each port with nothing, and with certificates of an authority of its own, and prints who answered."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcommons.errors import KVCommonsError, UntrustedPeer
from kvcommons.pb import data_pb2
from kvcommons.rpc.channel import open_channel
from kvcommons.security.authority import make_certificates
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline

CONTROL: dict[str, Role] = {
    "router:7000": "router",
    "ledger:7000": "ledger",
    "kvstore:7000": "kvstore",
    "prefill:7000": "prefill",
    "decode:7000": "decode",
    "attention_pool:7000": "attention-pool",
    "etcd:2379": "etcd",
}
DATA = ("kvstore:7001", "decode:7001", "attention_pool:7001")
CALL_S = 5.0


async def answers(address: str, role: Role, credentials: Credentials) -> bool:
    channel = open_channel(address, role, credentials)
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    except KVCommonsError:
        return False
    finally:
        await channel.close(None)
    return True


def gives(address: str, credentials: Credentials) -> bool:
    """An error of what was asked is an answer, too."""
    client = DataClient(f"tcp:{address}", credentials=credentials)
    try:
        layers = data_pb2.DataRequest(get_layers=data_pb2.GetLayers(layers=1))
        client.call(layers, deadline=Deadline.after(CALL_S))
    except UntrustedPeer:
        return False
    except KVCommonsError:
        return True
    finally:
        client.close()
    return True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder), datetime.now(UTC))
        own = Credentials(certificate=ServiceCertificate(Path(folder) / "decode", "decode"))
        for address in (*CONTROL, *DATA):
            host, port = address.split(":")
            socket.create_connection((host, int(port)), timeout=CALL_S).close()  # it is there
            for shown, credentials in (("nothing", OPEN), ("another authority's", own)):
                if address in DATA:
                    answered = gives(address, credentials)
                else:
                    answered = asyncio.run(answers(address, CONTROL[address], credentials))
                print(f"{address} {'ANSWERED' if answered else 'refused'} {shown}")


if __name__ == "__main__":
    main()
