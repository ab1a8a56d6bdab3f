"""A whole stack over TCP whose services know each other by the certificates of `kvcommons certificates`, etcd
among them, or by a token, and where the router signs for whom it calls."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from devstack import etcd
from devstack.plan import Place, ProcessPlan, identity
from devstack.rest import Piece
from kvcommons.errors import KVCommonsError, UntrustedPeer
from kvcommons.pb import data_pb2, kvstore_pb2, kvstore_pb2_grpc, ledger_pb2, ledger_pb2_grpc
from kvcommons.rpc.channel import open_channel
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.credentials import Credentials
from kvcommons.security.token import SharedToken
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from tests.machine import scaled
from tests.system.by_hand import ByHand
from tests.system.conftest import FLOAT32
from tests.system.scrape import scrape
from tests.system.stack import Stack
from tests.waiting import wait_until

SERVICES = ("ledger", "kvstore", "prefill", "decode", "attention_pool", "router")
TURNS = ("My cat is called Zuzu. Tell me a story about her.", "What is my cat called?")
ANSWER = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
READY_S_MAX = 60.0
ROOT = Path(__file__).parents[2]


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


NAMES = (*SERVICES, "prefill-rank-1", "etcd")
PORTS = dict(zip([f"{name}.{kind}" for name in NAMES for kind in "cd"], _free_ports(16), strict=True))


class TcpPlace(Place):
    def control(self, name: str) -> str:
        return f"127.0.0.1:{PORTS[f'{name}.c']}"

    def transport(self, name: str) -> str:
        return f"tcp:127.0.0.1:{PORTS[f'{name}.d']}"


class OverTcp(ByHand):
    @property
    def runtime(self) -> Path:
        return self.place.runtime

    def _listens(self, plan: ProcessPlan) -> bool:
        process = self.running[plan.name]
        assert process.poll() is None, f"{plan.name} ended: {self.said(plan.name)}"
        if plan.name == "etcd" and plan.sockets[0].exists():
            return True
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", PORTS[f"{plan.name}.c"])) == 0


def etcd_by_tls(folder: Path, pki: Path) -> ProcessPlan:
    client, other = (f"https://127.0.0.1:{PORTS[f'etcd.{kind}']}" for kind in "cd")
    plan = etcd.plan(folder, folder, os.environ)
    command = [word for word in plan.command if "unix:" not in word]
    command += [
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={other.replace('https', 'http')}",
        f"--initial-advertise-peer-urls={other.replace('https', 'http')}",
        f"--initial-cluster=kvcommons={other.replace('https', 'http')}",
        "--client-cert-auth",
        "--enable-grpc-gateway=false",
        "--client-cert-allowed-hostname=etcd-client.kvcommons",
        f"--trusted-ca-file={pki}/etcd/ca.crt",
        f"--cert-file={pki}/etcd/tls.crt",
        f"--key-file={pki}/etcd/tls.key",
    ]
    return replace(plan, command=tuple(command), folder=ROOT)


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    folder = tmp_path / "certificates"
    made = [sys.executable, "-m", "devstack", "certificates", str(folder)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=scaled(30))
    return folder


@pytest.fixture(params=["certificates", pytest.param("token", marks=pytest.mark.slow)])
def secured(request: pytest.FixtureRequest, tmp_path: Path, pki: Path) -> Iterator[OverTcp]:
    """With certificates prefill has two ranks, which meet and join by them."""
    by_token = request.param == "token"
    tables = {service: {**FLOAT32.get(service, {}), **identity(service, pki)} for service in SERVICES}
    # Less than the conversation takes: the rest lies on the pool.
    tables["decode"] |= {"capacity_tokens": 128, "max_local_prefill_tokens": 0}
    if by_token:
        (tmp_path / "token").write_text("a token of this very stack")
        for table in tables.values():
            del table["certificates"]
            table["token_file"] = str(tmp_path / "token")
    else:
        tables["ledger"] |= {"etcd": [f"127.0.0.1:{PORTS['etcd.c']}"]}
        tables["prefill"] |= {"tensor": 2}
    stack = OverTcp(tmp_path, place=TcpPlace, tables=tables)
    if not by_token:
        stack.plans["etcd"] = etcd_by_tls(tmp_path / "etcd", pki)
    try:
        for name in stack.plans:
            stack.start(name)
        wait_until(stack.client.healthy, "the stack is not healthy", within_s=READY_S_MAX)
        yield stack
    finally:
        stack.end()


@pytest.mark.timeout(300)
def test_a_conversation_over_tcp_of_services_that_know_each_other(
    secured: OverTcp, stack: Stack, pki: Path, request: pytest.FixtureRequest
) -> None:
    """Its tokens are those of a stack of sockets and shared memory, its second turn finds the first one's KV,
    and whoever shows nothing gets nothing."""
    by_token = "token" in request.node.name
    for number, message in enumerate(TURNS):
        expected = stack.client.say(message, f"over-shm-{by_token}", **ANSWER)
        pieces = []
        for part in secured.client.chat(message, "over-tls", **ANSWER):
            if isinstance(part, Piece):
                pieces.append(part.text)
            else:
                assert bool(part.cached_tokens) == bool(number)
        assert "".join(pieces) == expected.text
    for name, op in (
        ("kvstore", "put_layer"),
        ("decode", "write_blocks"),
        ("attention_pool", "attend_layer"),
    ):
        served = scrape(secured, name)  # type: ignore[arg-type]  # its metrics' socket is as a stack's
        assert served.value("kvcommons_data_server_seconds_count", op=op, code="ok"), op
    asyncio.run(_strangers_get_nothing(secured.place, pki, by_token=by_token))
    assert secured.client.say("Thank you.", "over-tls", temperature=0.0, max_tokens=4).text


async def _strangers_get_nothing(place: Place, pki: Path, *, by_token: bool) -> None:
    """Nor does a service of ours that speaks for a tenant by itself."""
    decode = Credentials(certificate=ServiceCertificate(pki / "decode", "decode"))
    if by_token:
        decode = Credentials(token=SharedToken(b"a token of this very stack"))
    get = kvstore_pb2.GetSessionRequest(tenant="local", session_id="over-tls")
    for credentials, error, says in (
        (Credentials(), KVCommonsError, None),
        (decode, UntrustedPeer, "nobody has signed the tenant"),
    ):
        channel = open_channel(place.control("kvstore"), "kvstore", credentials)
        with pytest.raises(error, match=says):
            await kvstore_pb2_grpc.SessionsStub(channel).Get(get, timeout=scaled(5))
        await channel.close(None)
    posing = ledger_pb2.Instance(id="kvstore-forged", service="kvstore", control_address="127.0.0.1:1")
    for target in ("ledger",) if by_token else ("ledger", "etcd"):
        async with grpc.aio.insecure_channel(place.control(target)) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await ledger_pb2_grpc.LedgerStub(plain).Heartbeat(
                    ledger_pb2.HeartbeatRequest(instance=posing), timeout=scaled(3)
                )
    if not by_token:
        channel = open_channel(place.control("ledger"), "ledger", decode)
        leaves = ledger_pb2.HeartbeatRequest(instance=posing, leaving=True)
        with pytest.raises(UntrustedPeer, match="not that of a kvstore"):
            await ledger_pb2_grpc.LedgerStub(channel).Heartbeat(leaves, timeout=scaled(5))
        await channel.close(None)
    for name in ("kvstore", "decode", "attention_pool"):
        client = DataClient(place.transport(name))
        request = data_pb2.DataRequest(get_layers=data_pb2.GetLayers(layers=1))
        with pytest.raises(UntrustedPeer, match="token_file" if by_token else "certificates in its settings"):
            client.call(request, deadline=Deadline.after(scaled(5)))
        client.close()
