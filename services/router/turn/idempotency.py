"""Requests that come again under one Idempotency-Key, as far as this router knows. Decisions only: the time
is passed in.

A key is its tenant's, and stands for one request: method, path, session and body. The answer of a turn that
is in a session is kept by the session's record (replayed.py), for as long as the session is; of one that is
in none it is here, for a while, as long as there is room."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcommons.errors import IdempotencyInProgress, IdempotencyKeyReused, InvalidInput

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotent-Replayed"
KEY_CHARS_MAX = 255  # Stripe's
# Printable ASCII.
KEY_SCHEMA = {"type": "string", "minLength": 1, "maxLength": KEY_CHARS_MAX, "pattern": "^[ -~]+$"}
_DIGEST_BYTES = 16
_ENTRY_BYTES = 512  # of one, besides its answer
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """`key` and `request` are digests: of the client's key, and of what it came with."""

    tenant: str
    key: bytes
    request: bytes

    @classmethod
    def of(cls, tenant: str, given: Sequence[str], parts: Sequence[bytes]) -> RequestKey:
        """`given`: the header's values; `parts`: of the request. Raises InvalidInput."""
        (key,) = given if len(given) == 1 else ("",)
        if not 0 < len(key) <= KEY_CHARS_MAX or not key.isascii() or not key.isprintable():
            raise InvalidInput(
                f"{HEADER} is one text of 1 to {KEY_CHARS_MAX} printable ASCII characters, as a UUID is",
                param=HEADER,
            )
        request = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvc-request")
        for part in parts:
            request.update(len(part).to_bytes(8, "little") + part)
        named = f"{len(tenant)}:{tenant}:{key}".encode()
        return cls(
            tenant=tenant,
            key=hashlib.blake2b(named, digest_size=_DIGEST_BYTES, person=b"kvc-key").digest(),
            request=request.digest(),
        )

    def check_same(self, request: bytes) -> None:
        """Raises IdempotencyKeyReused where the key stood for another request."""
        if request != self.request:
            raise IdempotencyKeyReused(
                f"this {HEADER} came with another request before: repeat that one as it was, or send a "
                "new key",
                param=HEADER,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """`body` None: the session's record has it."""

    content_type: str = ""
    body: bytes | None = None


@dataclass(slots=True, kw_only=True)
class _Entry:
    request: bytes
    answer: KeptAnswer | None = None  # None: under way
    until_s: float = 0.0

    @property
    def size(self) -> int:
        body = self.answer.body if self.answer is not None else None
        return _ENTRY_BYTES + len(body or b"")


@dataclass(slots=True)
class _OfTenant:
    entries: OrderedDict[bytes, _Entry] = field(default_factory=OrderedDict)  # oldest first
    size: int = 0


class KeptAnswers:
    """Where all of it is more than `bytes_max`, the oldest answer of the tenant that has most goes."""

    def __init__(self, *, bytes_max: int, kept_s: float) -> None:
        self._bytes_max = bytes_max
        self._kept_s = kept_s
        self._tenants: dict[str, _OfTenant] = {}

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(one.size for one in self._tenants.values())

    def begin(self, key: RequestKey, now_s: float) -> KeptAnswer | None:
        """The answer that is to be given again; None: it has to be found, or computed, and `end` follows.
        Raises IdempotencyInProgress, IdempotencyKeyReused."""
        self._forget_old(now_s)
        of_tenant = self._tenants.get(key.tenant, _OfTenant())
        entry = of_tenant.entries.get(key.key)
        if entry is not None:
            key.check_same(entry.request)
            if entry.answer is None:
                raise IdempotencyInProgress(
                    f"the request of this {HEADER} is under way: its answer is there when that has ended",
                    param=HEADER,
                    retry_after_ms=_RETRY_MS,
                )
            if entry.answer.body is not None:
                return entry.answer
        self._remove(key)
        self._put(key, _Entry(request=key.request))
        return None

    def end(self, key: RequestKey, answer: KeptAnswer | None, now_s: float) -> None:
        """The request has come to its end. None: it failed, and may be tried again."""
        self._remove(key)
        if answer is not None:
            self._put(key, _Entry(request=key.request, answer=answer, until_s=now_s + self._kept_s))
            self._make_room()

    def _put(self, key: RequestKey, entry: _Entry) -> None:
        of_tenant = self._tenants.setdefault(key.tenant, _OfTenant())
        of_tenant.entries[key.key] = entry
        of_tenant.size += entry.size

    def _remove(self, key: RequestKey) -> None:
        of_tenant = self._tenants.get(key.tenant)
        entry = of_tenant.entries.pop(key.key, None) if of_tenant is not None else None
        if of_tenant is not None and entry is not None:
            of_tenant.size -= entry.size
            if not of_tenant.entries:
                del self._tenants[key.tenant]

    def _forget_old(self, now_s: float) -> None:
        """All are kept equally long: those of a tenant end in their order, but for what is under way."""
        for tenant, of_tenant in list(self._tenants.items()):
            for key, entry in list(of_tenant.entries.items()):
                if entry.answer is not None and entry.until_s > now_s:
                    break
                if entry.answer is not None:
                    self._remove(RequestKey(tenant=tenant, key=key, request=b""))

    def _make_room(self) -> None:
        while self.size > self._bytes_max:
            for tenant, of_tenant in sorted(self._tenants.items(), key=lambda one: -one[1].size):
                oldest = next((key for key, entry in of_tenant.entries.items() if entry.answer), None)
                if oldest is not None:
                    self._remove(RequestKey(tenant=tenant, key=oldest, request=b""))
                    break
            else:
                return
