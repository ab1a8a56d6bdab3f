"""The certificate that clients see: two files, read again whenever they change, so that one that is renewed
is served without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from kvcommons.errors import InvalidInput

log = logging.getLogger(__name__)

LOOK_S = 1.0  # at the files, for a change
_PARAM = "tls_cert"


class Certificate:
    """`context` is for the connections that begin now; those that are open keep the one they began with."""

    def __init__(self, cert: str, key: str) -> None:
        """`cert`: PEM, the server's own certificate first, then those that lead to its authority. `key`: PEM,
        without a passphrase. Raises InvalidInput for files that cannot be served."""
        self._cert, self._key = cert, key
        self._seen = self._stamp()
        self.context, self.ends = _read(cert, key)

    async def follow(self, *, look_s: float = LOOK_S) -> None:
        """Reads the files whenever they are others, until cancelled. Files that cannot be served (of a
        certificate that is renewed the key may come a moment later) change nothing, and are logged once."""
        while True:
            await asyncio.sleep(look_s)
            stamp = self._stamp()
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                self.context, self.ends = await asyncio.to_thread(_read, self._cert, self._key)
            except InvalidInput as error:
                log.error("the certificate stays as it was: %s", error.message)
            else:
                log.info("the certificate is another one now", extra={"until": self.ends.isoformat()})

    def _stamp(self) -> tuple[tuple[int, ...] | None, ...]:
        """Differs where a file does; None for one that is gone."""
        return tuple(_stamp(path) for path in (self._cert, self._key))


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read(cert: str, key: str) -> tuple[ssl.SSLContext, datetime]:
    """What serves the two, and until when. Raises InvalidInput."""
    for path in (cert, key):
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise InvalidInput(
                f"the TLS file {path} cannot be read: {error.strerror}; tls_cert and tls_key name PEM files",
                param=_PARAM,
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 at least
    context.set_alpn_protocols(["http/1.1"])
    try:
        own = x509.load_pem_x509_certificate(Path(cert).read_bytes())
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        raise InvalidInput(
            f"the certificate {cert} and the key {key} cannot be served ({reason}): write a PEM certificate, "
            "and the PEM key that belongs to it",
            param=_PARAM,
        ) from error
    except ValueError as error:
        raise InvalidInput(f"{cert} holds no PEM certificate", param=_PARAM) from error
    now = datetime.now(UTC)
    if now >= own.not_valid_after_utc:
        raise InvalidInput(
            f"the certificate {cert} ended on {own.not_valid_after_utc:%Y-%m-%d}: renew it", param=_PARAM
        )
    if now < own.not_valid_before_utc:
        raise InvalidInput(
            f"the certificate {cert} begins on {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and it is "
            f"{now:%Y-%m-%d %H:%M} here: set the clock, or wait",
            param=_PARAM,
        )
    return context, own.not_valid_after_utc


def _no_passphrase() -> str:
    """Otherwise OpenSSL would ask for it at a terminal."""
    raise InvalidInput("tls_key has a passphrase, which nobody enters: write it without one", param="tls_key")
