"""Who is asking: API keys to tenants, and each tenant's salt for block identities."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvcommons.errors import InvalidInput, Unauthenticated
from kvcommons.rblock.identity import tenant_salt

LOCAL_TENANT = "local"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_CHARS_MIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`salt` (32 bytes) keys this tenant's block identities: it comes from the deployment's secret and the
    authenticated name, never from a request."""

    name: str
    salt: bytes


class Tenants:
    """Finds the tenant of a request by its key. Without keys there is one tenant, and no key is asked for."""

    def __init__(self, keys: Mapping[str, str], secret: bytes) -> None:
        """`keys`: API key to tenant name; `secret`: the deployment's, not empty."""
        self._secret = secret
        self._tenants = {name: self._tenant(name) for name in {LOCAL_TENANT, *keys.values()}}
        # Digests of one length, so that comparing them takes the same time for any key.
        self._digests = [(_digest(key), self._tenants[name]) for key, name in keys.items()]

    @property
    def open(self) -> bool:
        """No keys are configured."""
        return not self._digests

    def named(self, name: str) -> Tenant | None:
        """None for one that has no key any more."""
        return self._tenants.get(name)

    def authenticate(self, authorization: str | None) -> Tenant:
        """`authorization` is the header's value. Raises Unauthenticated."""
        if self.open:
            return self._tenants[LOCAL_TENANT]
        if not authorization:
            raise Unauthenticated("no API key was given: send the header 'Authorization: Bearer KEY'")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("the Authorization header is not of the form 'Bearer KEY'")
        given = _digest(key.strip())
        found: Tenant | None = None
        for digest, tenant in self._digests:  # all of them, whichever fits: the time must not tell
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is not known; ask the operator of this server for one")
        return found

    def _tenant(self, name: str) -> Tenant:
        return Tenant(name=name, salt=tenant_salt(self._secret, name))


def parse_keys(text: str, source: str) -> dict[str, str]:
    """Key to tenant, from lines "tenant key"; blank lines and lines that begin with # are left out.

    Raises InvalidInput, which names `source` and the line, and never repeats a key.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{source}, line {number}"
        if len(words) != 2:
            raise InvalidInput(f"{where}: expected 'tenant key'", param="api_keys")
        name, key = words
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"{where}: a tenant's name has up to 64 letters, digits, dots, dashes and underscores",
                param="api_keys",
            )
        if len(key) < _KEY_CHARS_MIN:
            raise InvalidInput(f"{where}: a key has at least {_KEY_CHARS_MIN} characters", param="api_keys")
        if keys.get(key, name) != name:
            raise InvalidInput(f"{where}: this key belongs to another tenant already", param="api_keys")
        keys[key] = name
    if not keys:
        raise InvalidInput(
            f"{source} has no keys: add lines 'tenant key', or unset api_keys", param="api_keys"
        )
    return keys


def _digest(key: str) -> bytes:
    # Of a header that is not UTF-8 aiohttp keeps the bytes as halves of surrogate pairs.
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=32).digest()
