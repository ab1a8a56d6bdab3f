"""Whom a gRPC server answers, and whom its callers believe, where services know each other by certificates
or by a token: everybody else is refused, the log says so, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcommons.errors import Unavailable, UntrustedPeer
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rpc.callers import PROOF_KEY
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.server import RpcServer
from kvcommons.security.authority import make_certificates
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.security.token import SharedToken
from kvcommons.telemetry.telemetry import Telemetry
from tests.certificates import sign_certificate
from tests.machine import scaled

ROOT = Path(__file__).parents[2]
METHOD = "/kvcommons.v1.Ledger/Heartbeat"
SECRET = SharedToken(b"a token of this very stack")
TOKEN = Credentials(token=SECRET)


class Counting(rpc.LedgerServicer):
    def __init__(self) -> None:
        self.calls = 0
        self.watched = asyncio.Event()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.View]:
        yield pb.View(records="0")
        await self.watched.wait()
        yield pb.View(records=request.watcher)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        self.calls += 1
        return pb.HeartbeatReply(heartbeat_ms=7)


class Served:
    def __init__(self, server: RpcServer, servicer: Counting) -> None:
        self.address, self.servicer = server.address, servicer

    async def beat(
        self, credentials: Credentials, *, role: Role = "ledger", timeout_s: float = scaled(10)
    ) -> pb.HeartbeatReply:
        """A heartbeat as a service with these credentials sends it."""
        channel = open_channel(self.address, role, credentials)
        try:
            return await rpc.LedgerStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=timeout_s)
        finally:
            await channel.close(None)

    async def raw(self, secured: grpc.ChannelCredentials | None) -> grpc.StatusCode:
        """The status of a heartbeat that is sent without our library."""
        options = [("grpc.ssl_target_name_override", "ledger.kvcommons")]
        channel = (
            grpc.aio.insecure_channel(self.address)
            if secured is None
            else grpc.aio.secure_channel(self.address, secured, options=options)
        )
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc.LedgerStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=scaled(3))
        return refused.value.code()


@contextlib.asynccontextmanager
async def serving(
    credentials: Credentials, service: str = "ledger", address: str = "127.0.0.1:0"
) -> AsyncIterator[Served]:
    server, servicer = RpcServer(address, Telemetry.off(service), credentials=credentials), Counting()
    server.add(rpc.add_LedgerServicer_to_server, servicer)
    await server.start()
    await server.set_ready(True)
    try:
        yield Served(server, servicer)
    finally:
        await server.drain(0)


def read(folder: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        *((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    )


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "pki", datetime.now(UTC))
    return tmp_path / "pki"


def of(pki: Path, service: str) -> Credentials:
    return Credentials(certificate=ServiceCertificate(pki / service, service))


async def test_services_of_one_authority_know_each_other(pki: Path) -> None:
    async with serving(of(pki, "ledger")) as served:
        for service in ("router", "decode", "attention_pool"):
            assert (await served.beat(of(pki, service))).heartbeat_ms == 7


async def test_callers_without_a_services_certificate_are_refused(
    pki: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path / "other", datetime.now(UTC))
    ours = (pki / "decode" / "ca.crt").read_bytes()
    theirs = tmp_path / "other" / "decode"
    ended = sign_certificate(
        pki / "authority", tmp_path / "ended", names=["decode.kvcommons"], from_days=-9, to_days=-1
    )
    unborn = sign_certificate(pki / "authority", tmp_path / "unborn", names=["decode.kvcommons"], from_days=2)
    website = sign_certificate(pki / "authority", tmp_path / "website", names=["chat.example.org"])
    attacks = {
        "no certificate": grpc.ssl_channel_credentials(ours),
        "another authority's": grpc.ssl_channel_credentials(
            ours, (theirs / "tls.key").read_bytes(), (theirs / "tls.crt").read_bytes()
        ),
        "one that has ended": read(ended),
        "one that has not begun": read(unborn),
        "no TLS": None,
    }
    async with serving(of(pki, "ledger")) as served:
        for name, attack in attacks.items():
            assert await served.raw(attack) in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ), name
        # The authority signs others than services, too: these get as far as a call.
        assert await served.raw(read(website)) == grpc.StatusCode.UNAUTHENTICATED
        assert caplog.text.count("is no service's of this stack") == 1
        assert served.servicer.calls == 0
        await served.beat(of(pki, "decode"))


async def test_a_server_that_is_not_the_service_is_given_nothing(pki: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", datetime.now(UTC))
    caller = of(pki, "decode")
    for posing in (
        of(tmp_path / "other", "ledger"),  # of another authority
        of(pki, "kvstore"),  # a service of ours, in another one's place
        OPEN,  # without TLS
    ):
        async with serving(posing) as served:
            with pytest.raises(Unavailable):
                await served.beat(caller, timeout_s=scaled(3))
            assert served.servicer.calls == 0


async def test_noise_and_handshakes_that_stop_hold_up_nobody(pki: Path) -> None:
    async with serving(of(pki, "ledger")) as served:
        port = int(served.address.rpartition(":")[2])
        opened = []
        noises = (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(99))
        for said in noises * 8:
            raw = socket.create_connection(("127.0.0.1", port), scaled(5))
            raw.sendall(said)
            opened.append(raw)
        assert (await served.beat(of(pki, "router"))).heartbeat_ms == 7
        for raw in opened:
            raw.close()


async def test_a_renewed_certificate_is_shown_to_the_next_connection(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcommons.security.certificate.LOOK_S", 0.0)
    async with serving(of(pki, "ledger")) as served:
        await served.beat(of(pki, "router"))
        # All anew, of another authority: whoever has the former one is a stranger from now on.
        before = of(pki, "router")
        make_certificates(tmp_path / "anew", datetime.now(UTC))
        for name in ("ca.crt", "tls.key", "tls.crt"):
            (pki / "ledger" / name).write_bytes((tmp_path / "anew" / "ledger" / name).read_bytes())
        with pytest.raises(Unavailable):
            await served.beat(before, timeout_s=scaled(3))
        assert (await served.beat(of(tmp_path / "anew", "router"))).heartbeat_ms == 7


async def test_a_service_that_is_not_restarted_calls_by_its_renewed_certificate(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Authority and all: first both trust the two, then each has its new certificate, then the former
    authority is gone, and with it the connections that it stood for. A call under way ends as it would."""
    monkeypatch.setattr("kvcommons.security.certificate.LOOK_S", 0.0)
    monkeypatch.setattr("kvcommons.rpc.renewed.SETTLE_S", 0.0)
    make_certificates(tmp_path / "next", datetime.now(UTC))

    def put(service: str, *names: str) -> None:
        for name in names:
            (pki / service / name).write_bytes((tmp_path / "next" / service / name).read_bytes())

    server_files, caller = of(pki, "ledger"), of(pki, "router")
    async with serving(server_files) as served:
        channel = open_channel(served.address, "ledger", caller)
        stub = rpc.LedgerStub(channel)  # made once, as holders' are
        watching = stub.Watch(pb.WatchRequest(watcher="1"), timeout=scaled(60))
        views = watching.__aiter__()
        assert (await anext(views)).records == "0"

        async def beat() -> int:
            return (await stub.Heartbeat(pb.HeartbeatRequest(), timeout=scaled(10))).heartbeat_ms

        assert await beat() == 7
        both = b"".join((folder / "authority" / "ca.crt").read_bytes() for folder in (pki, tmp_path / "next"))
        for service in ("ledger", "router"):
            (pki / service / "ca.crt").write_bytes(both)
        assert await beat() == 7
        for service in ("ledger", "router"):
            put(service, "tls.key", "tls.crt")
        assert await beat() == 7
        put("router", "ca.crt")
        assert await beat() == 7
        served.servicer.watched.set()
        assert [view.records async for view in views] == ["1"]
        address = served.address
    put("ledger", "ca.crt")  # the former one's connections ended with the server
    async with serving(server_files, address=address) as served:
        assert await beat() == 7
        ended = sign_certificate(
            pki / "authority", tmp_path / "ended", names=["router.kvcommons"], from_days=-9, to_days=-1
        )
        assert await served.raw(read(ended)) == grpc.StatusCode.UNAVAILABLE
    await channel.close(None)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "former channel"]


