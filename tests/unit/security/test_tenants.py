"""Signatures of tenants: what is signed, how often, and what is believed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcommons.errors import InvalidInput, UntrustedPeer
from kvcommons.pb import common_pb2, decode_pb2, kvstore_pb2, ledger_pb2, prefill_pb2
from kvcommons.security.authority import make_certificates
from kvcommons.security.tenants import (
    LIFE_S,
    RENEW_S,
    SIGNATURE_KEY,
    TenantSigner,
    TenantVerifier,
    tenant_of,
)

GET = "/kvcommons.v1.Sessions/Get"
GENERATE = "/kvcommons.v1.Decode/Generate"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.8e9

    def __call__(self) -> float:
        return self.now_s


class Counted:
    """Of a key: what was signed, or verified."""

    def __init__(self, key: Any) -> None:
        self._key, self.count = key, 0

    def sign(self, message: bytes) -> bytes:
        self.count += 1
        return self._key.sign(message)  # type: ignore[no-any-return]

    def verify(self, signature: bytes, message: bytes) -> None:
        self.count += 1
        self._key.verify(signature, message)


def session(tenant: str) -> kvstore_pb2.GetSessionRequest:
    return kvstore_pb2.GetSessionRequest(tenant=tenant, session_id="s")


def carried(signer: TenantSigner, method: str, request: Any) -> bytes:
    pair = signer.carry(method, request)
    assert pair is not None
    assert pair[0] == SIGNATURE_KEY
    return pair[1]


def test_calls_for_tenants_are_those_of_sessions_and_jobs() -> None:
    job = common_pb2.Job(tenant="alice")
    assert tenant_of(GET, session("alice")) == "alice"
    assert tenant_of("/kvcommons.v1.Sessions/ListDocuments", kvstore_pb2.ListDocumentsRequest()) == ""
    assert tenant_of(GENERATE, decode_pb2.GenerateRequest(job=job)) == "alice"
    assert tenant_of("/kvcommons.v1.Prefill/Compute", prefill_pb2.PrefillRequest(job=job)) == "alice"
    for method, request in (
        ("/kvcommons.v1.Blocks/Match", kvstore_pb2.MatchRequest()),
        ("/kvcommons.v1.Prefill/Inspect", prefill_pb2.PrefillInspectRequest()),
        ("/kvcommons.v1.Ledger/Heartbeat", ledger_pb2.HeartbeatRequest()),
    ):
        assert tenant_of(method, request) is None
        TenantVerifier((KEY.public_key(),)).check(method, request, b"")


def test_every_method_of_sessions_names_its_tenant() -> None:
    service = kvstore_pb2.DESCRIPTOR.services_by_name["Sessions"]
    assert service.methods
    for method in service.methods:
        assert "tenant" in method.input_type.fields_by_name, method.name


def test_a_tenant_is_signed_once_a_minute_and_verified_once() -> None:
    clock, signing, verifying = Clock(), Counted(KEY), Counted(KEY.public_key())
    signer, verifier = TenantSigner(signing, clock), TenantVerifier((verifying,), clock)  # type: ignore[arg-type]
    for _ in range(100):
        for method, request in (
            (GET, session("alice")),
            ("/kvcommons.v1.Sessions/List", kvstore_pb2.ListSessionsRequest(tenant="alice")),
        ):
            verifier.check(method, request, carried(signer, method, request))
    assert (signing.count, verifying.count) == (1, 1)
    clock.now_s += RENEW_S
    verifier.check(GET, session("alice"), carried(signer, GET, session("alice")))
    assert (signing.count, verifying.count) == (2, 2)
    clock.now_s -= 10 * RENEW_S  # set back: what was signed is not used for ten minutes more
    verifier.check(GET, session("alice"), carried(signer, GET, session("alice")))
    assert signing.count == 3


def test_what_is_not_signed_for_this_call_is_refused() -> None:
    clock = Clock()
    signer, verifier = TenantSigner(KEY, clock), TenantVerifier((KEY.public_key(),), clock)
    good = carried(signer, GET, session("alice"))
    job = decode_pb2.GenerateRequest(job=common_pb2.Job(tenant="alice"))
    forged = TenantSigner(Ed25519PrivateKey.generate(), clock)
    longer = bytes([*good[:1], *(int.from_bytes(good[1:9], "big") + 9999).to_bytes(8, "big"), *good[9:]])
    for said, request, says in (
        (b"", "alice", "nobody has signed"),
        (good, "bob", "no key in tenant_key has signed this tenant"),
        (good, "", "no key in tenant_key has signed"),
        (good, "alic", "no key in tenant_key has signed"),
        (carried(signer, GENERATE, job), "alice", "for this service"),
        (carried(forged, GET, session("alice")), "alice", "no key in tenant_key has signed"),
        (longer, "alice", "no key in tenant_key has signed"),
        (good[:-1], "alice", "is none"),
        (b"\2" + good[1:], "alice", "is none"),
        (b"alice", "alice", "is none"),
    ):
        with pytest.raises(UntrustedPeer, match=says):
            verifier.check(GET, session(request), said)
    verifier.check(GET, session("alice"), good)
    clock.now_s += LIFE_S + 1
    with pytest.raises(UntrustedPeer, match="has been over"):  # though it is remembered
        verifier.check(GET, session("alice"), good)


def test_memory_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcommons.security.tenants._KNOWN_MAX", 8)
    signer, verifier = TenantSigner(KEY), TenantVerifier((KEY.public_key(),))
    for number in range(50):
        request = session(f"tenant {number}")
        verifier.check(GET, request, carried(signer, GET, request))
    assert len(signer._made) == len(verifier._good) == 8


def test_keys_are_read_as_they_are_made_and_others_are_named(tmp_path: Path) -> None:
    make_certificates(tmp_path / "pki", datetime.now(UTC))
    make_certificates(tmp_path / "next", datetime.now(UTC))
    signer = TenantSigner.read(tmp_path / "pki" / "router" / "tenants.key")
    successor = TenantSigner.read(tmp_path / "next" / "router" / "tenants.key")
    public = tmp_path / "pki" / "kvstore" / "tenants.pub"
    alone = TenantVerifier.read(public)
    alone.check(GET, session("alice"), carried(signer, GET, session("alice")))
    with pytest.raises(UntrustedPeer):
        alone.check(GET, session("alice"), carried(successor, GET, session("alice")))
    # Both, while one takes the other's place.
    public.write_bytes(public.read_bytes() + (tmp_path / "next" / "kvstore" / "tenants.pub").read_bytes())
    both = TenantVerifier.read(public)
    for one in (signer, successor):
        both.check(GET, session("alice"), carried(one, GET, session("alice")))
    for file, read in (
        (tmp_path / "pki" / "router" / "tls.key", TenantSigner.read),
        (public, TenantSigner.read),
        (tmp_path / "nowhere", TenantSigner.read),
        (tmp_path / "pki" / "router" / "tenants.key", TenantVerifier.read),
        (tmp_path / "pki" / "router" / "tls.crt", TenantVerifier.read),
        (tmp_path / "nowhere", TenantVerifier.read),
    ):
        with pytest.raises(InvalidInput, match="tenant_key"):
            read(file)
