"""Who is asking: API keys to tenants and roles, and each tenant's salt for block identities."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from kvcommons.errors import PermissionDenied, Unauthenticated
from kvcommons.rblock.identity import tenant_salt
from services.router.http.keys import Grant

LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`salt` (32 bytes) keys this tenant's block identities: it comes from the deployment's secret and the
    authenticated name, never from a request."""

    name: str
    salt: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever sent a request, by its key. `operator`: may see what is of the whole stack."""

    tenant: Tenant
    operator: bool

    def check_operator(self, path: str) -> None:
        """Raises PermissionDenied."""
        if not self.operator:
            raise PermissionDenied(
                f"{path} is of the whole stack, and needs an operator's key: this one is of the tenant "
                f"{self.tenant.name!r} only. The operator of this server adds the word 'operator' behind a "
                "key in the file of keys (api_keys), 'tenant key operator'"
            )


class Tenants:
    """Finds the caller of a request by its key. Without keys there is one tenant, no key is asked for, and
    everybody is the operator."""

    def __init__(self, keys: Mapping[str, Grant], secret: bytes) -> None:
        """`keys`: what each API key gives; `secret`: the deployment's, not empty."""
        self._secret = secret
        self.set_keys(keys)

    def set_keys(self, keys: Mapping[str, Grant]) -> None:
        """From now on. Requests under way go on."""
        self.keys = dict(keys)
        names = {LOCAL_TENANT, *(grant.tenant for grant in keys.values())}
        self._tenants = {name: Tenant(name=name, salt=tenant_salt(self._secret, name)) for name in names}
        # Digests of one length, so that comparing them takes the same time for any key.
        self._digests = [
            (_digest(key), Caller(tenant=self._tenants[grant.tenant], operator=grant.operator))
            for key, grant in keys.items()
        ]

    @property
    def open(self) -> bool:
        """No keys are configured."""
        return not self._digests

    def named(self, name: str) -> Tenant | None:
        """None for one that has no key any more."""
        return self._tenants.get(name)

    def authenticate(self, authorization: str | None) -> Caller:
        """`authorization` is the header's value. Raises Unauthenticated."""
        if self.open:
            return Caller(tenant=self._tenants[LOCAL_TENANT], operator=True)
        if not authorization:
            raise Unauthenticated("no API key was given: send the header 'Authorization: Bearer KEY'")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("the Authorization header is not of the form 'Bearer KEY'")
        given = _digest(key.strip())
        found: Caller | None = None
        for digest, caller in self._digests:  # all of them, whichever fits: the time must not tell
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise Unauthenticated("the API key is not known; ask the operator of this server for one")
        return found


def _digest(key: str) -> bytes:
    # Of a header that is not UTF-8 aiohttp keeps the bytes as halves of surrogate pairs.
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=32).digest()