async def test_calls_prove_the_token_and_none_is_good_twice(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(TOKEN) as served:
        assert (await served.beat(TOKEN)).heartbeat_ms == 7
        for credentials, role, says in (
            (OPEN, "ledger", "does not have this stack's token"),
            (
                Credentials(token=SharedToken(b"a token of another stack")),
                "ledger",
                "does not have this stack's token",
            ),
            (TOKEN, "kvstore", "meant for another service"),
        ):
            with pytest.raises(UntrustedPeer, match=says):
                await served.beat(credentials, role=role)
        assert caplog.text.count("refused a call") == 3
        now_s = datetime.now(UTC).timestamp()
        proofs = {
            "made before": SECRET.prove_call(METHOD, "ledger", now_s),
            "set the clocks": SECRET.prove_call(METHOD, "ledger", now_s - 90),
            "does not have": SECRET.prove_call("/kvcommons.v1.Ledger/Watch", "ledger", now_s),
        }
        calls = served.servicer.calls
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = rpc.LedgerStub(channel)

            async def carry(proof: bytes) -> None:
                await stub.Heartbeat(pb.HeartbeatRequest(), timeout=scaled(5), metadata=[(PROOF_KEY, proof)])

            await carry(proofs["made before"])
            for says, proof in proofs.items():  # the first one was overheard, and is sent again
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await carry(proof)
                assert says in str(refused.value.details())
            # A probe of a cluster has no token.
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=scaled(5))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert served.servicer.calls == calls + 1


async def test_a_containers_probe_asks_as_its_service(pki: Path) -> None:
    spec = importlib.util.spec_from_file_location("probe", ROOT / "deploy" / "probe.py")
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    async with serving(of(pki, "decode"), "decode") as served:
        assert await asyncio.to_thread(probe.main, served.address, pki / "decode") == 0
        assert await asyncio.to_thread(probe.main, served.address, pki / "nowhere") == 1


async def test_a_socket_of_this_host_asks_for_nothing(pki: Path, tmp_path: Path) -> None:
    for number, credentials in enumerate((of(pki, "ledger"), TOKEN)):
        address = f"unix:{tmp_path}/s{number}"
        server = RpcServer(address, Telemetry.off("ledger"), credentials=credentials)
        server.add(rpc.add_LedgerServicer_to_server, Counting())
        await server.start()
        channel = open_channel(address, "ledger", credentials)
        reply = await rpc.LedgerStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=scaled(5))
        assert reply.heartbeat_ms == 7
        await channel.close(None)
        await server.drain(0)
        await asyncio.sleep(0)


async def test_services_of_two_authorities_meet_while_one_takes_the_others_place(
    pki: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "next", datetime.now(UTC))
    both = b"".join((folder / "authority" / "ca.crt").read_bytes() for folder in (pki, tmp_path / "next"))
    for folder in (pki, tmp_path / "next"):
        for service in ("ledger", "router"):
            (folder / service / "ca.crt").write_bytes(both)
    for serves, calls in ((pki, tmp_path / "next"), (tmp_path / "next", pki)):
        async with serving(of(serves, "ledger")) as served:
            assert (await served.beat(of(calls, "router"))).heartbeat_ms == 7
