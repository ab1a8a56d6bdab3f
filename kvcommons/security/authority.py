"""Makes what services show each other: an authority, a certificate for each service, and the router's key by
which it signs tenants.

    DIR/authority/ca.crt, ca.key       no service reads these
    DIR/SERVICE/ca.crt, tls.crt, tls.key
    DIR/router/tenants.key             signs
    DIR/kvstore/tenants.pub            verifies; prefill and decode have it, too

Each service gets its own folder and no other. The files of a certificate are called as in Kubernetes'
secrets.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvcommons.errors import InvalidInput
from kvcommons.files import make_private, write_whole
from kvcommons.security.roles import ROLES, TENANTS_KEY, TENANTS_PUBLIC, VERIFYING, name_of

CA, CERT, KEY = "ca.crt", "tls.crt", "tls.key"

_AUTHORITY = "authority"
_AUTHORITY_DAYS = 7300
_CERTIFICATE_DAYS = 730
_RENEW_DAYS = 365  # before its end: whoever starts a stack once a year never sees one end
_EARLY = timedelta(days=1)  # clocks differ
# Of etcd, besides its role: tools of its own call it by these.
_ETCD_NAMES = ("etcd", "localhost")
_ETCD_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def make_certificates(folder: Path, now: datetime) -> list[str]:
    """Makes what is missing and what ends soon; what was made, for people. Run it as often as you like: what
    is good stays. Raises InvalidInput where a part of an authority is lost, or nothing can be written."""
    made: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            authority = _authority(folder / _AUTHORITY, now, made)
            for service in ROLES:
                _certify(folder / service, service, authority, now, made)
            _tenant_keys(folder, made)
    except OSError as error:
        place = error.filename or folder
        raise InvalidInput(f"certificates cannot be made in {folder}: {place}: {error.strerror}") from error
    return made


def _authority(folder: Path, now: datetime, made: list[str]) -> _Authority:
    _make_folder(folder)
    cert_file, key_file = folder / CA, folder / "ca.key"
    lost = [path for path in (cert_file, key_file) if not path.exists()]
    known = [
        path for path in folder.parent.glob(f"*/{CA}") if path != cert_file
    ]  # else it was never finished
    if lost and (known or cert_file.exists()):
        raise InvalidInput(
            f"the authority's file {lost[0]} is missing: put it back; without it, remove all of "
            f"{folder.parent}, "
            "and restart all services with what is made anew"
        )
    if not lost:
        certificate = _read_certificate(cert_file)
        key = _read_key(key_file)
        if certificate is None or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidInput(f"{folder} holds no authority that this command made: choose another folder")
        if now + timedelta(days=_RENEW_DAYS) >= certificate.not_valid_after_utc:
            raise InvalidInput(
                f"the authority {cert_file} ends on {certificate.not_valid_after_utc:%Y-%m-%d}: remove "
                f"{folder.parent}, and restart all services with what is made anew"
            )
        return _Authority(certificate=certificate, key=key)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcommons authority")])
    builder = _builder(name, name, key.public_key(), now, _AUTHORITY_DAYS)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    # The key first: without its certificate it is no authority yet, and was nobody's.
    _write_key(key_file, key)
    write_whole(cert_file, certificate.public_bytes(serialization.Encoding.PEM))
    made.append(f"the authority {cert_file}")
    return _Authority(certificate=certificate, key=key)


def _certify(folder: Path, service: str, authority: _Authority, now: datetime, made: list[str]) -> None:
    _make_folder(folder)
    if not (folder / CA).exists() or (folder / CA).read_bytes() != authority.pem:
        write_whole(folder / CA, authority.pem)
    if _is_good(folder, service, authority, now):
        return
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, service)])
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = authority.certificate
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), now, _CERTIFICATE_DAYS)
        .add_extension(x509.SubjectAlternativeName(_alternatives(service)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    _write_key(folder / KEY, key)
    write_whole(folder / CERT, certificate.public_bytes(serialization.Encoding.PEM))
    made.append(f"the certificate of {service}, until {certificate.not_valid_after_utc:%Y-%m-%d}")


def _is_good(folder: Path, service: str, authority: _Authority, now: datetime) -> bool:
    """Whether what is there can be served on."""
    certificate, key = _read_certificate(folder / CERT), _read_key(folder / KEY)
    if certificate is None or key is None:
        return False
    try:
        certificate.verify_directly_issued_by(authority.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:
        return False  # of another authority, or none of ours
    lasts = now + timedelta(days=_RENEW_DAYS) < certificate.not_valid_after_utc
    belongs = certificate.public_key() == key.public_key()
    return lasts and belongs and list(names) == _alternatives(service)


def _tenant_keys(folder: Path, made: list[str]) -> None:
    file = folder / "router" / TENANTS_KEY
    key = _read_key(file)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        key = ed25519.Ed25519PrivateKey.generate()
        _write_key(file, key)
        made.append("the router's key that signs tenants")
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for service in VERIFYING:
        verifies = folder / service / TENANTS_PUBLIC
        if not verifies.exists() or verifies.read_bytes() != public:
            write_whole(verifies, public)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + timedelta(days=days))
    )


def _alternatives(service: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName(name_of(role)) for role in ROLES[service]]
    if service == "etcd":
        names += [x509.DNSName(name) for name in _ETCD_NAMES]
        names.append(x509.IPAddress(ipaddress.ip_address(_ETCD_ADDRESS)))
    return names


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _read_certificate(file: Path) -> x509.Certificate | None:
    """None where there is none."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _read_key(file: Path) -> PrivateKeyTypes | None:
    try:
        return serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_whole(file, pem, mode=0o600)


def _make_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    make_private(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Of two commands at once, the second waits for the first and finds all made."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
