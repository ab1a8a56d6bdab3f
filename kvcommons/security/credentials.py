"""What a process shows to services over the network, and what it wants of them: certificates, a token, or
nothing.

Sockets of one host need none of it: whoever reaches those runs as the same account."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.token import SharedToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """At most one of certificate and token; without both whoever reaches a port is let in."""

    certificate: ServiceCertificate | None = None
    token: SharedToken | None = None
    private_network: bool = False  # what can show neither may be used, too

    @property
    def keeps_out(self) -> bool:
        """Whether anybody is."""
        return self.certificate is not None or self.token is not None


OPEN = Credentials()


def credentials_of(node: Node, service: str) -> Credentials:
    """Raises InvalidInput for files that cannot be used."""
    if node.certificates is not None and node.token_file is not None:
        raise InvalidInput(
            "certificates and token_file are both set: services know each other by one of them",
            param="token_file",
        )
    certificate = token = None
    if node.certificates is not None:
        certificate = ServiceCertificate(Path(node.certificates), service)
    if node.token_file is not None:
        token = SharedToken.read(Path(node.token_file))
    return Credentials(certificate=certificate, token=token, private_network=node.private_network)
