"""Who a block is: a keyed hash over everything its KV depends on.

    id = BLAKE2b-256(key = tenant salt, person = "kvc-block", fingerprint length u32 | model fingerprint |
    layout version u32 | parent length u32 | parent | token ids u32 ...)

All integers are little-endian; see docs/formats/block-object.md. Two blocks have one identity only if they
hold the KV of the same tokens after the same tokens, for the same model, layout and tenant. The salt comes
from the authenticated tenant, so that nobody can name, or time, a block of another tenant.

After a truncation the parent is the truncation's own identity (`truncation_id`) instead of the last block's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from kvcommons.token_ids import TOKEN_BYTES, packed

LAYOUT_VERSION = 1
ID_BYTES = 32
SALT_BYTES = 32


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """The key (32 bytes) of a tenant's block identities.

    `secret` is the deployment's, of any length but empty.
    """
    if not secret:
        raise ValueError("the salt secret is empty: tenants could compute each other's block identities")
    root = blake2b(secret, digest_size=SALT_BYTES, person=b"kvc-salt-root").digest()
    return blake2b(tenant.encode(), digest_size=SALT_BYTES, key=root, person=b"kvc-tenant").digest()


def block_id(salt: bytes, model: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity (32 bytes) of the block of `tokens` that follows `parent` (empty at the beginning).

    `model` is the model's fingerprint (32 bytes), which covers weights, config, KV dtype and block size.
    """
    if len(parent) not in (0, ID_BYTES):
        raise ValueError(f"a parent identity has 0 or {ID_BYTES} bytes, not {len(parent)}")
    digest = _before_parent(salt, model, len(parent))
    digest.update(parent)
    digest.update(packed(tokens))
    return digest.digest()


def _before_parent(salt: bytes, model: bytes, parent_bytes: int) -> blake2b:
    """What all blocks have in common whose parent is so long."""
    if len(salt) != SALT_BYTES:
        raise ValueError(f"a tenant salt has {SALT_BYTES} bytes, not {len(salt)}")
    digest = blake2b(digest_size=ID_BYTES, key=salt, person=b"kvc-block")
    digest.update(struct.pack("<I", len(model)))
    digest.update(model)
    digest.update(struct.pack("<II", LAYOUT_VERSION, parent_bytes))
    return digest


def truncation_id(
    salt: bytes, model: bytes, parent: bytes, *, head_tokens: int, dropped_tokens: int
) -> bytes:
    """What the block after a truncation has as its parent (32 bytes), so that it never matches a plain
    prompt's.

    `parent` is what it would have had without: it covers all tokens and truncations before. `head_tokens`
    were kept at the beginning, and `dropped_tokens`, in all, are out of sight after them.
    """
    if len(salt) != SALT_BYTES:
        raise ValueError(f"a tenant salt has {SALT_BYTES} bytes, not {len(salt)}")
    digest = blake2b(digest_size=ID_BYTES, key=salt, person=b"kvc-truncation")
    digest.update(struct.pack("<I", len(model)))
    digest.update(model)
    digest.update(struct.pack("<IQQI", LAYOUT_VERSION, head_tokens, dropped_tokens, len(parent)))
    digest.update(parent)
    return digest.digest()


def reusable_blocks(tokens: int, block_tokens: int) -> int:
    """How many full blocks of a sequence of `tokens` can be reused: the last token has no KV yet."""
    return (tokens - 1) // block_tokens if tokens > 0 else 0


class IdentityChain:
    """Identities of a growing sequence's full blocks, in order.

    A chain may begin in the middle of a sequence: `ids` are the identities of the blocks before, and `parent`
    is what the next block is chained from where that is not the last of them (after a truncation).
    """

    def __init__(
        self, salt: bytes, model: bytes, block_tokens: int, *, parent: bytes = b"", ids: Sequence[bytes] = ()
    ) -> None:
        if block_tokens < 1:
            raise ValueError("block_tokens must be at least 1")
        self.ids: list[bytes] = list(ids)
        self._salt = salt
        self._model = model
        self._block_tokens = block_tokens
        self._parent = parent or (self.ids[-1] if self.ids else b"")
        self._behind_parent = _before_parent(salt, model, ID_BYTES)
        self._tail = b""  # tokens of the unfinished block, as they are hashed

    @property
    def tokens(self) -> int:
        """Tokens seen so far, those of the unfinished block included."""
        return len(self.ids) * self._block_tokens + len(self._tail) // TOKEN_BYTES

    @property
    def parent(self) -> bytes:
        """What the next full block's identity is chained from."""
        return self._parent

    def truncate(self, *, head_tokens: int, dropped_tokens: int) -> None:
        """The blocks from here on see less: the next identity is chained from the truncation. At a block's
        border only."""
        if self._tail:
            raise ValueError("a sequence is truncated at a block's border")
        self._parent = truncation_id(
            self._salt, self._model, self._parent, head_tokens=head_tokens, dropped_tokens=dropped_tokens
        )

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Appends tokens; the identities of the blocks that they complete."""
        pending = memoryview(self._tail + packed(tokens))
        first_new = len(self.ids)
        size = self._block_tokens * TOKEN_BYTES
        full = len(pending) // size * size
        for start in range(0, full, size):
            self._parent = self._id_of(pending[start : start + size])
            self.ids.append(self._parent)
        self._tail = bytes(pending[full:])
        return self.ids[first_new:]

    def _id_of(self, packed: memoryview) -> bytes:
        """Of the next block."""
        if self._parent:  # what they have in common is hashed once for a chain of many thousands
            digest = self._behind_parent.copy()
            digest.update(self._parent)
        else:
            digest = _before_parent(self._salt, self._model, 0)
        digest.update(packed)
        return digest.digest()
