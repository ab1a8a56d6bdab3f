"""Whom a gRPC server answers on a network: services of its stack, by certificate or by token."""

from __future__ import annotations

from typing import Any, Protocol

import grpc
import grpc.aio

from kvcommons.errors import UntrustedPeer
from kvcommons.security.certificate import CertificateFiles, ServiceCertificate
from kvcommons.security.credentials import Credentials
from kvcommons.security.roles import ROLES, Role, name_of, names_a_service
from kvcommons.security.token import CallProofs, SharedToken

PROOF_KEY = "kvcommons-peer-bin"
# Whoever asks whether a service is well may have no token: a probe of a cluster has none.
_HEALTH = "/grpc.health."
_NAMES = "x509_subject_alternative_name"


class CallerCheck(Protocol):
    """What a call has to pass before its handler sees it."""

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any], carried: bytes) -> None:
        """`carried` is what the call's metadata has under PROOF_KEY. Raises UntrustedPeer."""
        ...


class ByCertificate:
    """TLS has verified the authority; it may have signed certificates of others than services, too."""

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any], carried: bytes) -> None:
        if not names_a_service(names_shown(context)):
            raise UntrustedPeer(f"{method}: the caller's certificate is no service's of this stack")


def names_shown(context: grpc.aio.ServicerContext[Any, Any]) -> frozenset[str]:
    """DNS names of the certificate that the caller has shown; of one by token or over a socket there are
    none."""
    return frozenset(name.decode(errors="replace") for name in context.auth_context().get(_NAMES, ()))


class ByToken:
    def __init__(self, token: SharedToken, service: str) -> None:
        self._proofs = CallProofs(token, ROLES.get(service, ()))

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any], carried: bytes) -> None:
        if not method.startswith(_HEALTH):
            self._proofs.check(method, carried)


def caller_check_of(credentials: Credentials, service: str) -> CallerCheck | None:
    if credentials.certificate is not None:
        return ByCertificate()
    if credentials.token is not None:
        return ByToken(credentials.token, service)
    return None


def server_credentials(certificate: ServiceCertificate) -> grpc.ServerCredentials:
    """A certificate that is renewed is what the next connections see."""
    shown = certificate.files()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """On threads of gRPC's, for each handshake; None: no other than before."""
        nonlocal shown
        files = certificate.files()
        if files is shown:
            return None
        shown = files
        return _configuration(files)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        renewed,  # type: ignore[arg-type]  # the stubs do not know of None
        require_client_authentication=True,
    )


def channel_credentials(
    files: CertificateFiles, role: Role
) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]:
    """And options of a channel, by which the other end has to show that it has the role."""
    credentials = grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
    return credentials, (("grpc.ssl_target_name_override", name_of(role)),)


def _configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authority)
