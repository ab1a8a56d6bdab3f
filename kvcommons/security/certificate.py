"""The certificate of this process's service, and the authority that signed those of others: three files of
one folder, read again when they change, so that what is renewed is shown without a restart."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from kvcommons.errors import InvalidInput
from kvcommons.security.authority import CA, CERT, KEY
from kvcommons.security.roles import own_name

log = logging.getLogger(__name__)

LOOK_S = 1.0  # at the files, at most so often
_PARAM = "certificates"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """What was in the folder at one time. PEM; `client` and `server` are for the data plane's connections."""

    authority: bytes
    certificate: bytes
    key: bytes
    client: ssl.SSLContext
    server: ssl.SSLContext
    ends: datetime


class ServiceCertificate:
    """For any thread."""

    def __init__(self, folder: Path, service: str) -> None:
        """`folder` has ca.crt, tls.crt and tls.key. Raises InvalidInput for files that cannot be served, and
        for a certificate that is not this service's."""
        self._folder, self._service = folder, service
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._seen = self._stamps()
        self._files = self._read()

    def files(self) -> CertificateFiles:
        """As they are now. Files that cannot be served (of a certificate that is being renewed one comes
        after the other) change nothing, and are logged once."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s < LOOK_S:
                return self._files
            self._looked_s = now_s
            stamps = self._stamps()
            if stamps == self._seen:
                return self._files
            self._seen = stamps
            try:
                self._files = self._read()
            except InvalidInput as error:
                log.error("the certificate stays as it was: %s", error.message)
            else:
                log.info("the certificate is another one now", extra={"until": self._files.ends.isoformat()})
            return self._files

    def _stamps(self) -> tuple[tuple[int, ...] | None, ...]:
        """Differs where a file does; None for one that is not there."""
        return tuple(_stamp(self._folder / name) for name in (CA, CERT, KEY))

    def _read(self) -> CertificateFiles:
        authority, certificate, key = (self._bytes(name) for name in (CA, CERT, KEY))
        cert_file, key_file = str(self._folder / CERT), str(self._folder / KEY)
        try:
            own = x509.load_pem_x509_certificate(certificate)
            x509.load_pem_x509_certificates(authority)
            contexts = []
            for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
                context = ssl.SSLContext(purpose)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=authority.decode("ascii"))
                context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
                contexts.append(context)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).replace("_", " ").lower()
            raise InvalidInput(
                f"{cert_file} and {key_file} cannot be served ({reason}): the key has to belong to the "
                "certificate",
                param=_PARAM,
            ) from error
        except ValueError as error:
            raise InvalidInput(
                f"{self._folder}: {CA} and {CERT} have to be certificates in PEM: {error}", param=_PARAM
            ) from error
        self._check(own, datetime.now(UTC))
        client, server = contexts
        # A ticket would come unasked, between two exchanges, where only a peer's end may be read.
        server.num_tickets = 0
        return CertificateFiles(
            authority=authority,
            certificate=certificate,
            key=key,
            client=client,
            server=server,
            ends=own.not_valid_after_utc,
        )

    def _check(self, own: x509.Certificate, now: datetime) -> None:
        """Raises InvalidInput for one that others would refuse."""
        file = self._folder / CERT
        names = dns_names(own)
        wanted = own_name(self._service)
        if wanted not in names:
            raise InvalidInput(
                f"{file} is not the certificate of {self._service}: among its DNS names "
                f"({', '.join(names) or 'none'})"
                f" there has to be {wanted}; docs/security.md lists the names of each service",
                param=_PARAM,
            )
        if now >= own.not_valid_after_utc:
            raise InvalidInput(
                f"{file} ended on {own.not_valid_after_utc:%Y-%m-%d}: renew it (kvcommons certificates)",
                param=_PARAM,
            )
        if now < own.not_valid_before_utc:
            raise InvalidInput(
                f"{file} begins on {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and it is "
                f"{now:%Y-%m-%d %H:%M} here: set the clock, or wait",
                param=_PARAM,
            )

    def _bytes(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise InvalidInput(
                f"certificates names a folder with {CA}, {CERT} and {KEY}, and {self._folder / name} "
                f"cannot be read: {error.strerror}",
                param=_PARAM,
            ) from error


def dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.DNSName)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _no_passphrase() -> str:
    """Otherwise OpenSSL would ask for it at a terminal."""
    raise InvalidInput(f"{KEY} has a passphrase, which nobody enters: write it without one", param=_PARAM)
