"""At which kvstore the blocks of a session lie: rendezvous hashing. Pure.

Every kvstore gets a score for every key; the highest score is the key's home (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998). A kvstore that comes or goes moves only the keys that it
wins or loses.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from hashlib import blake2b


def session_key(tenant: str, session_id: str) -> bytes:
    """Also the session's key on disk: docs/formats/session-record.md."""
    name = tenant.encode()
    return struct.pack(">H", len(name)) + name + session_id.encode()


def homes_of(key: bytes, names: Collection[str]) -> list[str]:
    """All of them, home first; whoever comes next is home without those before it."""
    digest = blake2b(key, digest_size=16).digest()

    def score(name: str) -> tuple[bytes, str]:
        return blake2b(digest + name.encode(), digest_size=16).digest(), name

    return sorted(names, key=score, reverse=True)
