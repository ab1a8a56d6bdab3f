"""A kvstore that has the router's public key serves sessions to whoever shows that the router speaks for
their tenant, and to nobody else; decode and prefill take no job otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvcommons.errors import KVCommonsError, Loading, SessionNotFound, Unavailable, UntrustedPeer
from kvcommons.pb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import kvstore_pb2_grpc as rpc
from kvcommons.prefill.metrics import PrefillMetrics
from kvcommons.prefill.service import PrefillService
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.server import RpcServer
from kvcommons.security.authority import make_certificates
from kvcommons.security.tenants import LIFE_S, SIGNATURE_KEY, TenantSigner, TenantVerifier
from kvcommons.telemetry.telemetry import Telemetry
from services.decode.server import DecodeService
from tests.contract.kvstore_process import KvstoreProcess
from tests.machine import scaled

SESSIONS = "/kvcommons.v1.Sessions"


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "pki", datetime.now(UTC))
    return tmp_path / "pki"


@pytest.fixture
def store(pki: Path, socket_folder: Path, tmp_path: Path) -> Iterator[KvstoreProcess]:
    process = KvstoreProcess(socket_folder, tmp_path / "data", tenant_key=pki / "kvstore" / "tenants.pub")
    yield process.wait_ready()
    process.kill()


def signer_of(pki: Path, **options: Any) -> TenantSigner:
    read = TenantSigner.read(pki / "router" / "tenants.key")
    return TenantSigner(read._key, **options)


async def test_sessions_are_served_to_whoever_the_router_speaks_for(store: KvstoreProcess, pki: Path) -> None:
    channel = open_channel(store.control, carried=(signer_of(pki).carry,))
    sessions = rpc.SessionsStub(channel)
    created = await sessions.Create(
        pb.CreateSessionRequest(tenant="alice", session_id="s"), timeout=scaled(10)
    )
    assert created.tenant == "alice"
    with pytest.raises(SessionNotFound):
        await sessions.Get(pb.GetSessionRequest(tenant="bob", session_id="s"), timeout=scaled(10))
    await sessions.ListDocuments(pb.ListDocumentsRequest(), timeout=scaled(10))  # of all, for the router
    await channel.close(None)


async def test_a_tenants_name_alone_opens_nothing(store: KvstoreProcess, pki: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", datetime.now(UTC))
    late_s = -LIFE_S - 60
    alice = signer_of(pki).sign("alice", SESSIONS)
    attacks = {
        "nobody has signed": b"",
        "no key in tenant_key has signed": signer_of(tmp_path / "other").sign("alice", SESSIONS),
        "has been over": signer_of(pki, clock=lambda: datetime.now(UTC).timestamp() + late_s).sign(
            "alice", SESSIONS
        ),
        "for this service": signer_of(pki).sign("alice", "/kvcommons.v1.Decode"),
        "is none": b"alice",
    }
    async with grpc.aio.insecure_channel(store.control) as channel:
        sessions = rpc.SessionsStub(channel)

        async def refused(call: Any, request: Any, said: bytes) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(request, timeout=scaled(10), metadata=[(SIGNATURE_KEY, said)] if said else None)
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            return str(error.value.details())

        for says, said in attacks.items():
            request = pb.GetSessionRequest(tenant="alice", session_id="s")
            assert says in await refused(sessions.Get, request, said)
        # Alice's is good for Alice only, in each call.
        bob = {"tenant": "bob", "session_id": "s"}
        for call, request in (
            (sessions.Create, pb.CreateSessionRequest(**bob)),
            (sessions.Get, pb.GetSessionRequest(**bob)),
            (sessions.List, pb.ListSessionsRequest(tenant="bob")),
            (sessions.Delete, pb.DeleteSessionRequest(**bob)),
            (sessions.Fork, pb.ForkSessionRequest(**bob)),
            (sessions.BeginTurn, pb.BeginTurnRequest(**bob)),
            (sessions.RenewTurn, pb.RenewTurnRequest(**bob)),
            (sessions.CommitTurn, pb.CommitTurnRequest(**bob)),
            (sessions.AbandonTurn, pb.AbandonTurnRequest(**bob)),
            (sessions.ListDocuments, pb.ListDocumentsRequest()),
        ):
            assert "has signed this tenant" in await refused(call, request, alice)
    # Blocks are named by keyed hashes of their content: who can name one has it.
    stats = await asyncio.to_thread(store.blocks.Stats, pb.StatsRequest(), timeout=scaled(10))
    assert stats.sessions == 0
    store.kill()
    assert store.errors.count("refused a call") == len(attacks) + 10


async def test_decode_and_prefill_take_signed_jobs_only(pki: Path, socket_folder: Path) -> None:
    telemetry = Telemetry.off("decode")
    server = RpcServer(
        f"unix:{socket_folder}/d",
        telemetry,
        tenants=TenantVerifier.read(pki / "decode" / "tenants.pub"),
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(max_sequences=1), server._server)
    server.add(
        prefill_pb2_grpc.add_PrefillServicer_to_server, PrefillService(PrefillMetrics(telemetry.registry))
    )
    await server.start()
    job = common_pb2.Job(tenant="alice")

    async def asked(carried: Any, method: str) -> KVCommonsError:
        """What a job is answered with."""
        channel = open_channel(server.address, carried=carried)
        if method == "generate":
            call = decode_pb2_grpc.DecodeStub(channel).Generate(
                decode_pb2.GenerateRequest(job=job), timeout=scaled(10)
            )
        else:
            call = prefill_pb2_grpc.PrefillStub(channel).Compute(
                prefill_pb2.PrefillRequest(job=job), timeout=scaled(10)
            )
        try:
            with pytest.raises(Unavailable) as failed:
                await anext(aiter(call))
            return failed.value
        finally:
            await channel.close(None)

    elsewhere = (SIGNATURE_KEY, signer_of(pki).sign("alice", SESSIONS))
    for method in ("generate", "compute"):
        # The model is not there yet: that is as far as a call gets here.
        assert isinstance(await asked((signer_of(pki).carry,), method), Loading)
        assert isinstance(await asked((), method), UntrustedPeer)
        assert isinstance(await asked((lambda method, request: elsewhere,), method), UntrustedPeer)
    await server.drain(0)
