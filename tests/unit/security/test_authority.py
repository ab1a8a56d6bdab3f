"""What `kvcommons certificates` makes, what it leaves as it is, and which folders a service does not start
with."""

from __future__ import annotations

import logging
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from kvcommons.security import certificate as certificates
from kvcommons.security.__main__ import main
from kvcommons.security.authority import CERT, KEY, make_certificates
from kvcommons.security.certificate import ServiceCertificate, dns_names
from kvcommons.security.credentials import credentials_of
from kvcommons.security.roles import ROLES

NOW = datetime.now(UTC)


def test_what_is_made_is_private_and_read_by_each_service(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "pki", NOW)
    assert len(made) == 2 + len(ROLES)
    for path in (tmp_path / "pki").rglob("*"):
        if path.suffix == ".key":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    for service, roles in ROLES.items():
        folder = tmp_path / "pki" / service
        files = ServiceCertificate(folder, service).files()
        named = dns_names(x509.load_pem_x509_certificate(files.certificate))
        assert {f"{role}.kvcommons" for role in roles} <= set(named)
        assert (folder / "tenants.key").exists() is (service == "router")
        assert (folder / "tenants.pub").exists() is (service in ("kvstore", "prefill", "decode"))


def test_what_is_good_stays_and_what_ends_soon_is_made_anew(tmp_path: Path) -> None:
    make_certificates(tmp_path, NOW)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_certificates(tmp_path, NOW + timedelta(days=300)) == []
    assert {path: path.read_bytes() for path in before} == before

    (tmp_path / "decode" / KEY).write_bytes(before[tmp_path / "kvstore" / KEY])  # of another
    assert [one.split(",")[0] for one in make_certificates(tmp_path, NOW)] == ["the certificate of decode"]
    renewed = make_certificates(tmp_path, NOW + timedelta(days=400))
    assert len(renewed) == len(ROLES)
    assert (tmp_path / "authority" / "ca.key").read_bytes() == before[tmp_path / "authority" / "ca.key"]
    assert (tmp_path / "router" / "tenants.key").read_bytes() == before[tmp_path / "router" / "tenants.key"]


def test_a_lost_part_of_the_authority_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pki = tmp_path / "pki"
    assert main([str(pki)]) == 0
    assert "Made the authority" in capsys.readouterr().out
    kept = (pki / "authority" / "ca.key").read_bytes()
    (pki / "authority" / "ca.key").unlink()
    assert main([str(pki)]) == 2
    assert "ca.key is missing: put it back" in capsys.readouterr().err
    (pki / "authority" / "ca.key").write_bytes(kept)
    assert main([str(pki)]) == 0
    assert "is good" in capsys.readouterr().out
    for service in ROLES:  # killed between the key and its certificate, at the first start
        shutil.rmtree(pki / service)
    (pki / "authority" / "ca.crt").unlink()
    assert main([str(pki)]) == 0
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_service_does_not_start_with_what_others_would_refuse(tmp_path: Path) -> None:
    make_certificates(tmp_path / "pki", NOW)
    make_certificates(tmp_path / "ended", NOW - timedelta(days=800))
    mixed = tmp_path / "mixed"
    shutil.copytree(tmp_path / "pki" / "decode", mixed)
    shutil.copy(tmp_path / "pki" / "kvstore" / KEY, mixed / KEY)
    garbage = tmp_path / "garbage"
    shutil.copytree(tmp_path / "pki" / "decode", garbage)
    (garbage / CERT).write_bytes(b"garbage")
    for folder, says in (
        (
            tmp_path / "pki" / "kvstore",
            r"not the certificate of decode: .* there has to be decode\.kvcommons",
        ),
        (tmp_path / "ended" / "decode", "ended on"),
        (mixed, "key values mismatch"),
        (garbage, "have to be certificates in PEM"),
        (tmp_path / "nowhere", r"ca\.crt cannot be read"),
    ):
        with pytest.raises(InvalidInput, match=says):
            ServiceCertificate(folder, "decode")


def test_a_renewed_certificate_is_shown_and_a_damaged_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    caplog.set_level(logging.INFO)
    make_certificates(tmp_path, NOW - timedelta(days=100))
    own = ServiceCertificate(tmp_path / "decode", "decode")
    before = own.files()
    (tmp_path / "decode" / CERT).write_bytes(b"garbage")
    assert own.files() is before
    assert own.files() is before
    assert caplog.text.count("stays as it was") == 1
    make_certificates(tmp_path, NOW)
    assert own.files().ends > before.ends
    assert "another one now" in caplog.text


def test_a_process_has_one_way_to_be_known(tmp_path: Path) -> None:
    make_certificates(tmp_path, NOW)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    listen, folder = "unix:/a", str(tmp_path / "decode")
    assert not credentials_of(Node(listen=listen), "decode").keeps_out
    assert credentials_of(Node(listen=listen, certificates=folder), "decode").certificate
    assert credentials_of(Node(listen=listen, token_file=str(token)), "decode").token
    with pytest.raises(InvalidInput, match="one of them"):
        credentials_of(Node(listen=listen, certificates=folder, token_file=str(token)), "decode")
    token.write_text("short")
    with pytest.raises(InvalidInput, match="at least 16"):
        credentials_of(Node(listen=listen, token_file=str(token)), "decode")
