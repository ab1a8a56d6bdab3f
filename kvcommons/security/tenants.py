"""For whom an internal call is made: the router, which has authenticated the tenant, signs its name, and
kvstore, prefill and decode verify that with a key by which nobody can sign.

A signature is for one tenant and one gRPC service, ends within minutes, and goes with each call of that
time: it is made once a minute and verified once, whatever the number of calls. So what one service is shown
is of no use at another: a decode instance that was asked to generate for a tenant cannot read the tenant's
sessions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcommons.errors import InvalidInput, UntrustedPeer

SIGNATURE_KEY = "kvcommons-tenant-bin"
RENEW_S = 60.0  # a signature is made anew after it
LIFE_S = 300.0  # and good for so long: clocks may differ by what is between
_VERSION = b"\x01"
_EXPIRY_BYTES, _SIGNATURE_BYTES = 8, 64
_CONTEXT = b"kvcommons tenant\0"
_KNOWN_MAX = 4096  # tenants times services, at either end
_SESSIONS = "/kvcommons.v1.Sessions/"
_PARAM = "tenant_key"
_END = b"-----END PUBLIC KEY-----"


def tenant_of(method: str, request: Any) -> str | None:
    """The tenant that a call is made for: all of the session service's are (for "", the router's own), and
    those that bring a job. None: it is made for nobody."""
    if method.startswith(_SESSIONS):
        return str(request.tenant)
    job = getattr(request, "job", None)
    return None if job is None else str(job.tenant)


class TenantSigner:
    """The router's. On one thread."""

    def __init__(self, key: Ed25519PrivateKey, clock: Callable[[], float] = time.time) -> None:
        self._key, self._clock = key, clock
        # By tenant and gRPC service; and until when each is used.
        self._made: OrderedDict[tuple[str, str], tuple[bytes, float]] = OrderedDict()

    @classmethod
    def read(cls, file: Path) -> TenantSigner:
        """Raises InvalidInput."""
        try:
            key = serialization.load_pem_private_key(_bytes(file), password=None)
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"tenant_key {file} is no private key in PEM: {error}", param=_PARAM
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidInput(f"tenant_key {file} is no key of Ed25519", param=_PARAM)
        return cls(key)

    def carry(self, method: str, request: Any) -> tuple[str, bytes] | None:
        """What a call's metadata carries."""
        tenant = tenant_of(method, request)
        return None if tenant is None else (SIGNATURE_KEY, self.sign(tenant, _service(method)))

    def sign(self, tenant: str, service: str) -> bytes:
        now_s = self._clock()
        made = self._made.get((tenant, service))
        # A clock that was set back must not make one last.
        if made is not None and now_s < made[1] <= now_s + RENEW_S:
            return made[0]
        expiry = int(now_s + LIFE_S).to_bytes(_EXPIRY_BYTES, "big")
        said = _VERSION + expiry + self._key.sign(_message(tenant, service, expiry))
        _remember(self._made, (tenant, service), (said, now_s + RENEW_S))
        return said


class TenantVerifier:
    """Of a service that answers calls for tenants. On one thread."""

    def __init__(self, keys: tuple[Ed25519PublicKey, ...], clock: Callable[[], float] = time.time) -> None:
        """`keys`: any of them may have signed, as while the router's key is changed."""
        self._keys, self._clock = keys, clock
        self._good: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()

    @classmethod
    def read(cls, file: Path) -> TenantVerifier:
        """`file` has one public key in PEM, or several after each other. Raises InvalidInput."""
        keys = []
        try:
            for part in _bytes(file).strip().split(_END)[:-1]:
                key = serialization.load_pem_public_key(part + _END)
                if not isinstance(key, Ed25519PublicKey):
                    raise ValueError("a key is none of Ed25519")
                keys.append(key)
            if not keys:
                raise ValueError("it has none")
        except ValueError as error:
            raise InvalidInput(
                f"tenant_key {file} holds public keys in PEM, and these cannot be read: {error}", param=_PARAM
            ) from error
        return cls(tuple(keys))

    def check(self, method: str, request: Any, carried: bytes) -> None:
        """Raises UntrustedPeer for a call for a tenant that its caller may not speak for."""
        tenant = tenant_of(method, request)
        if tenant is None:
            return
        whose = f"{method} for the tenant {tenant!r}"
        if not carried:
            raise UntrustedPeer(f"{whose}: nobody has signed the tenant; tenant_key in [router] does")
        if len(carried) != 1 + _EXPIRY_BYTES + _SIGNATURE_BYTES or not carried.startswith(_VERSION):
            raise UntrustedPeer(f"{whose}: what is to be a signature is none: run one version")
        expiry = carried[1 : 1 + _EXPIRY_BYTES]
        late_s = self._clock() - int.from_bytes(expiry, "big")
        if late_s > 0:
            raise UntrustedPeer(
                f"{whose}: the signature has been over for {late_s:.0f} s: set the clocks of both machines"
            )
        known = (tenant, _service(method), carried)
        if known in self._good:
            return
        if not self._signed(_message(tenant, _service(method), expiry), carried[1 + _EXPIRY_BYTES :]):
            raise UntrustedPeer(f"{whose}: no key in tenant_key has signed this tenant for this service")
        _remember(self._good, known, None)

    def _signed(self, message: bytes, signature: bytes) -> bool:
        for key in self._keys:
            try:
                key.verify(signature, message)
            except InvalidSignature:
                continue
            return True
        return False


def _service(method: str) -> str:
    """Of "/kvcommons.v1.Sessions/Get"."""
    return method.rpartition("/")[0]


def _message(tenant: str, service: str, expiry: bytes) -> bytes:
    said = service.encode()
    return _CONTEXT + expiry + len(said).to_bytes(2, "big") + said + tenant.encode()


def _remember(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _KNOWN_MAX:
        kept.popitem(last=False)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"tenant_key {file} cannot be read: {error.strerror}", param=_PARAM) from error
