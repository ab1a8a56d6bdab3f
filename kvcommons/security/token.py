"""A secret that all services of a stack have, where TLS is not wanted. It is never sent: both ends of a
connection prove that they have it, and each gRPC call does.

Whoever listens on the network reads all, and whoever can change what is under way there is not kept out:
that takes certificates."""

from __future__ import annotations

import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b, sha256
from pathlib import Path

from kvcommons.errors import InvalidInput, UntrustedPeer

NONCE_BYTES = 16
PROOF_BYTES = sha256().digest_size
CALL_S = 60.0  # a call's proof is good for so long, before and after: clocks differ
_SEEN_MAX = 1 << 17
_SECRET_BYTES_MIN = 16
_PARAM = "token_file"


class SharedToken:
    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"kvcommons peers").digest()

    @classmethod
    def read(cls, file: Path) -> SharedToken:
        """Raises InvalidInput."""
        try:
            secret = file.read_bytes().strip()
        except OSError as error:
            raise InvalidInput(f"token_file {file} cannot be read: {error.strerror}", param=_PARAM) from error
        if len(secret) < _SECRET_BYTES_MIN:
            raise InvalidInput(
                f"token_file {file} has {len(secret)} bytes, and a secret has at least {_SECRET_BYTES_MIN}: "
                "openssl rand -hex 32 makes one",
                param=_PARAM,
            )
        return cls(secret)

    def prove(self, *parts: bytes) -> bytes:
        """That whoever says these parts has the token."""
        mac = hmac.new(self._key, digestmod=sha256)
        for part in parts:
            mac.update(len(part).to_bytes(4, "big") + part)
        return mac.digest()

    def proves(self, proof: bytes, *parts: bytes) -> bool:
        """In a time that tells nothing."""
        return hmac.compare_digest(proof, self.prove(*parts))

    def prove_call(self, method: str, role: str, now_s: float) -> bytes:
        """What a gRPC call carries, at the time of the day `now_s`."""
        said = int(now_s * 1e3).to_bytes(8, "big") + os.urandom(NONCE_BYTES) + role.encode()
        return self.prove(b"call", method.encode(), said) + said


class CallProofs:
    """What one server has seen of calls' proofs: each is good once. On one thread."""

    def __init__(
        self, token: SharedToken, roles: tuple[str, ...], clock: Callable[[], float] = time.time
    ) -> None:
        """`roles` are what this server answers as."""
        self._token, self._roles, self._clock = token, frozenset(roles), clock
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # proof to its call's time
        self._after_s = 0.0  # calls until then are not remembered any more

    def check(self, method: str, carried: bytes) -> None:
        """Raises UntrustedPeer."""
        proof, said = carried[:PROOF_BYTES], carried[PROOF_BYTES:]
        if len(said) < 8 + NONCE_BYTES or not self._token.proves(proof, b"call", method.encode(), said):
            raise UntrustedPeer(f"{method}: the caller does not have this stack's token (token_file)")
        if said[8 + NONCE_BYTES :].decode(errors="replace") not in self._roles:
            raise UntrustedPeer(f"{method}: the call was meant for another service")
        called_s, now_s = int.from_bytes(said[:8], "big") / 1e3, self._clock()
        if abs(now_s - called_s) > CALL_S or called_s <= self._after_s:
            raise UntrustedPeer(
                f"{method}: the call says that it is {now_s - called_s:.0f} s old: set the clocks of both "
                "machines"
            )
        if proof in self._seen:
            raise UntrustedPeer(f"{method}: the call was made before")
        while self._seen:
            oldest, oldest_s = next(iter(self._seen.items()))
            if now_s - oldest_s <= 2 * CALL_S and len(self._seen) < _SEEN_MAX:
                break
            if now_s - oldest_s <= 2 * CALL_S:
                self._after_s = max(self._after_s, oldest_s)
            del self._seen[oldest]
        self._seen[proof] = called_s
