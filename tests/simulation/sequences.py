"""Blocks whose bytes follow from their identity, in shapes that slots and pages make awkward."""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128

from services.kvstore.tier import PAGE_BYTES, BlockShape

# A page with a gap at its end; layers that end where pages do, or in the middle of them.
SMALL = BlockShape(model=b"s" * 32, layers=2, object_bytes=1500)
LARGE = BlockShape(model=b"l" * 32, layers=4, object_bytes=PAGE_BYTES // 2)
ODD = BlockShape(model=b"o" * 32, layers=3, object_bytes=3500)
RUN_BLOCKS = 5

SEQUENCES = [
    (shape, [shake_128(f"{name} {index} {shape.layers}".encode()).digest(32) for index in range(RUN_BLOCKS)])
    for name in range(3)
    for shape in (SMALL, LARGE, ODD)
]


@lru_cache(maxsize=4096)
def payload(block_id: bytes, layer: int, size: int) -> bytes:
    return shake_128(block_id + bytes([layer])).digest(size)
