"""The checksum of an object. It covers the identity, so that right bytes in the wrong place fail it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


def checksum(block_id: bytes, layer: int, *payload: Buffer) -> int:
    """xxh3-64 over block identity | layer u32 LE | payload, in contiguous buffers."""
    digest = xxhash.xxh3_64(block_id)
    digest.update(struct.pack("<I", layer))
    for part in payload:
        digest.update(part)
    return digest.intdigest()
