"""What a process shows to services over the network, and what it wants of them: certificates, a token, or
nothing.

Sockets of one host need none of it: whoever reaches those runs as the same account."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from kvcommons.config import Node
from kvcommons.errors import InvalidInput
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.token import SharedToken

# None: whoever reaches a port is let in.
Credentials: TypeAlias = ServiceCertificate | SharedToken | None


def credentials_of(node: Node, service: str) -> Credentials:
    """Raises InvalidInput for files that cannot be used."""
    if node.certificates is not None and node.token_file is not None:
        raise InvalidInput(
            "certificates and token_file are both set: services know each other by one of them",
            param="token_file",
        )
    if node.certificates is not None:
        return ServiceCertificate(Path(node.certificates), service)
    if node.token_file is not None:
        return SharedToken.read(Path(node.token_file))
    return None
